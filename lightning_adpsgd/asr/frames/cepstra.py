"""Cepstra with slopes from stored log-mel frames, the input of Gaussian mixtures.

A diagonal covariance fits cepstra, the cosine transform of log-mel, better than log-mel
itself, whose neighbouring coefficients rise and fall together.
"""

import numpy as np

from lightning_adpsgd.asr.parallel import product

_REACH = 2  # frames to each side that a slope is fitted over


def cepstra(log_mel: np.ndarray, num_cepstra: int = 13) -> np.ndarray:
    """Cepstra, their slopes and the slopes' slopes.

    Args:
        log_mel: [time, mel], any floating type.
        num_cepstra: Number of lowest orders to keep, including order 0.

    Returns:
        float32 [time, 3 · num_cepstra].

    Raises:
        ValueError: `num_cepstra` is below 1, or above the number of filters.
    """
    num_mels = log_mel.shape[1]
    if not 1 <= num_cepstra <= num_mels:
        raise ValueError(f"`num_cepstra` must be in 1..{num_mels}, got {num_cepstra}")
    static = product(log_mel.astype(np.float32), _cosines(num_mels, num_cepstra))
    slopes = _slopes(static)
    return np.hstack([static, slopes, _slopes(slopes)])


def _cosines(num_mels: int, num_cepstra: int) -> np.ndarray:
    """The orthonormal cosine transform, [mel, cepstrum]."""
    centre = (np.arange(num_mels) + 0.5) / num_mels
    table = np.cos(np.pi * centre[:, None] * np.arange(num_cepstra))
    table *= np.sqrt(2 / num_mels)
    table[:, 0] /= np.sqrt(2)
    return table.astype(np.float32)


def _slopes(frames: np.ndarray) -> np.ndarray:
    """Least-squares slope over 2 · `_REACH` + 1 frames; the ends are repeated."""
    time = len(frames)
    padded = np.pad(frames, ((_REACH, _REACH), (0, 0)), mode="edge")
    total = np.zeros_like(frames)
    for step in range(1, _REACH + 1):
        ahead = padded[_REACH + step : _REACH + step + time]
        total += step * (ahead - padded[_REACH - step : _REACH - step + time])
    return total / np.float32(2 * sum(step**2 for step in range(1, _REACH + 1)))
