"""One large mixture of Gaussians for all speech, and a speaker's statistics under it.

The universal background model describes the sounds of all speakers without the identity
of the sounds. A speaker's frames of a sound lie, on average, at a distance from the
mean of their Gaussian, which characterises the speaker. With γ_c(t) the share of
Gaussian c in frame t, a stretch of speech is summed up by

    N_c = Σ_t γ_c(t)        F_c = Σ_t γ_c(t) (x(t) − m_c) / σ_c

which is all that `ivectors` reads. Training is expectation maximisation, and the
mixture doubles until it is large enough (`gmm` has both).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.hmm.gmm import (
    GaussianMixtures,
    Statistics,
    flat,
    mix_up,
    shares_by_state,
    update,
)
from lightning_adpsgd.asr.parallel import fork_map, in_order, product

_BLOCK = 2048  # frames shared out at a time


class UbmStep(NamedTuple):
    """The state of the training.

    Attributes:
        ubm: Mixture after this iteration; its only state is 0.
        log_likelihood: Value per frame, under the mixture before this iteration.
    """

    ubm: GaussianMixtures
    log_likelihood: float


def num_steps(num_gaussians: int, num_iterations: int) -> int:
    """Iterations of `train_ubm`, for a progress bar."""
    return num_iterations * len(_sizes(num_gaussians))


def train_ubm(
    frames: np.ndarray,
    num_gaussians: int,
    *,
    num_iterations: int = 6,
    seed: int = 0,
    num_processes: int = 1,
) -> Iterator[UbmStep]:
    """Grows a mixture from one Gaussian; yields after every iteration.

    Sums are added in one order, whatever the number of processes.

    Args:
        frames: [time, dims], a sample of all speakers' speech.
        num_gaussians: Final number of Gaussians, if there are enough frames.
        num_iterations: Iterations at each size.
        seed: Seed of the splitting of Gaussians.
        num_processes: Number of processes that share the frames.

    Raises:
        ValueError: Too few frames, or a dimension in which they do not vary.
    """
    if not 1 <= num_gaussians <= len(frames) / 20:
        raise ValueError(
            f"`num_gaussians` must be from 1 to a twentieth of the {len(frames)} "
            f"frames, got {num_gaussians}"
        )
    ubm = flat(frames.mean(axis=0), frames.var(axis=0), 1)
    frames = frames.astype(np.float32, copy=False)
    blocks = [frames[at : at + _BLOCK] for at in range(0, len(frames), _BLOCK)]
    for size in _sizes(num_gaussians):
        ubm = mix_up(ubm, np.array([len(frames)]), size, seed=seed + size)
        for _ in range(num_iterations):
            sums, log_likelihood = _expected(ubm, blocks, num_processes)
            ubm = update(ubm, sums)
            yield UbmStep(ubm, log_likelihood / len(frames))


def _sizes(num_gaussians: int) -> list[int]:
    """1, 2, 4, ... and the requested size."""
    doubled = [2**k for k in range(num_gaussians.bit_length())]
    return sorted({*doubled, num_gaussians})


def _expected(
    ubm: GaussianMixtures, blocks: Sequence[np.ndarray], num_processes: int
) -> tuple[Statistics, float]:
    def work(block: np.ndarray) -> tuple[Statistics, float]:
        states = np.zeros(len(block), np.int64)
        (shared,) = shares_by_state(ubm, block, states)
        parts = shared.shares.T
        counts = parts.sum(axis=1, dtype=float)
        sums = Statistics(counts, product(parts, block), product(parts, block**2))
        return sums, float(shared.log_likelihoods.sum(dtype=float))

    found = in_order(fork_map(work, blocks, num_processes))
    sums, total = next(found)
    for more, log_likelihood in found:
        sums, total = sums + more, total + log_likelihood
    return sums, total


class Occupancy(NamedTuple):
    """A stretch of speech as `ivectors` reads it.

    Attributes:
        counts: N, float64 [gaussians].
        deviations: F, float64 [gaussians, dims], in standard deviations.
    """

    counts: np.ndarray
    deviations: np.ndarray


def occupancy(ubm: GaussianMixtures, frames: np.ndarray) -> Occupancy:
    """N and F of frames [time, dims]; both are zero if there are none."""
    counts, sums = np.zeros(len(ubm.weight)), np.zeros(ubm.mean.shape)
    for at in range(0, len(frames), _BLOCK):
        block = frames[at : at + _BLOCK].astype(np.float32, copy=False)
        shares = frame_shares(ubm, block)
        counts += shares.sum(axis=0, dtype=float)
        sums += product(shares.T, block)
    sums -= counts[:, None] * ubm.mean
    return Occupancy(counts, sums / np.sqrt(ubm.variance))


def frame_shares(ubm: GaussianMixtures, frames: np.ndarray) -> np.ndarray:
    """The share γ of each Gaussian in each frame, float32 [time, gaussians].

    Args:
        frames: [time, dims], with at least one frame.
    """
    states = np.zeros(len(frames), np.int64)
    (shared,) = shares_by_state(ubm, frames, states)
    return shared.shares
