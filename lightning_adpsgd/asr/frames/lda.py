"""Linear discriminant analysis in closed form: directions that separate classes.

With the covariance W of frames about the mean of their class and the covariance B of
these means about the mean of all frames, the columns of the projection A solve

    B a = λ W a,    Aᵀ W A = I,    Aᵀ B A = diag(λ₁ ≥ λ₂ ≥ ...)

and those of the largest λ are kept. The projected frames have unit covariance within
their classes, on average, which suits Gaussians with diagonal covariances.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.parallel import product

_LEAST_SPREAD = 1e-6  # of the largest; a direction that varies less is none


class ScatterSums(NamedTuple):
    """The sums over the frames of each class.

    They are the number [classes], x [classes, dim] and x xᵀ [classes, dim, dim].
    """

    frames: np.ndarray
    first: np.ndarray
    second: np.ndarray

    def plus(self, other: "ScatterSums") -> "ScatterSums":
        """Adds the sums of both."""
        return ScatterSums(*(a + b for a, b in zip(self, other, strict=True)))


def scatter_sums(
    frames: np.ndarray, classes: np.ndarray, num_classes: int
) -> ScatterSums:
    """The sums over frames [time, dim] of known classes [time]."""
    order = np.argsort(classes, kind="stable")
    bounds = np.searchsorted(classes[order], np.arange(num_classes + 1))
    size = frames.shape[1]
    first = np.zeros((num_classes, size))
    second = np.zeros((num_classes, size, size))
    for label in np.flatnonzero(np.diff(bounds)):
        own = frames[order[bounds[label] : bounds[label + 1]]].astype(float)
        first[label] = own.sum(axis=0)
        second[label] = product(own.T, own)
    return ScatterSums(np.diff(bounds).astype(float), first, second)


def total(parts: Iterable[ScatterSums]) -> ScatterSums:
    """The sum over all parts; there must be at least one."""
    return functools.reduce(ScatterSums.plus, parts)


def discriminants(sums: ScatterSums, dimension: int) -> np.ndarray:
    """The projection A, float64 [dim, dimension].

    Args:
        sums: Sums over the training frames.
        dimension: Number of directions to keep.

    Raises:
        ValueError: `dimension` is not in 1..dim, or the frames lie in fewer directions.
    """
    size = sums.first.shape[1]
    if not 1 <= dimension <= size:
        raise ValueError(f"`dimension` must be in 1..{size}, got {dimension}")
    within, between = covariances(sums)
    spread, axes = np.linalg.eigh(within)
    kept = spread > _LEAST_SPREAD * spread[-1]
    if kept.sum() < dimension:
        raise ValueError(
            f"`dimension` must be at most {kept.sum()}, the directions in which the "
            f"frames of a class vary, got {dimension}"
        )
    whiten = axes[:, kept] / np.sqrt(spread[kept])
    _, turn = np.linalg.eigh(whiten.T @ between @ whiten)  # ascending
    return whiten @ turn[:, ::-1][:, :dimension]


def covariances(sums: ScatterSums) -> tuple[np.ndarray, np.ndarray]:
    """The covariances within classes and between their means, both [dim, dim]."""
    count = sums.frames.sum()
    mean = sums.first.sum(axis=0) / count
    seen = sums.frames > 0
    means = sums.first[seen] / sums.frames[seen, None]
    about = (means * sums.frames[seen, None]).T @ means / count
    return sums.second.sum(axis=0) / count - about, about - np.outer(mean, mean)


def class_covariances(sums: ScatterSums, projection: np.ndarray) -> np.ndarray:
    """Covariances of each class's projected frames, [classes, dimension, dimension]."""
    count = np.maximum(sums.frames, 1.0)[:, None]
    mean = sums.first / count
    about = mean[:, :, None] * mean[:, None, :]
    covariances = sums.second / count[:, :, None] - about
    return projection.T @ covariances @ projection
