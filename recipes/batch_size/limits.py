"""The largest batch that costs little loss, and how sure that is.

Between two batches of the sweep the loss is taken to be linear in the logarithm of the
batch. The interval is the bootstrap's over seeds: it draws seeds with replacement, the
same ones for all cells because a seed means the same start and order of samples
everywhere. With three seeds it is a coarse one.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from recipes.batch_size.search import Best
from recipes.batch_size.settings import Cell


class Limit(NamedTuple):
    """How large a batch may be.

    Attributes:
        batch: largest batch within the margin; 0 if none is.
        open: whether the limit may be larger: the batch is the largest that was tried,
            or training diverged at the next one, which has no loss to draw a line to.
    """

    batch: float
    open: bool


class Interval(NamedTuple):
    """A figure and the central 95 % of the bootstrap."""

    value: float
    low: float
    high: float


def limit(curve: Mapping[int, float], largest_loss: float) -> Limit:
    """The batch at which a curve of losses first exceeds a loss.

    Args:
        curve: loss by batch; infinite where training diverged.
        largest_loss: largest loss that is within the margin.
    """
    batches = sorted(curve)
    if not batches or not curve[batches[0]] <= largest_loss:
        return Limit(0.0, False)
    for before, batch in itertools.pairwise(batches):
        if not curve[batch] <= largest_loss:
            if not math.isfinite(curve[batch]):
                return Limit(float(before), True)
            part = (largest_loss - curve[before]) / (curve[batch] - curve[before])
            return Limit(before * (batch / before) ** part, False)
    return Limit(float(batches[-1]), True)


def limits(
    bests: Mapping[Cell, Best], batch: int, margin: float, seeds: Sequence[int]
) -> dict[str, Limit]:
    """The limit of each algorithm, its losses the means over these seeds.

    The loss that may be exceeded by the margin is SSGD's at the baseline's batch,
    clipped where the algorithm is.

    Args:
        bests: cells, each at its best setting.
        batch: the baseline's.
        margin: 0.05 for 5 %.
        seeds: seeds, each as often as it counts.
    """
    curves: dict[str, dict[int, float]] = {}
    for cell, best in bests.items():
        curves.setdefault(cell.algorithm, {})[cell.batch] = _mean(best, seeds)
    largest = {
        name: (1 + margin) * _mean(bests[Cell(Cell(name, 0).control, batch)], seeds)
        for name in curves
    }
    return {name: limit(curve, largest[name]) for name, curve in curves.items()}


def ratio(
    bests: Mapping[Cell, Best],
    batch: int,
    margin: float,
    algorithm: str,
    draws: int = 1000,
) -> Interval:
    """An algorithm's limit over that of SSGD, clipped as it is, with its interval.

    Args:
        bests: cells, each at its best setting.
        batch: the baseline's.
        margin: 0.05 for 5 %.
        algorithm: algorithm whose limit is estimated.
        draws: number of draws of the bootstrap.
    """
    control = Cell(algorithm, 0).control
    both = algorithm, control
    bests = {cell: best for cell, best in bests.items() if cell.algorithm in both}
    seeds = sorted(bests[Cell(control, batch)].losses)

    @cache  # five seeds have 126 different draws
    def of(seeds: tuple[int, ...]) -> float:
        found = limits(bests, batch, margin, seeds)
        return found[algorithm].batch / found[control].batch

    dice = np.random.default_rng(0)
    drawn = [
        of(tuple(sorted(dice.choice(seeds, len(seeds)).tolist()))) for _ in range(draws)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(of(tuple(seeds)), float(low), float(high))


def _mean(best: Best, seeds: Sequence[int]) -> float:
    """Infinite where a seed was left out because another diverged."""
    return sum(best.losses.get(seed, math.inf) for seed in seeds) / len(seeds)
