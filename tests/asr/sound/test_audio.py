"""Any sound becomes the frames of the whole file; what cannot is told why."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torchaudio.functional import resample

from lightning_adpsgd.asr.sound.audio import AudioError, SoundFile
from lightning_adpsgd.asr.sound.features import log_mel
from tests.asr.tiny import noise, voice, write_sphere

SECONDS = 5.3


def write(path: Path, rate: int, samples: np.ndarray, subtype: str = "PCM_16") -> Path:
    soundfile.write(str(path), samples, rate, subtype=subtype)
    return path


def frames_of(sound: SoundFile, channel: int, block_s: int = 30) -> np.ndarray:
    return np.concatenate(list(sound.log_mel(channel, 40, block_s)))


@pytest.mark.parametrize("block_s", [1, 2, 30])
def test_frames_in_blocks_are_those_of_the_whole_file(tmp_path: Path, block_s: int):
    samples = noise(SECONDS).astype(np.float32)
    path = write(tmp_path / "a.wav", 8000, samples, "FLOAT")
    sound = SoundFile(path)
    assert sound.num_channels == 2
    for channel in range(2):
        found = frames_of(sound, channel, block_s)
        assert len(found) == 530
        expected = log_mel(samples[:, channel]).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("rate", [11_025, 16_000, 22_050, 44_100])
def test_other_rates_are_brought_to_8_khz_without_a_seam(tmp_path: Path, rate: int):
    samples = np.random.default_rng(0).normal(0, 0.1, round(SECONDS * rate))
    path = write(tmp_path / "a.flac", rate, samples.clip(-1, 1))
    stored, _ = soundfile.read(str(path), dtype="float32")
    whole = resample(torch.from_numpy(stored), rate, 8000).numpy()
    found = frames_of(SoundFile(path), 0, 1)
    np.testing.assert_allclose(found, log_mel(whole).numpy()[: len(found)], atol=1e-2)
    assert abs(len(found) - SECONDS * 100) <= 1


def test_a_file_whose_name_is_no_text_is_read_as_well(tmp_path: Path):
    path = write(tmp_path / "a.wav", 8000, noise(SECONDS))
    odd = path.rename(tmp_path / b"\xff.wav".decode(errors="surrogateescape"))
    assert len(frames_of(SoundFile(odd), 0)) == 530


def test_sphere_is_read_as_well(tmp_path: Path):
    sound = SoundFile(write_sphere(tmp_path / "a.sph", noise(2.0)))
    assert (sound.sample_rate, frames_of(sound, 1).shape) == (8000, (200, 40))


def broken(folder: Path, how: str) -> Path:
    path = folder / f"{how}.wav"
    samples = noise(2.0, channels=1)
    if how == "slow":
        return write(path, 6000, samples)
    if how == "text":
        path.write_text("hello")
    if how == "empty":
        path.touch()
    if how == "silent":
        return write(path, 8000, samples[:0])
    if how == "short":
        return write(path, 8000, samples[:150])
    if how == "almost":
        write(path, 8000, samples[:199])
    if how == "folder":
        path.mkdir()
    if how == "truncated":
        write(path, 8000, samples)
        path.write_bytes(path.read_bytes()[:-1000])
    if how == "swapped":
        speech = np.round(32767 * voice(2.0)).astype(np.int16)
        return write(path, 8000, speech.byteswap())
    if how == "nan":
        samples[8000] = np.nan
        return write(path, 8000, samples, "FLOAT")
    return path


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "the file does not exist"),
        ("slow", "expected 8000 Hz or more, found 6000"),
        ("text", "no sound in a format that libsndfile reads"),
        ("empty", "the file is empty"),
        ("silent", "expected at least 0.025 s, found 0.000 s"),
        ("short", "expected at least 0.025 s, found 0.019 s"),
        ("almost", "expected at least 0.025 s, found 0.024 s"),
        ("folder", "a folder; name the sound files in it"),
        ("truncated", "cut short: the header says 32044 bytes, there are 31044"),
        ("swapped", "speech once the two bytes of each sample are swapped"),
        ("nan", r"sample 8000 \(1.00 s\) is non-finite"),
    ],
)
def test_what_cannot_be_used_says_why(tmp_path: Path, how: str, message: str):
    path = broken(tmp_path, how)
    with pytest.raises(AudioError, match=rf"{how}.wav: .*{message}"):
        frames_of(SoundFile(path), 0)


def test_a_sphere_file_that_is_compressed_says_how_to_unpack_it(tmp_path: Path):
    path = write_sphere(tmp_path / "a.sph", noise(2.0))
    coding = b"-s26 ulaw,embedded-shorten-v2.00"
    head, _, sound = path.read_bytes().partition(b"end_head")
    path.write_bytes(head.replace(b"-s4 ulaw", coding) + b"end_head" + sound)
    said = rf"a\.sph: compressed by shorten; unpack it: `sph2pipe -f wav {path} new"
    with pytest.raises(AudioError, match=said):
        SoundFile(path)


def test_a_sphere_file_cut_short_says_so(tmp_path: Path):
    path = write_sphere(tmp_path / "a.sph", noise(2.0))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(AudioError, match=r"a\.sph"):
        SoundFile(path)
