"""By how much averaging shrinks a disagreement, as measured and as a topology promises.

What gradients add to the disagreement of the super-learners in each step, averaging
takes away again. In a steady state both are equal, so that the ratio

    r = D^2 / (lr^2 V),    D^2 = mean_i |w_i - w_mean|^2,    V = mean_i |g_i - g_mean|^2

tells the contraction c of the amplitude per optimizer step: with
``D^2 = c^2 (D^2 + lr^2 V)`` where the average comes after the step, and
``D^2 = c^2 D^2 + lr^2 V`` where it comes before. It holds for plain SGD whose gradients
scatter anew in each step, at a rate that changes slowly. Of a topology the same ratio
follows from its matrices, for a scatter that is the same in all directions: that is
what synchronous rounds would reach, beside which an asynchronous engine can be put. For
a single matrix on two super-learners c is |lambda_2|; with more it lies below, because
the faster modes count too.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import count

import torch
from torch import Tensor

from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.topology.matrices import (
    complete,
    contraction,
    identity,
    with_gain,
)
from lightning_adpsgd.topology.named import Topology

_MOST_SUPER_LEARNERS = 128
_WINDOW, _MOST_WINDOWS, _TOLERANCE = 64, 64, 1e-3


def contraction_of_balance(balance: float, order: Order) -> float:
    """c per optimizer step of the steady state with this ratio r.

    Args:
        balance: r; not a number if there was nothing to balance.
        order: Whether the distance was taken after an average or after a step.
    """
    if order == "step_then_average":
        return math.sqrt(balance / (1 + balance))
    return math.sqrt(max(0.0, 1 - 1 / balance)) if balance else 0.0


@lru_cache(maxsize=8)
def balance_of(
    topology: Topology, size: int, gain: float, every: int, order: Order, seed: int
) -> float:
    """The ratio r that synchronous rounds of a topology reach; NaN above 128.

    Args:
        topology: Who averages with whom.
        size: S.
        gain: gamma.
        every: Optimizer steps per round.
        order: Whether the average comes after the step or before it.
        seed: Of topologies drawn at random.
    """
    if not 1 < size <= _MOST_SUPER_LEARNERS:
        return math.nan
    before = mean = math.inf
    rounds = _balances(topology, size, gain, every, order, seed)
    for _ in range(_MOST_WINDOWS):
        mean = sum(next(rounds) for _ in range(_WINDOW)) / _WINDOW
        if abs(mean - before) <= _TOLERANCE * mean:
            break
        before = mean
    return mean


def _balances(
    topology: Topology, size: int, gain: float, every: int, order: Order, seed: int
) -> Iterator[float]:
    """r in each round, the mean over its steps: a covariance driven by white noise."""
    noise = identity(size) - complete(size)
    covariance = torch.zeros_like(noise)
    for round in count():
        mixing = with_gain(topology.matrix(size, round, seed), gain)
        before = _ratio(covariance, noise)
        if order == "step_then_average":
            covariance = _mixed(covariance + every * noise, mixing)
            steps = [before + step for step in range(1, every)]
            yield (sum(steps) + _ratio(covariance, noise)) / every
        else:
            covariance = _mixed(covariance, mixing)
            yield _ratio(covariance, noise) + (every + 1) / 2
            covariance = covariance + every * noise


def _ratio(covariance: Tensor, noise: Tensor) -> float:
    return float(covariance.trace() / noise.trace())


def _mixed(covariance: Tensor, mixing: Tensor) -> Tensor:
    return mixing.T @ covariance @ mixing


@lru_cache(maxsize=8)
def spectral_contraction(
    topology: Topology, size: int, gain: float, seed: int
) -> float:
    """What one round leaves of the slowest disagreement; NaN above 128.

    Of a topology drawn at random, to which all disagreements are alike: the root of
    what its first 64 rounds leave of the squared distance, on average.
    """
    if not 1 < size <= _MOST_SUPER_LEARNERS:
        return math.nan
    period = topology.period(size)
    numbers = range(period or _WINDOW)
    matrices = (topology.matrix(size, number, seed) for number in numbers)
    rounds = [with_gain(mixing, gain) for mixing in matrices]
    return contraction(rounds) if period else _left_on_average(rounds)


def _left_on_average(rounds: list[Tensor]) -> float:
    noise = identity(len(rounds[0])) - complete(len(rounds[0]))
    ratios = [_ratio(_mixed(noise, mixing), noise) for mixing in rounds]
    return math.sqrt(sum(ratios) / len(ratios))
