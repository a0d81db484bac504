"""Mixtures of Gaussians with diagonal covariances, one mixture for each HMM state.

    log p(x | state) = log Σ_g w_g N(x; μ_g, diag σ²_g)      g over the Gaussians

All mixtures lie in one table, so the likelihoods of all states are one matrix product.
Training is expectation maximisation on frames whose state is known (`accumulate`, then
`update`); mixtures grow by splitting (`mix_up`). Which frame has which state is found
in `alignment`.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.parallel import product
from lightning_adpsgd.files import bytes_written_whole

_FLOOR_OF_VARIANCE = 0.01  # times the variance of all frames
_MOST_TERMS = 4_000_000  # Gaussians times frames that are scored at a time
_MIN_COUNT = 10.0  # frames; a Gaussian with less is dropped
_POWER = 0.2  # of the frames of a state, which decides how many Gaussians it gets
_LEAST_FRAMES = 20.0  # of each Gaussian of a state that is split
_PERTURBATION = 0.2  # standard deviations between the halves of a split Gaussian


@dataclass(frozen=True)
class GaussianMixtures:
    """The Gaussians of all states, sorted by state; every state has at least one.

    Attributes:
        state: int64 [gaussians], ascending; which state each Gaussian belongs to.
        weight: float64 [gaussians], sums to 1 over each state.
        mean: float64 [gaussians, dimension].
        variance: float64 [gaussians, dimension].
        floor: float64 [dimension], the least variance.
    """

    state: np.ndarray
    weight: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    floor: np.ndarray

    @property
    def num_states(self) -> int:
        """Number of states."""
        return int(self.state[-1]) + 1

    @property
    def num_gaussians(self) -> int:
        """Number of Gaussians of all states."""
        return len(self.state)

    @cached_property
    def first(self) -> np.ndarray:
        """Index of the first Gaussian of each state: int64 [states]."""
        return np.searchsorted(self.state, np.arange(self.num_states))

    def scorer(self) -> "Scorer":
        """A function from frames to the log-likelihoods of states."""
        return Scorer(self)

    @cached_property
    def _quadratic(self) -> tuple[np.ndarray, np.ndarray]:
        """log(w N(x)) = table · [x, x²] + constant, in float32."""
        precision = 1 / self.variance
        table = np.hstack([self.mean * precision, -0.5 * precision])
        constant = np.log(self.weight) - 0.5 * (
            self.mean.shape[1] * math.log(2 * math.pi)
            + np.log(self.variance).sum(axis=1)
            + (self.mean**2 * precision).sum(axis=1)
        )
        return table.astype(np.float32), constant.astype(np.float32)

    def save(self, path: str | Path) -> None:
        """Writes an .npz file, whole or not at all."""
        with bytes_written_whole(Path(path)) as file:
            np.savez(file, **dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> "GaussianMixtures":
        """Reads a file of `save`.

        Raises:
            ValueError: The file was not written by `save`, or is truncated.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls(**arrays)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(
                f"{path} is not a file of Gaussian mixtures: {error}"
            ) from error


class Scorer:
    """Maps frames [time, dimension] to log p [time, states], float32.

    Args:
        mixtures: Mixtures of all states.
    """

    def __init__(self, mixtures: GaussianMixtures) -> None:
        self._table, self._constant = mixtures._quadratic
        self._bounds = np.append(mixtures.first, mixtures.num_gaussians)

    def __call__(self, frames: np.ndarray) -> np.ndarray:
        """The log-likelihoods of all states."""
        return self.of(frames, np.arange(len(self._bounds) - 1))

    def of(self, frames: np.ndarray, states: np.ndarray) -> np.ndarray:
        """The log-likelihoods of some states, [time, len(states)]."""
        sizes = self._bounds[states + 1] - self._bounds[states]
        first = np.cumsum(sizes) - sizes
        owner = np.repeat(np.arange(len(states)), sizes)
        rows = self._bounds[states][owner] + np.arange(len(owner)) - first[owner]
        table, constant = self._table[rows], self._constant[rows, None]
        found = np.empty((len(frames), len(states)), np.float32)
        step = max(1, _MOST_TERMS // max(1, len(rows)))
        for at in range(0, len(frames), step):
            # Gaussians are rows: sums over a state's Gaussians run over whole rows.
            terms = product(table, _with_squares(frames[at : at + step]).T) + constant
            found[at : at + step] = _summed_by(first, owner, terms).T
        return found


def _summed_by(first: np.ndarray, owner: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """log Σ exp over the rows of each owner; `terms` is overwritten."""
    peak = np.maximum.reduceat(terms, first, axis=0)
    terms -= peak[owner]
    np.exp(terms, out=terms)
    return peak + np.log(np.add.reduceat(terms, first, axis=0))


class Statistics(NamedTuple):
    """Sums over frames for each Gaussian, weighted by its share in each frame.

    `frames` is [gaussians], `first` and `second` (of x and x²) [gaussians, dimension].
    """

    frames: np.ndarray
    first: np.ndarray
    second: np.ndarray

    def __add__(self, other: tuple) -> "Statistics":  # type: ignore[override]
        return Statistics(*(mine + its for mine, its in zip(self, other, strict=True)))


def flat(mean: np.ndarray, variance: np.ndarray, num_states: int) -> GaussianMixtures:
    """Mixtures with the same Gaussian, that of all frames, for every state.

    Raises:
        ValueError: A variance is not positive.
    """
    floor = _FLOOR_OF_VARIANCE * variance
    if not np.all(variance > 0):
        raise ValueError("`variance` must be positive in every dimension")
    return GaussianMixtures(
        np.arange(num_states),
        np.ones(num_states),
        np.tile(mean, (num_states, 1)).astype(float),
        np.tile(variance, (num_states, 1)).astype(float),
        floor.astype(float),
    )


def accumulate(
    mixtures: GaussianMixtures, frames: np.ndarray, states: np.ndarray
) -> Statistics:
    """The expectation step on frames [time, dimension] of known states [time].

    Frames with negative states are ignored.
    """
    dimension = mixtures.mean.shape[1]
    sums = np.zeros((mixtures.num_gaussians, 1 + 2 * dimension))
    squared = _with_squares(frames)
    for positions, rows, shares, _ in shares_by_state(mixtures, frames, states):
        sums[rows, 0] = shares.sum(axis=0, dtype=float)
        sums[rows, 1:] = product(shares.T, squared[positions])
    return Statistics(sums[:, 0], sums[:, 1 : 1 + dimension], sums[:, 1 + dimension :])


class StateShares(NamedTuple):
    """The frames of one state, with the shares of its Gaussians.

    Attributes:
        positions: int64 [count], indices of the frames.
        rows: Rows of the state's Gaussians in the table.
        shares: float32 [count, gaussians], sums to 1 over the Gaussians.
        log_likelihoods: float32 [count], log p(frame | state).
    """

    positions: np.ndarray
    rows: slice
    shares: np.ndarray
    log_likelihoods: np.ndarray


def shares_by_state(
    mixtures: GaussianMixtures, frames: np.ndarray, states: np.ndarray
) -> Iterator[StateShares]:
    """One item for each state that occurs; frames of negative states are left out.

    Args:
        mixtures: Mixtures to whose Gaussians the frames are assigned.
        frames: [time, dimension].
        states: [time].
    """
    table, constant = mixtures._quadratic
    bounds = np.append(mixtures.first, mixtures.num_gaussians)
    order = np.argsort(states, kind="stable")
    edges = np.searchsorted(states[order], np.arange(mixtures.num_states + 1))
    for state in np.flatnonzero(np.diff(edges)):
        positions = order[edges[state] : edges[state + 1]]
        rows = slice(bounds[state], bounds[state + 1])
        own = _with_squares(frames[positions])
        terms = product(own, table[rows].T) + constant[rows]
        yield StateShares(positions, rows, *_shares(terms))


def _with_squares(frames: np.ndarray) -> np.ndarray:
    frames = frames.astype(np.float32, copy=False)
    return np.hstack([frames, frames**2])


def _shares(terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Terms [time, gaussians] as parts of their sum, and the logarithm of the sum."""
    peak = terms.max(axis=1, keepdims=True)
    terms = np.exp(terms - peak)
    total = terms.sum(axis=1, keepdims=True)
    return terms / total, (peak + np.log(total))[:, 0]


def update(mixtures: GaussianMixtures, sums: Statistics) -> GaussianMixtures:
    """The maximisation step; variances are floored, rare Gaussians dropped.

    A state's most frequent Gaussian is always kept, and estimated from what it has,
    where Kaldi leaves it as it was if that is below 10 frames: no worse, says
    docs/log.md. A state without frames is unchanged.
    """
    seen = sums.frames > 0
    count = np.where(seen, sums.frames, 1.0)[:, None]
    mean = np.where(seen[:, None], sums.first / count, mixtures.mean)
    variance = np.where(seen[:, None], sums.second / count - mean**2, mixtures.variance)
    total = np.bincount(mixtures.state, sums.frames)[mixtures.state]
    weight = np.where(total > 0, sums.frames / np.maximum(total, 1), mixtures.weight)
    kept = (total == 0) | (sums.frames >= _MIN_COUNT) | _most_frequent(mixtures, sums)
    weight, state = weight[kept], mixtures.state[kept]
    weight /= np.bincount(state, weight)[state]
    variance = np.maximum(variance[kept], mixtures.floor)
    return GaussianMixtures(state, weight, mean[kept], variance, mixtures.floor)


def _most_frequent(mixtures: GaussianMixtures, sums: Statistics) -> np.ndarray:
    best = np.maximum.reduceat(sums.frames, mixtures.first)
    return sums.frames == best[mixtures.state]


def mix_up(
    mixtures: GaussianMixtures,
    frames_per_state: np.ndarray,
    num_gaussians: int,
    *,
    seed: int = 0,
) -> GaussianMixtures:
    """Splits Gaussians, the heaviest of a state first, up to `num_gaussians` in total.

    A state's share grows with frames^0.2, as in Kaldi; a Gaussian gets at least 20
    frames, so there may be fewer in the end.
    """
    targets = _targets(mixtures, frames_per_state, num_gaussians)
    random = np.random.default_rng(seed)
    bounds = np.append(mixtures.first, mixtures.num_gaussians)
    parts = [
        _split(mixtures, slice(*bounds[state : state + 2]), target, random)
        for state, target in enumerate(targets)
    ]
    weight, mean, variance = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    state = np.repeat(np.arange(len(targets)), [len(part[0]) for part in parts])
    return GaussianMixtures(state, weight, mean, variance, mixtures.floor)


def _targets(
    mixtures: GaussianMixtures, frames: np.ndarray, num_gaussians: int
) -> np.ndarray:
    sizes = np.bincount(mixtures.state)
    strength = np.asarray(frames, float) ** _POWER
    # the state whose Gaussians stand for most, of those that may grow
    queue = [(-strength[i] / size, i) for i, size in enumerate(sizes.tolist())]
    heapq.heapify(queue)
    missing = num_gaussians - mixtures.num_gaussians
    while queue and missing > 0:
        _, state = heapq.heappop(queue)
        if (sizes[state] + 1) * _LEAST_FRAMES <= frames[state]:
            sizes[state] += 1
            missing -= 1
            heapq.heappush(queue, (-strength[state] / sizes[state], state))
    return sizes


def _split(
    mixtures: GaussianMixtures, rows: slice, target: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    weight, mean = list(mixtures.weight[rows]), list(mixtures.mean[rows])
    variance = list(mixtures.variance[rows])
    while len(weight) < target:
        heaviest = int(np.argmax(weight))
        weight[heaviest] /= 2
        step = _PERTURBATION * random.standard_normal(len(mean[0]))
        step *= np.sqrt(variance[heaviest])
        weight.append(weight[heaviest])
        mean.append(mean[heaviest] + step)
        mean[heaviest] = mean[heaviest] - step
        variance.append(variance[heaviest])
    return np.array(weight), np.array(mean), np.array(variance)
