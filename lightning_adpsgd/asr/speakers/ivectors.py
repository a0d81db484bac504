"""I-vectors: how a speaker differs from the average, in a hundred numbers.

The means of all Gaussians of a mixture (`ubm`) move together from speaker to speaker:

    m_c(speaker) = m_c + σ_c (δ_c + W_c w)        w ~ N(0, I), of 100 dimensions

The i-vector is the mean of w given a speaker's frames. From their N and F
(`ubm.Occupancy`) it is

    w = L⁻¹ Σ_c W_cᵀ (F_c − N_c δ_c)        L = I + Σ_c N_c W_cᵀ W_c

This is total variability (Dehak et al., "Front-end factor analysis for speaker
verification", 2011, eq. 3), here in units of the standard deviations σ_c. W is found by
expectation maximisation over the speakers of the training data. After each step the
mean and the covariance of their w are brought back to 0 and I by moving them into δ and
W (minimum divergence: Brümmer, 2009). That keeps the likelihood and speeds up the
training.

With fewer frames, the i-vector is closer to 0, the average speaker. Neighbouring frames
say much the same, so each counts as `frame_weight` of an independent one; with 1, a few
seconds of speech would count as certainty. No other scaling is done: over the training
speakers the dimensions have variances of at most about 1.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.parallel import fork_map, in_order, product
from lightning_adpsgd.asr.speakers.ubm import frame_shares
from lightning_adpsgd.files import bytes_written_whole

_BLOCK = 64  # speakers, or moments of one speaker, that are solved at a time
_MAX_PARTS = 32  # of the speakers, whatever the number of processes
_LEAST_COUNT = 1e-6  # frames of all speakers, for a Gaussian's loadings to be found
_FIRST_VARIANCE = 0.1  # of the means between speakers, before the first iteration


class Posterior(NamedTuple):
    """The posterior of w after some speech: a Gaussian per speaker.

    Attributes:
        mean: float64 [speakers, size].
        factor: Cholesky factor of the precision L, float64 [speakers, size, size].
        gain: log p(speech) − log p(speech | w = 0), float64 [speakers].
    """

    mean: np.ndarray
    factor: np.ndarray
    gain: np.ndarray

    def second_moments(self) -> np.ndarray:
        """E[w wᵀ], [speakers, size, size]."""
        covariance = torch.cholesky_inverse(torch.from_numpy(self.factor)).numpy()
        return covariance + self.mean[:, :, None] * self.mean[:, None]


class Heard(NamedTuple):
    """Statistics of a speaker's speech so far.

    Attributes:
        counts: N, float64 [gaussians].
        pull: Σ_c W_cᵀ (F_c − N_c δ_c), float64 [size].
    """

    counts: np.ndarray
    pull: np.ndarray


@dataclass(frozen=True)
class IVectorExtractor:
    """The total-variability model of one mixture.

    Attributes:
        shift: δ, float64 [gaussians, dims].
        loadings: W, float64 [gaussians, dims, size].
        frame_weight: Weight of a frame, in (0, 1].

    Raises:
        ValueError: `frame_weight` is not in (0, 1].
    """

    shift: np.ndarray
    loadings: np.ndarray
    frame_weight: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.frame_weight <= 1:
            raise ValueError(
                f"`frame_weight` must lie in (0, 1], got {self.frame_weight}"
            )

    @property
    def size(self) -> int:
        """Dimensions of an i-vector."""
        return self.loadings.shape[2]

    @functools.cached_property
    def _squares(self) -> np.ndarray:
        """Upper half of each W_cᵀ W_c, [gaussians, size (size + 1) / 2]."""
        return _packed(product(self.loadings.transpose(0, 2, 1), self.loadings))

    def posterior(self, counts: np.ndarray, deviations: np.ndarray) -> Posterior:
        """The posteriors of several speakers.

        Args:
            counts: N, [speakers, gaussians].
            deviations: F, [speakers, gaussians, dims].
        """
        return self._known(counts, self._pulls(counts, deviations))

    def _pulls(self, counts: np.ndarray, deviations: np.ndarray) -> np.ndarray:
        centred = self._centred(counts, deviations)
        return product(centred, self.loadings.reshape(-1, self.size))

    def _centred(self, counts: np.ndarray, deviations: np.ndarray) -> np.ndarray:
        """F_c − N_c δ_c, [speakers, gaussians · dims]."""
        centred = deviations - counts[:, :, None] * self.shift
        return centred.reshape(len(counts), -1)

    def _known(self, counts: np.ndarray, pulls: np.ndarray) -> Posterior:
        weight = self.frame_weight
        added = product(np.asarray(counts, float), self._squares)
        precision = np.eye(self.size) + weight * _unpacked(added, self.size)
        factor = torch.linalg.cholesky(torch.from_numpy(precision))
        pull = torch.from_numpy(weight * pulls)
        mean = torch.cholesky_solve(pull[:, :, None], factor)[:, :, 0]
        volume = factor.diagonal(dim1=1, dim2=2).log().sum(dim=1)
        gain = 0.5 * (pull * mean).sum(dim=1) - volume
        return Posterior(mean.numpy(), factor.numpy(), gain.numpy())

    def nothing_heard(self) -> Heard:
        """The statistics of a speaker who has not spoken yet."""
        return Heard(np.zeros(len(self.shift)), np.zeros(self.size))

    def online(
        self, ubm: GaussianMixtures, frames: np.ndarray, period: int, heard: Heard
    ) -> tuple[np.ndarray, Heard]:
        """The i-vectors of a speaker while it speaks.

        Args:
            ubm: The mixture.
            frames: The next utterance, [time, dims].
            period: Frames from one i-vector to the next.
            heard: Statistics of the speaker's earlier utterances.

        Returns:
            i-vectors, float64 [ceil(time / period), size], that for frames k · period
            and after from what was heard before frame k · period; and what was heard
            with this utterance.
        """
        found = np.zeros((-(-len(frames) // period), self.size))
        for at in range(0, len(found), _BLOCK):
            block = frames[at * period : (at + _BLOCK) * period]
            counts, pulls = self._heard_in(ubm, block, period)
            counts = heard.counts + np.cumsum(counts, axis=0)
            pulls = heard.pull + np.cumsum(pulls, axis=0)
            before = np.vstack([heard.counts, counts[:-1]])
            known = self._known(before, np.vstack([heard.pull, pulls[:-1]]))
            found[at : at + _BLOCK] = known.mean
            heard = Heard(counts[-1], pulls[-1])
        return found, heard

    def _heard_in(
        self, ubm: GaussianMixtures, frames: np.ndarray, period: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """N and its pull of each `period` frames."""
        frames = frames.astype(np.float32, copy=False)
        shares = frame_shares(ubm, frames)
        starts = np.arange(0, len(frames), period)
        counts = np.add.reduceat(shares, starts, axis=0, dtype=float)
        spans = [slice(start, start + period) for start in starts]
        sums = np.stack([product(shares[own].T, frames[own]) for own in spans])
        deviations = (sums - counts[:, :, None] * ubm.mean) / np.sqrt(ubm.variance)
        return counts, self._pulls(counts, deviations)

    def save(self, path: Path) -> None:
        """Writes an .npz file, whole or not at all."""
        weight = np.array(self.frame_weight)
        with bytes_written_whole(path) as file:
            np.savez(
                file, shift=self.shift, loadings=self.loadings, frame_weight=weight
            )

    @classmethod
    def load(cls, path: Path) -> "IVectorExtractor":
        """Reads a file of `save`.

        Raises:
            ValueError: The file was not written by `save`, or is truncated.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                weight = float(arrays["frame_weight"])
                return cls(arrays["shift"], arrays["loadings"], weight)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"{path} is not an i-vector model: {error}") from error


class ExtractorStep(NamedTuple):
    """The state of an extractor's training.

    Attributes:
        extractor: After this iteration.
        gain: Gain in log-likelihood over the average speaker before this
            iteration: log p(F) − log p(F | w = 0, δ = 0) for each frame that counts.
    """

    extractor: IVectorExtractor
    gain: float


class _Sums(NamedTuple):
    """Sums over speakers of E[w] and E[w wᵀ], weighted by each Gaussian's counts."""

    squares: np.ndarray  # Σ N_c E[w wᵀ], packed: [gaussians, size (size + 1) / 2]
    crosses: np.ndarray  # Σ (F_c − N_c δ_c) E[w]ᵀ: [gaussians · dims, size]
    counts: np.ndarray  # Σ N_c: [gaussians]
    first: np.ndarray  # Σ E[w]: [size]
    second: np.ndarray  # Σ E[w wᵀ]: [size, size]
    gain: float

    def plus(self, other: tuple) -> "_Sums":
        return _Sums(*(mine + its for mine, its in zip(self, other, strict=True)))


def train_extractor(
    counts: np.ndarray,
    deviations: np.ndarray,
    size: int,
    *,
    num_iterations: int = 10,
    frame_weight: float = 0.1,
    seed: int = 0,
    num_processes: int = 1,
) -> Iterator[ExtractorStep]:
    """Finds δ and W; yields after every iteration.

    Sums are added in one order, whatever the number of processes. Memory does not grow
    with the number of speakers: the arrays may be memory-mapped and are read in blocks.

    Args:
        counts: N of each speaker, [speakers, gaussians].
        deviations: F of each speaker, [speakers, gaussians, dims].
        size: Dimensions of an i-vector.
        num_iterations: Iterations of expectation maximisation.
        frame_weight: Weight of a frame, in (0, 1].
        seed: Seed of the W that training begins with.
        num_processes: Number of processes that share the speakers.

    Raises:
        ValueError: There is no speaker, or no dimension.
    """
    if len(counts) < 1 or size < 1:
        raise ValueError(
            "`counts` must hold a speaker and `size` be at least 1, got "
            f"{len(counts)} and {size}"
        )
    random = np.random.default_rng(seed)
    shift = np.zeros(deviations.shape[1:])
    spread = np.sqrt(_FIRST_VARIANCE / size)
    loadings = spread * random.standard_normal((*shift.shape, size))
    extractor = IVectorExtractor(shift, loadings, frame_weight)
    for _ in range(num_iterations):
        sums = _expected(extractor, counts, deviations, num_processes)
        gain = sums.gain / max(1.0, sums.counts.sum() * frame_weight)
        loadings = _maximised(extractor, sums)
        extractor = _brought_back(extractor, loadings, sums, len(counts))
        yield ExtractorStep(extractor, gain)


def _expected(
    extractor: IVectorExtractor,
    counts: np.ndarray,
    deviations: np.ndarray,
    num_processes: int,
) -> _Sums:
    size = -(-len(counts) // _MAX_PARTS)
    parts = [slice(at, at + size) for at in range(0, len(counts), size)]

    def work(part: slice) -> _Sums:
        return _sums_of(extractor, counts[part], deviations[part])

    found = in_order(fork_map(work, parts, num_processes))
    return functools.reduce(_Sums.plus, found)


def _sums_of(
    extractor: IVectorExtractor, counts: np.ndarray, deviations: np.ndarray
) -> _Sums:
    blocks = (slice(at, at + _BLOCK) for at in range(0, len(counts), _BLOCK))
    several = (_sums_of_block(extractor, counts[b], deviations[b]) for b in blocks)
    return functools.reduce(_Sums.plus, several)


def _sums_of_block(
    extractor: IVectorExtractor, counts: np.ndarray, deviations: np.ndarray
) -> _Sums:
    counts, deviations = np.asarray(counts, float), np.asarray(deviations, float)
    known = extractor.posterior(counts, deviations)
    moments = known.second_moments()
    totals = counts.sum(axis=0)
    towards = (extractor.shift * deviations.sum(axis=0)).sum()
    away = 0.5 * totals @ (extractor.shift**2).sum(axis=1)
    return _Sums(
        product(counts.T, _packed(moments)),
        product(extractor._centred(counts, deviations).T, known.mean),
        totals,
        known.mean.sum(axis=0),
        moments.sum(axis=0),
        float(known.gain.sum() + extractor.frame_weight * (towards - away)),
    )


def _maximised(extractor: IVectorExtractor, sums: _Sums) -> np.ndarray:
    """W_c = (Σ (F_c − N_c δ_c) E[w]ᵀ) (Σ N_c E[w wᵀ])⁻¹; as it was where N_c is 0."""
    size = extractor.size
    seen = sums.counts > _LEAST_COUNT
    squares = _unpacked(sums.squares[seen], size)
    crosses = sums.crosses.reshape(extractor.loadings.shape)[seen]
    solved = torch.linalg.solve(torch.from_numpy(squares), torch.from_numpy(crosses).mT)
    loadings = extractor.loadings.copy()
    loadings[seen] = solved.mT.numpy()
    return loadings


def _brought_back(
    extractor: IVectorExtractor, loadings: np.ndarray, sums: _Sums, num_speakers: int
) -> IVectorExtractor:
    """Moves mean and covariance of the speakers' w into δ and W."""
    mean = sums.first / num_speakers
    covariance = sums.second / num_speakers - np.outer(mean, mean)
    return IVectorExtractor(
        extractor.shift + loadings @ mean,
        product(loadings, np.linalg.cholesky(covariance)),
        extractor.frame_weight,
    )


def _packed(symmetric: np.ndarray) -> np.ndarray:
    """The upper halves of matrices [..., size, size]."""
    rows, columns = np.triu_indices(symmetric.shape[-1])
    return np.ascontiguousarray(symmetric[..., rows, columns])


def _unpacked(packed: np.ndarray, size: int) -> np.ndarray:
    rows, columns = np.triu_indices(size)
    full = np.empty((*packed.shape[:-1], size, size))
    full[..., rows, columns] = packed
    full[..., columns, rows] = packed
    return full
