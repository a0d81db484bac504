"""The page of matrix arithmetic against closed forms, and against its own limits."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.reference import (
    Exchange,
    Merge,
    Step,
    asynchronous,
    delay_by_one,
    synchronous,
)
from lightning_adpsgd.topology.matrices import complete
from tests.helpers import ALL_TOPOLOGIES, exists, mixing_of, random_rows, take_first

LR = 0.3


def noisy(weights: Tensor, step: int) -> Tensor:
    """Gradients of a bowl, with noise of the step's and the row's own."""
    return weights.sin() + random_rows(*weights.shape, seed=step)


def test_a_complete_average_after_the_step_is_one_learner_with_the_mean_gradient() -> (
    None
):
    start = random_rows(1).expand(4, -1)
    found = take_first(synchronous(start, noisy, lambda k: complete(4), LR), 5)[-1]
    weight = start[0]
    for step in range(5):
        weight = weight - LR * noisy(weight.expand(4, -1), step).mean(0)
    torch.testing.assert_close(found, weight.expand(4, -1), atol=1e-14, rtol=0)


@pytest.mark.parametrize("order", ["step_then_average", "average_then_step"])
@pytest.mark.parametrize("name", ALL_TOPOLOGIES)
def test_averages_leave_the_mean_to_the_gradients(name: str, order: Order) -> None:
    size = 4 if exists(name, 4) else 8
    start, constant = random_rows(size), random_rows(size, seed=1)
    mixing = mixing_of(name, size)
    steps = synchronous(start, lambda w, k: constant, mixing, LR, order)
    expected = start.mean(0) - 7 * LR * constant.mean(0)
    torch.testing.assert_close(
        take_first(steps, 7)[-1].mean(0), expected, atol=1e-13, rtol=0
    )


def test_the_first_step_of_delay_by_one_joins_no_average() -> None:
    start = random_rows(3)
    steps = delay_by_one(start, noisy, lambda k: complete(3), LR)
    one, two = take_first(steps, 2)
    assert torch.equal(one, start - LR * noisy(start, 0))
    expected = one.mean(0) - LR * noisy(one, 1)
    torch.testing.assert_close(two, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("lr_h", [0.9, 1.1])
def test_delay_by_one_is_stable_below_half_the_rate_of_gradient_descent(
    lr_h: float,
) -> None:
    """The amplitude of a disagreement is 0 − lr h times the one before, at γ = 1."""
    start = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    steps = delay_by_one(start, lambda w, k: w, lambda k: complete(2), lr_h)
    last = take_first(steps, 9)[-1]
    expected = start * (1 - lr_h) * (-lr_h) ** 8
    torch.testing.assert_close(last, expected, atol=1e-12, rtol=0)


@given(st.integers(0, 10_000))
def test_only_gradients_change_the_sum_of_weights_and_pending_changes(
    seed: int,
) -> None:
    draw, size = random.Random(seed), 5
    start, constant = random_rows(size, seed=seed), random_rows(size, seed=seed + 1)

    def event() -> Step | Exchange | Merge:
        i, j = draw.sample(range(size), 2)
        return draw.choice([Step(i, 0), Exchange(i, j, draw.random()), Merge(i)])

    events = [event() for _ in range(40)]
    expected = start.sum(0)
    states = asynchronous(start, lambda w, k: constant, events, LR)
    for one, (weights, pending) in zip(events, states, strict=True):
        if isinstance(one, Step):
            expected = expected - LR * constant[one.i]
        torch.testing.assert_close(
            (weights + pending).sum(0), expected, atol=1e-12, rtol=0
        )


def lockstep(pairs: list[tuple[int, int]], size: int, num_steps: int) -> list:
    """All step, the pairs meet, all merge."""
    return [
        event
        for k in range(num_steps)
        for event in (
            *(Step(i, k) for i in range(size)),
            *(Exchange(i, j) for i, j in pairs),
            *(Merge(i) for i in range(size)),
        )
    ]


def test_asynchronous_averaging_in_lockstep_is_synchronous() -> None:
    start, pairs = random_rows(4), [(0, 2), (1, 3)]
    mixing = torch.eye(4, dtype=torch.float64)
    for i, j in pairs:
        mixing[[i, i, j, j], [i, j, i, j]] = 1 / 2
    events = lockstep(pairs, 4, 6)
    *_, (found, pending) = asynchronous(start, noisy, events, LR)
    expected = take_first(synchronous(start, noisy, lambda k: mixing, LR), 6)[-1]
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)
    assert not pending.any()


def test_steps_during_an_exchange_are_kept() -> None:
    start = torch.tensor([[0.0], [8.0]], dtype=torch.float64)
    events = [Exchange(0, 1), Step(0, 0), Step(0, 1), Merge(0), Merge(1)]
    *_, (found, _) = asynchronous(start, lambda w, k: torch.ones_like(w), events, 1.0)
    assert found.tolist() == [[2.0], [4.0]]
