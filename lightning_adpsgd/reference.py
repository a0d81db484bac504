"""The family of algorithms on a matrix of weights: the page to read first.

Super-learner i has the weights w_i, row i of the matrix W; G(W) has the gradients
g_i(w_i) as its rows. T is the mixing matrix of a step, doubly stochastic: T[j, i] is
the share of w_j that super-learner i takes (the identity where no round is due). The
papers (arXiv 1710.06952, 1904.04956, 2110.11199) average in these three ways. The
virtual cluster, threads and processes are tested against them.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# From W, [S, length], and the number of the step, from 0, to G(W), [S, length].
Gradients = Callable[[Tensor, int], Tensor]
# From the number of the step, from 0, to T, [S, S].
Mixing = Callable[[int], Tensor]


def synchronous(
    weights: Tensor,
    gradients: Gradients,
    mixing: Mixing,
    lr: float,
    order: Literal["step_then_average", "average_then_step"] = "step_then_average",
) -> Iterator[Tensor]:
    """W after each step, where all super-learners wait for the average (SD-PSGD).

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
        weights = averaged - lr * gradients(weights, step)
        yield weights


class Step(NamedTuple):
    """Super-learner i makes its step k: w_i ← w_i − lr g_i(w_i)."""

    i: int
    k: int


class Exchange(NamedTuple):
    """Super-learners i and j meet: δ = a (x_j − x_i);  d_i += δ;  d_j −= δ."""

    i: int
    j: int
    a: float = 1 / 2


class Merge(NamedTuple):
    """Super-learner i takes what exchanges have changed: w_i += d_i;  d_i = 0."""

    i: int


def asynchronous(
    weights: Tensor,
    gradients: Gradients,
    events: Iterable[Step | Exchange | Merge],
    lr: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """W and D after each event, in whatever order learners come (AD-PSGD).

    Row d_i of D is what exchanges have changed since the last merge of i; an exchange
    reads x_i = w_i + d_i. Only gradients change Σ_i (w_i + d_i).
    """
    w, d = weights.clone(), torch.zeros_like(weights)
    for event in events:
        match event:
            case Step(i, k):
                w[i] -= lr * gradients(w, k)[i]
            case Exchange(i, j, a):
                change = a * (w[j] + d[j] - w[i] - d[i])
                d[i] += change
                d[j] -= change
            case Merge(i):
                w[i] += d[i]
                d[i] = 0.0
        yield w.clone(), d.clone()
