"""Feature-space maximum-likelihood linear regression: an affine map per speaker.

A speaker's frames are mapped to where the speaker-independent mixtures expect them, y =
A x + b = W ξ with ξ = [x; 1]. W = [A b] maximises the likelihood of the frames, log N(A
x + b; μ, σ²) + log|det A|. This is constrained MLLR (Gales, "Maximum likelihood linear
transformations for HMM-based speech recognition", 1998, section 2.3). Where γ_m(t) is
the share of Gaussian m in frame t, the auxiliary function is, but for a constant,

    Q(W) = β log|det A| − ½ Σ_i (w_i G_i w_iᵀ − 2 w_i k_iᵀ)          w_i the rows of W
    β    = Σ_m Σ_t γ_m(t)
    G_i  = Σ_m 1/σ²_mi Σ_t γ_m(t) ξ(t) ξ(t)ᵀ
    k_i  = Σ_m μ_mi/σ²_mi Σ_t γ_m(t) ξ(t)ᵀ

and its maximum in one row, all others fixed, is w_i = (α p_i + k_i) G_i⁻¹, where p_i is
the row's cofactors with a 0 for the offset and α solves

    α² p_i G_i⁻¹ p_iᵀ + α p_i G_i⁻¹ k_iᵀ − β = 0.

The state of each frame is given: from the transcript for a training speaker, from a
first decoding for any other. Nothing here knows words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures, shares_by_state
from lightning_adpsgd.asr.parallel import product

_BLOCK = 2048  # frames whose products are formed at a time
_LEAST_SPREAD = 1e-6  # of the largest; less is the rounding of float32


class Statistics(NamedTuple):
    """Sums over the frames of one speaker, which are additive over parts.

    Attributes:
        frames: β, the number of frames with a state.
        quadratic: G, float64 [dims, dims + 1, dims + 1].
        linear: k, float64 [dims, dims + 1].
        log_likelihood: Σ_t log p(W ξ | state) + log|det A| at the map of the shares.
    """

    frames: float
    quadratic: np.ndarray
    linear: np.ndarray
    log_likelihood: float

    def __add__(self, other: tuple) -> "Statistics":  # type: ignore[override]
        return Statistics(*(mine + its for mine, its in zip(self, other, strict=True)))


def identity(dims: int) -> np.ndarray:
    """The map that changes nothing, float64 [dims, dims + 1]."""
    return np.eye(dims, dims + 1)


def transformed(transform: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """A x + b of every frame.

    Args:
        transform: [dims, dims + 1], the offset last.
        frames: [time, dims].

    Returns:
        float32 [time, dims].
    """
    matrix = np.ascontiguousarray(transform[:, :-1].T, np.float32)
    moved = product(frames.astype(np.float32, copy=False), matrix)
    return moved + transform[:, -1].astype(np.float32)


def log_determinant(transform: np.ndarray) -> float:
    """log|det A|: what a frame's log-likelihood gains by the change of volume."""
    return float(np.linalg.slogdet(transform[:, :-1])[1])


def accumulate(
    mixtures: GaussianMixtures,
    frames: np.ndarray,
    states: np.ndarray,
    transform: np.ndarray,
) -> Statistics:
    """Sums of the frames; the Gaussians share them where `transform` moves them.

    Args:
        mixtures: Mixtures of all speakers.
        frames: [time, dims], as they were before any map.
        states: [time]; frames with a negative one are left out.
        transform: The best map so far.
    """
    moved = transformed(transform, frames)
    precision = 1 / mixtures.variance
    tables = np.hstack([precision, mixtures.mean * precision]).astype(np.float32)
    pulls = np.zeros((len(frames), tables.shape[1]), np.float32)
    log_likelihood = 0.0
    for positions, rows, shares, log_likelihoods in shares_by_state(
        mixtures, moved, states
    ):
        pulls[positions] = product(shares, tables[rows])
        log_likelihood += float(log_likelihoods.sum(dtype=float))
    count = int((states >= 0).sum())
    log_likelihood += count * log_determinant(transform)
    return Statistics(count, *_sums(frames, pulls), log_likelihood)


def _sums(frames: np.ndarray, pulls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """G and k from Σ_m γ_m(t) [1/σ²_m, μ_m/σ²_m], [time, 2 · dims]."""
    dims = frames.shape[1]
    packed = np.zeros((dims, (dims + 1) * (dims + 2) // 2))
    linear = np.zeros((dims, dims + 1))
    for at in range(0, len(frames), _BLOCK):
        block = frames[at : at + _BLOCK].astype(np.float32, copy=False)
        extended = np.hstack([block, np.ones((len(block), 1), np.float32)])
        pull = pulls[at : at + _BLOCK]
        packed += product(pull[:, :dims].T, _products(extended))
        linear += product(pull[:, dims:].T, extended)
    return _unpacked(packed, dims + 1), linear


def _products(extended: np.ndarray) -> np.ndarray:
    """ξ_j ξ_k for j ≤ k, [time, (dims + 1)(dims + 2) / 2]: half of ξ ξᵀ."""
    width = extended.shape[1]
    half = np.empty((len(extended), width * (width + 1) // 2), np.float32)
    at = 0
    for row in range(width):
        own = half[:, at : at + width - row]
        np.multiply(extended[:, row:], extended[:, row : row + 1], out=own)
        at += width - row
    return half


def _unpacked(packed: np.ndarray, width: int) -> np.ndarray:
    upper = np.triu_indices(width)
    full = np.empty((len(packed), width, width))
    full[:, upper[0], upper[1]] = packed
    full[:, upper[1], upper[0]] = packed
    return full


def improved(
    transform: np.ndarray, sums: Statistics, num_sweeps: int = 10
) -> np.ndarray:
    """The map after `num_sweeps` sweeps over its rows, each row the best for the rest.

    Raises:
        numpy.linalg.LinAlgError: The frames do not vary in all directions.
    """
    np.linalg.cholesky(sums.quadratic)  # refuses what is not positive definite
    curvatures = np.linalg.inv(sums.quadratic)
    transform = transform.copy()
    for _ in range(num_sweeps):
        inverse = np.linalg.inv(transform[:, :-1])
        for row, curvature in enumerate(curvatures):
            column = inverse[:, row].copy()
            best = _best_row(column, sums.linear[row], curvature, sums.frames)
            step = best[:-1] - transform[row, :-1]
            # A grows by a matrix of rank one, and so does its inverse
            inverse -= np.outer(column, step @ inverse) / (1 + step @ column)
            transform[row] = best
    return transform


def _best_row(
    column: np.ndarray, target: np.ndarray, curvature: np.ndarray, frames: float
) -> np.ndarray:
    """(α p_i + k_i) G_i⁻¹ with the α of the larger auxiliary function.

    Args:
        column: Column of A⁻¹: the row's cofactors over det A, which α absorbs.
        target: k_i.
        curvature: G_i⁻¹.
        frames: β.
    """
    pulled = curvature[:-1].T @ column
    one, two = pulled @ target, pulled[:-1] @ column
    root = np.sqrt(one**2 + 4 * two * frames)
    scales = np.array([-one + root, -one - root]) / (2 * two)
    gains = frames * np.log(np.abs(scales * two + one)) - 0.5 * scales**2 * two
    return scales[np.argmax(gains)] * pulled + curvature @ target


def offset(sums: Statistics) -> np.ndarray:
    """The best map among those that only add an offset, A = I."""
    transform = identity(len(sums.linear))
    # w_i G_i w_iᵀ − 2 w_i k_iᵀ is a parabola in the last element of each row
    across = np.einsum("iij->ij", sums.quadratic[:, :-1])
    transform[:, -1] = sums.linear[:, -1] - across[:, -1]
    transform[:, -1] /= sums.quadratic[:, -1, -1]
    return transform


@dataclass(frozen=True, kw_only=True)
class FmllrOptions:
    """Options of the estimate of a speaker's map.

    Attributes:
        num_passes: Number of times that the frames are reassigned to Gaussians.
        num_sweeps: Sweeps over the rows in each pass.
        min_frames: Fewest frames for a full map; 40 dimensions have 1,640 values.
        min_offset_frames: Fewest frames for an offset; below that nothing is changed.

    Raises:
        ValueError: A number of passes, sweeps or frames is out of its bounds.
    """

    num_passes: int = 3
    num_sweeps: int = 10
    min_frames: int = 500
    min_offset_frames: int = 100

    def __post_init__(self) -> None:
        if self.num_passes < 1 or self.num_sweeps < 1:
            raise ValueError(
                "`num_passes` and `num_sweeps` must be at least 1, got "
                f"{self.num_passes} and {self.num_sweeps}"
            )
        if not 1 <= self.min_offset_frames <= self.min_frames:
            raise ValueError(
                "`min_offset_frames` must be from 1 to `min_frames` "
                f"{self.min_frames}, got {self.min_offset_frames}"
            )


class Estimate(NamedTuple):
    """A speaker's map and what it was estimated from.

    Attributes:
        transform: float64 [dims, dims + 1].
        kind: "full", "offset" or "identity", by how many frames there were.
        frames: Frames with a state.
        before: Sum of their log-likelihoods without the map.
        after: The same with it, log|det A| of every frame included.
    """

    transform: np.ndarray
    kind: str
    frames: int
    before: float
    after: float


Spoken = tuple[np.ndarray, np.ndarray]
"""Frames [time, dims] of an utterance and their states [time]."""


def estimate(
    mixtures: GaussianMixtures, spoken: Sequence[Spoken], options: FmllrOptions
) -> Estimate:
    """Estimates the map of one speaker from all of its frames.

    Args:
        mixtures: Mixtures of all speakers.
        spoken: The speaker's utterances; negative states are left out.
        options: Passes and fewest frames.
    """
    transform = identity(mixtures.mean.shape[1])
    sums = first = _gathered(mixtures, spoken, transform)
    kind = _kind(first, options)
    if kind == "identity":
        known = first.log_likelihood
        return Estimate(transform, kind, int(first.frames), known, known)
    for _ in range(options.num_passes):
        if kind == "full":
            transform = improved(transform, sums, options.num_sweeps)
        else:
            transform = offset(sums)
        sums = _gathered(mixtures, spoken, transform)
    frames, before = int(first.frames), first.log_likelihood
    return Estimate(transform, kind, frames, before, sums.log_likelihood)


def _kind(sums: Statistics, options: FmllrOptions) -> str:
    if sums.frames < options.min_offset_frames:
        return "identity"
    if sums.frames < options.min_frames or not _is_definite(sums.quadratic):
        return "offset"
    return "full"


def _is_definite(quadratic: np.ndarray) -> bool:
    """Whether the frames vary in all directions, so that a full map is determined."""
    values = np.linalg.eigvalsh(quadratic)
    return bool((values[:, 0] > _LEAST_SPREAD * values[:, -1]).all())


def _gathered(
    mixtures: GaussianMixtures, spoken: Sequence[Spoken], transform: np.ndarray
) -> Statistics:
    dims = mixtures.mean.shape[1]
    frames = [frames for frames, _ in spoken] or [np.zeros((0, dims), np.float32)]
    states = [states for _, states in spoken] or [np.zeros(0, np.int32)]
    together = np.concatenate(frames), np.concatenate(states)
    return accumulate(mixtures, *together, transform)
