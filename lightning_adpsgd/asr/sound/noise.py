"""Noise added to sound, at a chosen signal-to-noise ratio.

The noise is a random stretch of a recording, repeated if it is too short, or white
noise if there are no recordings. The draws depend only on the seed and the name of the
target, so that a resumed stage writes the same samples.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_adpsgd.asr.sound.audio import AudioError, SoundFile
from lightning_adpsgd.asr.sound.sphere import SAMPLE_RATE

SUFFIXES = (".wav", ".flac", ".ogg", ".sph")


def noise_files(folder: Path) -> list[Path]:
    """The sound files below a folder, in order.

    Raises:
        AudioError: There is no sound file.
    """
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not found:
        raise AudioError(f"{folder}: expected {', '.join(SUFFIXES)} files, found none")
    return found


def dice_of(seed: int, name: str) -> np.random.Generator:
    """The random generator for the noise of one recording."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def add_noise(
    samples: np.ndarray,
    files: Sequence[Path],
    decibels: tuple[float, float],
    dice: np.random.Generator,
) -> np.ndarray:
    """Adds noise to samples at a random signal-to-noise ratio.

    Args:
        samples: float32 [samples] at 8 kHz.
        files: Noise files, one of which is drawn; empty for white noise.
        decibels: Range of the signal-to-noise ratio in dB, from which it is drawn
            uniformly.
        dice: Random generator for all draws.

    Returns:
        float32 [samples]; unchanged if they or the noise are silent.

    Raises:
        AudioError: The drawn file cannot be used.
    """
    noise = _drawn(files, len(samples), dice)
    ratio = 10 ** (dice.uniform(*decibels) / 10)
    wanted = float(np.mean(np.square(samples, dtype=np.float64))) / ratio
    power = float(np.mean(np.square(noise, dtype=np.float64)))
    if not wanted or not power:
        return samples
    return (samples + noise * np.sqrt(wanted / power)).astype(np.float32)


def _drawn(
    files: Sequence[Path], num_samples: int, dice: np.random.Generator
) -> np.ndarray:
    if not files:
        return dice.standard_normal(num_samples).astype(np.float32)
    sound = SoundFile(files[int(dice.integers(len(files)))])
    needed_s = -(-num_samples // SAMPLE_RATE)
    latest = max(int(sound.duration_s) - needed_s, 0)
    start = int(dice.integers(latest + 1))
    channel = int(dice.integers(sound.num_channels))
    return np.resize(sound.samples(channel, start, start + needed_s), num_samples)
