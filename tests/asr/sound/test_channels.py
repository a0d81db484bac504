"""Sound of any kind comes at the rate of telephone speech, or is refused by name."""

import errno
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile

from lightning_adpsgd.asr.sound import channels, sphere
from lightning_adpsgd.asr.sound.audio import SoundFile
from lightning_adpsgd.asr.sound.channels import ChannelError, read_channel, read_facts
from tests.asr.tiny import noise, write_sphere


def _write(path: Path, samples: np.ndarray, rate: int) -> Path:
    soundfile.write(path, samples, rate, subtype="PCM_16")
    return path


def _tone(rate: int, hertz: float = 440.0, seconds: float = 1.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 44100, 48000])
@pytest.mark.parametrize("ending", ["wav", "flac"])
def test_a_tone_of_any_rate_is_the_same_tone(tmp_path: Path, rate: int, ending: str):
    path = _write(tmp_path / f"tone.{ending}", _tone(rate), rate)
    found = read_channel(path, 0)
    assert found.dtype == np.float32
    assert len(found) == 8000
    inside = slice(500, 7500)  # the ends ring
    np.testing.assert_allclose(found[inside], _tone(8000)[inside], atol=0.01)


def test_channels_are_apart(tmp_path: Path):
    both = np.stack([_tone(16000), _tone(16000, 1000.0)], axis=1)
    path = _write(tmp_path / "both.wav", both, 16000)
    found = [read_channel(path, channel) for channel in (0, 1)]
    np.testing.assert_allclose(
        found[1][500:7500], _tone(8000, 1000.0)[500:7500], atol=0.01
    )
    assert np.abs(found[0] - found[1]).max() > 0.5
    with pytest.raises(ChannelError, match="`channel` must be below 2, got 2"):
        read_channel(path, 2)


def test_sphere_goes_its_own_way(tmp_path: Path):
    path = write_sphere(tmp_path / "call.sph", noise(1.0))
    np.testing.assert_array_equal(read_channel(path, 1), sphere.read_channel(path, 1))


@pytest.mark.parametrize("rate", [11025, 16000])
def test_sphere_of_a_higher_rate_is_brought_down(tmp_path: Path, rate: int):
    path = write_sphere(tmp_path / "tone.sph", _tone(rate), rate, "PCM_16")
    assert read_facts(path) == (1.0, 1, rate)
    found = read_channel(path, 0)
    assert (found.dtype, len(found)) == (np.float32, 8000)
    inside = slice(500, 7500)
    np.testing.assert_allclose(found[inside], _tone(8000)[inside], atol=0.01)
    with pytest.raises(ChannelError, match="`channel` must be below 1, got 1"):
        read_channel(path, 1)


def test_what_no_one_could_read_of_sphere_is_told_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    low = write_sphere(tmp_path / "low.sph", _tone(4000), 4000)
    with pytest.raises(ChannelError, match=r"low\.sph: expected at least 8000 Hz"):
        read_facts(low)
    path = write_sphere(tmp_path / "call.sph", noise(1.0))
    whole = path.read_bytes()
    path.write_bytes(whole[:5000])
    with pytest.raises(ChannelError, match=r"call\.sph: truncated: .* says 8000"):
        read_facts(path)
    shortened = b"-s26 ulaw,embedded-shorten-v2.00"
    header = whole[:1024].replace(b"-s4 ulaw", shortened).ljust(1024)[:1024]
    path.write_bytes(header + whole[1024:])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ChannelError, match=r"call\.sph: .* needs the program sph2pipe"):
        read_facts(path)


def test_a_lower_rate_is_refused(tmp_path: Path):
    path = _write(tmp_path / "low.wav", _tone(4000), 4000)
    with pytest.raises(
        ChannelError, match=r"low\.wav: expected at least 8000 Hz, got 4000"
    ):
        read_channel(path, 0)


@pytest.mark.parametrize("content", [b"", b"no sound at all"])
def test_what_is_no_sound_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "odd.flac"
    path.write_bytes(content)
    with pytest.raises(
        ChannelError, match=r"odd\.flac: cannot be read: [^:]+; copy it again"
    ):
        read_facts(path)


def test_a_missing_file_is_named(tmp_path: Path):
    said = r"gone\.wav: cannot be read: No such file or directory; correct its path"
    with pytest.raises(ChannelError, match=said):
        read_channel(tmp_path / "gone.wav", 0)


def test_sound_that_was_cut_short_is_refused(tmp_path: Path):
    path = _write(tmp_path / "cut.flac", noise(2.0, channels=1), 16000)
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(ChannelError, match=r"cut\.flac"):
        read_channel(path, 0)


def test_sound_that_ends_before_its_header_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = _write(tmp_path / "a.flac", noise(1.0, channels=1), 16000)
    whole = soundfile.read(path, dtype="float32", always_2d=True)[0]
    blocks = iter([whole[:5000], whole[5000:-9], whole[:0]])
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: next(blocks))
    with pytest.raises(ChannelError, match=r"a\.flac: truncated: its header says 8000"):
        read_channel(path, 0)


@pytest.mark.parametrize("said", [8009, 8000 + (1 << 35)])  # the latter: 128 GiB
def test_no_memory_is_requested_for_what_a_header_says(tmp_path: Path, said: int):
    path = _write(tmp_path / "a.flac", noise(1.0, channels=1), 16000)
    content = bytearray(path.read_bytes())
    # The last 36 bits of 64 that begin 18 bytes into the file are the length.
    facts = int.from_bytes(content[18:26])
    assert facts & ((1 << 36) - 1) == 8000
    content[18:26] = (facts - 8000 + said).to_bytes(8)
    path.write_bytes(content)
    with pytest.raises(ChannelError, match=r"a\.flac: .*; copy it again"):
        read_channel(path, 0)


@pytest.mark.parametrize("rate", [8001, 22_254, 123_457])
def test_a_rate_that_would_need_gigabytes_is_refused(tmp_path: Path, rate: int):
    path = _write(tmp_path / "odd.wav", noise(1.0, channels=1), rate)
    for read in (read_facts, SoundFile):
        with pytest.raises(ValueError, match=rf"odd\.wav: its rate of {rate} Hz is in"):
            read(path)


FORMATS = {
    "wav": ("WAV", "PCM_16"),
    "rf64": ("RF64", "PCM_16"),
    "w64": ("W64", "PCM_16"),
    "aiff": ("AIFF", "PCM_16"),
    "au": ("AU", "PCM_16"),
    "ogg": ("OGG", "VORBIS"),
}


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("missing", [60, 0.4])
def test_a_header_longer_than_its_file_is_refused_before_anything_is_read(
    tmp_path: Path, ending: str, missing: float
):
    kind, subtype = FORMATS[ending]
    path = tmp_path / f"cut.{ending}"
    soundfile.write(path, noise(6.0, channels=1), 8000, format=kind, subtype=subtype)
    assert read_facts(path).seconds == pytest.approx(6.0)
    whole = path.read_bytes()
    lost = round(missing * len(whole)) if missing < 1 else int(missing)
    path.write_bytes(whole[:-lost])
    for read in (read_facts, SoundFile):
        with pytest.raises(ValueError, match=rf"cut\.{ending}: cut short: "):
            read(path)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_of_several_ogg_streams_in_a_row_not_the_first_alone_is_read(
    tmp_path: Path, subtype: str
):
    parts = [tmp_path / name for name in ("a.ogg", "b.ogg")]
    for path, seconds in zip(parts, (6.0, 3.0), strict=True):
        sound = noise(seconds, channels=1)
        soundfile.write(path, sound, 8000, format="OGG", subtype=subtype)
        assert read_facts(path).seconds == pytest.approx(seconds)
    both = tmp_path / "both.ogg"
    first, second = (path.read_bytes() for path in parts)
    both.write_bytes(first + second)
    for read in (read_facts, SoundFile):
        with pytest.raises(ValueError, match=r"both\.ogg: several streams of Ogg in a"):
            read(both)


def test_a_disk_that_fails_at_the_end_of_an_ogg_file_is_told_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "a.ogg"
    soundfile.write(path, noise(1.0, channels=1), 8000, format="OGG")
    broken = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(channels, "has_several_streams", broken)
    with pytest.raises(ChannelError, match=r"a\.ogg: cannot be read: Input/output err"):
        read_facts(path)


def _page(stream: bytes, flags: int) -> bytes:
    start = b"OggS\0" + bytes([flags]) + bytes(8) + stream + bytes(4)
    end, checksum = b"\1\7\x80theora", 0
    for byte in start + bytes(4) + end:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = checksum << 1 ^ (checksum >> 31) * 0x104C11DB7
    return start + checksum.to_bytes(4, "little") + end


def test_a_second_ogg_stream_that_begins_with_the_first_leaves_none_unread(
    tmp_path: Path,
):
    """As the picture of a film, which may end after the sound."""
    path = tmp_path / "film.ogg"
    sound = noise(6.0, channels=1)
    soundfile.write(path, sound, 8000, format="OGG", subtype="VORBIS")
    content = path.read_bytes()
    first = content.index(b"OggS", 1)
    picture = [_page(b"film", flags) for flags in (2, 0, 4)]
    whole = content[:first] + picture[0] + content[first:] + b"".join(picture[1:])
    path.write_bytes(whole)
    assert len(soundfile.read(path)[0]) == len(sound)
    assert read_facts(path).seconds == SoundFile(path).duration_s == 6.0
    other = tmp_path / "other.ogg"
    soundfile.write(other, sound, 8000, format="OGG", subtype="VORBIS")
    path.write_bytes(whole + other.read_bytes())
    with pytest.raises(ChannelError, match=r"film\.ogg: several streams of Ogg in a"):
        read_facts(path)


def test_flac_whose_header_has_no_length_is_refused(tmp_path: Path):
    path = _write(tmp_path / "piped.flac", _tone(8000), 8000)
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0  # 36 bits of STREAMINFO: samples
    content[22:26] = bytes(4)
    path.write_bytes(content)
    for read in (read_facts, SoundFile):
        with pytest.raises(ValueError, match=r"piped\.flac: its header has no length"):
            read(path)


@pytest.mark.parametrize("said", [0, 0x7FFFF024, 0xFFFFFFFF])
def test_a_length_that_a_program_on_a_pipe_could_not_know_is_no_sign(
    tmp_path: Path, said: int
):
    path = _write(tmp_path / "piped.wav", _tone(8000), 8000)
    content = bytearray(path.read_bytes())
    content[4:8] = said.to_bytes(4, "little")
    if said:  # libsndfile itself takes no data of 0 bytes
        content[40:44] = (said - 36).to_bytes(4, "little")
    path.write_bytes(content)
    assert len(read_channel(path, 0)) == 8000
