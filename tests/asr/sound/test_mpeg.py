"""MP3 files whose length libsndfile does not know: their end would be left unread."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from lightning_adpsgd.asr.sound.audio import AudioError, SoundFile
from lightning_adpsgd.asr.sound.channels import ChannelError, read_facts
from lightning_adpsgd.asr.sound.mpeg import is_longer

SECONDS = 3
RATES = (8000, 11025, 22050, 32000, 44100)


def write_mp3(path: Path, rate: int, varies: bool = True, num_channels: int = 1) -> int:
    """Noise that grows quiet; the length of its first frame in bytes."""
    random = np.random.default_rng(0)
    samples = 0.1 * random.standard_normal((SECONDS * rate, num_channels))
    samples[len(samples) // 2 :] *= 0.001
    mode = "VARIABLE" if varies else "CONSTANT"
    kind = {"format": "MP3", "bitrate_mode": mode, "compression_level": 0.5}
    with soundfile.SoundFile(path, "w", rate, num_channels, **kind) as file:
        file.write(samples)
    content = path.read_bytes()
    return content.find(content[:2], 4)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("num_channels", [1, 2])
def test_a_whole_file_is_as_long_as_it_says(
    tmp_path: Path, rate: int, varies: bool, num_channels: int
):
    path = tmp_path / "a.mp3"
    write_mp3(path, rate, varies, num_channels)
    assert read_facts(path).seconds == SECONDS
    assert SoundFile(path).num_samples == SECONDS * rate
    tag = b"ID3\x04\x00\x00\x00\x00\x0f\x76" + b"\xff\xfb\x90\x64" * 500 + b"\0" * 38
    path.write_bytes(tag + path.read_bytes())
    assert not is_longer(path, SECONDS * rate)


@pytest.mark.parametrize("rate", RATES)
def test_files_that_were_put_together_are_refused(tmp_path: Path, rate: int):
    path = tmp_path / "a.mp3"
    write_mp3(path, rate)
    path.write_bytes(2 * path.read_bytes())
    assert soundfile.info(path).duration == SECONDS
    with pytest.raises(
        ChannelError, match=r"a\.mp3: the length .* `ffmpeg -i old\.mp3"
    ):
        read_facts(path)
    with pytest.raises(AudioError, match=r"a\.mp3: the length .* `ffmpeg -i old\.mp3"):
        SoundFile(path)


@pytest.mark.parametrize("rate", RATES)
def test_a_file_of_varying_bitrate_that_does_not_note_its_length_is_refused(
    tmp_path: Path, rate: int
):
    path = tmp_path / "a.mp3"
    first = write_mp3(path, rate)
    path.write_bytes(path.read_bytes()[first:])
    assert soundfile.info(path).duration < SECONDS / 2
    told = r"a\.mp3: the length .* to a pipe with varying .* `ffmpeg -i old\.mp3"
    with pytest.raises(ChannelError, match=told):
        read_facts(path)


def test_what_is_no_mp3_has_no_frames(tmp_path: Path):
    path = tmp_path / "a"
    for content in (b"", b"\xff", b"\xff\xfb\x90", b"\xff\xfb\x90\x64" * 3, bytes(999)):
        path.write_bytes(content)
        assert not is_longer(path, 0)
