"""The algorithms (arXiv 1710.06952, 1904.04956, 2110.11199): the page to read first.

Super-learner i has the weights w_i, row i of the matrix W; G(W) has the gradients
g_i(w_i) as its rows. T, doubly stochastic, mixes in a step: i takes the share T[j, i]
of w_j. Without a round, T is the identity. Tests hold all else to this page.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from torch import Tensor

# G(W) by W, [S, length], and the number of the step, from 0; T, [S, S], by the number.
Gradients = Callable[[Tensor, int], Tensor]
Mixing = Callable[[int], Tensor]


def synchronous(
    weights: Tensor,
    gradients: Gradients,
    mixing: Mixing,
    lr: float,
    order: Literal["step_then_average", "average_then_step"] = "step_then_average",
) -> Iterator[Tensor]:
    """W after each step, where all wait for the average (SD-PSGD).

    W ← Tᵀ (W − lr G(W)), or, averaging before the step, W ← Tᵀ W − lr G(W).
    """
    for step in itertools.count():
        update = lr * gradients(weights, step)
        if order == "step_then_average":
            weights = mixing(step).T @ (weights - update)
        else:
            weights = mixing(step).T @ weights - update
        yield weights


def delay_by_one(
    weights: Tensor, gradients: Gradients, mixing: Mixing, lr: float
) -> Iterator[Tensor]:
    """W after each step, where the average hides behind one gradient (D1-PSGD).

    W ← Tᵀ W − lr G(W), with the T of the step before; the first step has none.
    """
    for step in itertools.count():
        averaged = mixing(step - 1).T @ weights if step else weights
        yield (weights := averaged - lr * gradients(weights, step))


class Step(NamedTuple):
    """Super-learner i makes its step k: w_i ← w_i − lr g_i(w_i)."""

    i: int
    k: int


class Exchange(NamedTuple):
    """i, j meet; x = w + d + c u, u = −lr g: δ = a (x_j − x_i); d_i += δ; d_j −= δ."""

    i: int
    j: int
    a: float = 1 / 2
    c: tuple[float, float] = (0.0, 0.0)  # how far each looks ahead; none in the papers


class Merge(NamedTuple):
    """Super-learner i takes what exchanges have changed: w_i += d_i;  d_i = 0."""

    i: int


Event = Step | Exchange | Merge


def ready_pairs(events: Iterable[Event]) -> Iterator[Event]:
    """The events where ready pairs meet: both ends merge at their step boundary."""
    for event in events:
        ends = event[:2] if isinstance(event, Exchange) else ()
        yield from (event, *map(Merge, ends))


def asynchronous(
    weights: Tensor, gradients: Gradients, events: Iterable[Event], lr: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """W and D after each event, in whatever order learners come (AD-PSGD).

    Row d_i of D awaits the next merge of i. Only gradients change Σ_i (w_i + d_i).
    """
    w, (d, u) = weights.clone(), weights.new_zeros(2, *weights.shape)
    for event in events:
        match event:
            case Step(i, k):
                w[i] += u[i].copy_(-lr * gradients(w, k)[i])
            case Exchange(i, j, a, (c_i, c_j)):
                change = a * (w[j] + d[j] + c_j * u[j] - w[i] - d[i] - c_i * u[i])
                d[i], d[j] = d[i] + change, d[j] - change
            case Merge(i):
                w[i], d[i] = w[i] + d[i], 0.0
        yield w.clone(), d.clone()
