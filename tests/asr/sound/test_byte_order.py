"""Speech whose bytes are the wrong way round is told from speech, and from noise."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from lightning_adpsgd.asr.sound.byte_order import is_swapped, roughness, sounds_swapped
from tests.asr.tiny import noise, voice, write_sphere

SECONDS = 6.0
HUM = 0.002 * np.sin(2 * np.pi * 50 * np.arange(round(SECONDS * 8000)) / 8000)
RANDOM = np.random.default_rng(0)


def framed(sound: np.ndarray) -> np.ndarray:
    samples = np.round(32767 * sound.clip(-1, 1)).astype(np.int16)
    return samples[: len(samples) // 160 * 160].reshape(-1, 160)


def clicks() -> np.ndarray:
    return 0.5 * (RANDOM.random(len(HUM)) < 3e-4) * RANDOM.standard_normal(len(HUM))


SPEECH = {
    "loud": voice(SECONDS),
    "quiet": 0.05 * voice(SECONDS),
    "with a hum": voice(SECONDS) + HUM,
    "in noise": voice(SECONDS) + 0.02 * RANDOM.standard_normal(len(HUM)),
    "off the middle": 0.3 * voice(SECONDS) + 0.2,
    "clipped": 20 * voice(SECONDS),
    "with clicks": voice(SECONDS) + HUM + clicks(),
}
NO_SPEECH = {
    "silence": np.zeros(len(HUM)),
    "a hum": HUM,
    **{
        f"noise at {level}": level * RANDOM.standard_normal(len(HUM))
        for level in (1e-4, 1e-3, 0.01, 0.1, 1.0)
    },
    "full scale": RANDOM.uniform(-1, 1, len(HUM)),
}


@pytest.mark.parametrize("name", SPEECH)
def test_speech_is_known_by_its_smoothness_either_way_round(name: str):
    frames = framed(SPEECH[name])
    assert not sounds_swapped(frames)
    assert sounds_swapped(frames.byteswap())


@pytest.mark.parametrize("name", NO_SPEECH)
def test_what_is_no_speech_raises_no_alarm(name: str):
    frames = framed(NO_SPEECH[name])
    assert not sounds_swapped(frames)
    assert not sounds_swapped(frames.byteswap())


def test_roughness_is_one_less_the_correlation_of_neighbours():
    white = framed(0.1 * RANDOM.standard_normal(160_000))
    assert roughness(white).mean() == pytest.approx(1, abs=0.02)
    moving = np.convolve(white.ravel(), [0.5, 0.5], "same").reshape(white.shape)
    assert roughness(moving).mean() == pytest.approx(0.5, abs=0.02)
    assert roughness(np.zeros((1, 160), np.int16)).tolist() == [1]


@pytest.mark.parametrize("kind", ["WAV", "NIST", "AIFF"])
def test_a_file_is_looked_at_all_over(tmp_path: Path, kind: str):
    """Whose begin is silent."""
    sound = np.concatenate([np.zeros(100_000), voice(20.0)])
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    soundfile.write(str(right), sound, 8000, "PCM_16", format=kind)
    swapped = np.round(32767 * sound).astype(np.int16).byteswap()
    soundfile.write(str(wrong), swapped, 8000, "PCM_16", format=kind)
    assert not is_swapped(right)
    assert is_swapped(wrong)


def test_other_codings_have_no_order(tmp_path: Path):
    assert not is_swapped(write_sphere(tmp_path / "a.sph", noise(1.0)))


def test_a_file_of_a_moment_is_let_pass(tmp_path: Path):
    soundfile.write(str(tmp_path / "a.wav"), voice(0.01), 8000, "PCM_16")
    assert not is_swapped(tmp_path / "a.wav")
