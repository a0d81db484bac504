"""Noise added to sound, at a chosen distance below the speech.

From recordings, of which a stretch is taken at random and repeated if it is too short,
or white where there are none. What is drawn depends on the seed and the name of what it
is for, so that a stage that is interrupted and goes on writes the same.
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
        AudioError: There is none.
    """
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not found:
        raise AudioError(f"{folder}: expected {', '.join(SUFFIXES)} files, found none")
    return found


def dice_of(seed: int, name: str) -> np.random.Generator:
    """The noise drawn for one recording."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def add_noise(
    samples: np.ndarray,
    files: Sequence[Path],
    decibels: tuple[float, float],
    dice: np.random.Generator,
) -> np.ndarray:
    """Samples with noise whose power is so many decibels below theirs.

    Args:
        samples: float32 [samples] at 8 kHz.
        files: Files of noise, one of which is drawn; none for white noise.
        decibels: The signal-to-noise ratio is drawn evenly between these two.
        dice: Draws all of it.

    Returns:
        float32 [samples]; as given where they or the noise are silent.

    Raises:
        AudioError: The file that is drawn cannot be used.
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
