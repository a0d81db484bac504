"""Pairs that meet at step boundaries, on the simulated clock."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_adpsgd import reference
from lightning_adpsgd.dials import ReadyPairs
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.virtual.clock import Compute, Link
from lightning_adpsgd.virtual.cluster import VirtualCluster
from lightning_adpsgd.virtual.timeline import (
    Asynchronous,
    Begun,
    Ended,
    Event,
    Scenario,
    Stepped,
    Waited,
)
from tests.helpers import random_rows

WEIGHTS, BANDWIDTH, LATENCY = 100.0, 2000.0, 0.01
# Four latencies: offer, answer, question, answer.
TRANSFER = WEIGHTS / BANDWIDTH + 4 * LATENCY
LR = 0.2


def timeline(
    num: int, max_wait: float | None, topology: str = "complete", **given: Any
) -> Asynchronous:
    link = Link(BANDWIDTH, LATENCY)
    scenario = Scenario(find_topology(topology), num, **{"link": link, **given})
    return Asynchronous(scenario, WEIGHTS, WEIGHTS, in_pairs=True, max_wait=max_wait)


def of(kind: Any, events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def until(pairs: Asynchronous, seconds: float) -> list[Event]:
    return list(itertools.takewhile(lambda e: e.seconds < seconds, pairs))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 6),
    topology=st.sampled_from(["complete", "ring"]),
    max_wait=st.sampled_from([0.01, 0.3, 5.0]),
    spread=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 10_000),
)
def test_one_that_is_slow_costs_no_more_than_the_patience(
    size: int, topology: str, max_wait: float, spread: float, seed: int
) -> None:
    pairs = timeline(
        size,
        max_wait,
        topology,
        compute=Compute(1.0, spread, slow={0: 10.0}),
        seed=seed,
    )
    found = until(pairs, 30.0)
    assert all(event.waited <= max_wait + 1e-9 for event in of(Waited, found))
    assert_nobody_is_in_two_exchanges(found)
    if spread or size == 1:
        return
    for learner in range(1, size):
        times = [e.seconds for e in of(Stepped, found) if e.super_learner == learner]
        steps = [b - a for a, b in itertools.pairwise(times)]
        assert max(steps) <= 1.0 + max_wait + TRANSFER + 1e-9
        assert len(times) >= 30 / (1.0 + max_wait + TRANSFER) - 1


def assert_nobody_is_in_two_exchanges(events: list[Event]) -> None:
    busy = set[int]()
    for event in events:
        match event:
            case Begun(_, exchange):
                assert not busy & set(exchange.ends)
                busy |= set(exchange.ends)
            case Ended(_, exchange):
                busy -= set(exchange.ends)
            case Stepped(_, index):
                assert index not in busy  # the average comes before the next gradient
            case _:
                pass


def test_an_exchange_is_exposed_and_takes_its_bytes_and_four_latencies() -> None:
    found = until(timeline(2, max_wait=0.5), 4.0)
    ends = [event.seconds for event in of(Ended, found)]
    assert ends == pytest.approx([k * (1 + TRANSFER) for k in (1, 2, 3)])
    times = [event.seconds for event in of(Stepped, found)][::2]
    assert times == pytest.approx([1, 2 + TRANSFER, 3 + 2 * TRANSFER])


def test_of_three_at_equal_speed_one_waits_in_vain() -> None:
    found = until(timeline(3, max_wait=0.25), 1.5)
    waits = of(Waited, found)[:3]
    assert [event.waited for event in waits if event.met] == [0.0, 0.0]
    assert [event.waited for event in waits if not event.met] == [0.25]


def test_who_comes_within_the_patience_is_met() -> None:
    speeds = Compute(1.0, slow={1: 1.2})
    found = until(timeline(2, max_wait=0.2, compute=speeds), 3.0)
    waits = [(e.super_learner, e.waited, e.met) for e in of(Waited, found)[:2]]
    assert sorted(waits) == [(0, pytest.approx(0.2), True), (1, 0.0, True)]


def test_the_default_patience_is_a_quarter_of_a_step() -> None:
    found = until(timeline(2, None, compute=Compute(2.0, slow={1: 10.0})), 12.0)
    assert {event.waited for event in of(Waited, found)} == {0.5}


def test_boundaries_between_rounds_are_passed() -> None:
    found = until(timeline(2, max_wait=0.5, gossip_every=3), 9.5)
    assert [e.seconds for e in of(Ended, found)] == pytest.approx(
        [3 + TRANSFER, 6 + 2 * TRANSFER, 9 + 3 * TRANSFER]
    )


def test_the_shards_of_a_super_learner_cross_side_by_side_and_are_gathered() -> None:
    found = until(timeline(2, 0.5, super_learner_size=2, inner_link=Link(1000.0)), 3.0)
    crossed = 1 + 100 / 1000 + 50 / BANDWIDTH + 4 * LATENCY  # the step has an allreduce
    assert of(Ended, found)[0].seconds == pytest.approx(crossed)
    assert of(Stepped, found)[2].seconds == pytest.approx(crossed + 50 / 1000 + 1.1)


@pytest.mark.parametrize("size", [4, 6, 8])
def test_those_that_arrive_together_meet_others_than_their_last_partner(
    size: int,
) -> None:
    found = of(Ended, until(timeline(size, None), 25.0))
    pairs = [frozenset(event.exchange.ends) for event in found]
    assert len(set(pairs[: 20 * size // 2])) > size // 2


class Late(Asynchronous):
    """The second of two begins half a step later."""

    def _compute(self, index: int, begin: float) -> None:
        super()._compute(index, begin or index / 2)


@pytest.mark.parametrize("seed", range(5))
def test_two_that_are_half_a_step_apart_meet_before_long(seed: int) -> None:
    scenario = Scenario(
        find_topology("complete"), 2, link=Link(BANDWIDTH, LATENCY), seed=seed
    )
    found = until(Late(scenario, WEIGHTS, WEIGHTS, in_pairs=True), 40.0)
    assert len(of(Ended, found)) > 10


def test_those_that_met_last_meet_again_if_nobody_else_comes() -> None:
    """After half of their wait, and at each boundary."""
    slow = Compute(1.0, slow={2: 1000.0})
    waits = of(Waited, until(timeline(3, max_wait=0.5, compute=slow), 20.0))
    assert len(waits) > 20
    assert all(event.met for event in waits)


# --- with weights


class Bowl(nn.Module):
    """A gradient of sin(w) and the batch."""

    def __init__(self, length: int = 7) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(length, dtype=torch.float64))


def bowl(module: nn.Module, batch: Tensor) -> Tensor:
    weight: Any = module.weight
    return (weight * batch[0]).sum() - weight.cos().sum()


def batches_of(learner: int) -> Iterator[Tensor]:
    return (random_rows(1, seed=1000 * learner + k) for k in itertools.count())


def recorded(virtual: VirtualCluster) -> list[reference.Event]:
    """The steps and exchanges of a cluster, as they come."""
    events, learners = list[reference.Event](), virtual.learners
    follow, update = learners._follow, learners.update  # type: ignore[attr-defined]

    def following(event: Event) -> None:
        if isinstance(event, Ended):
            exchange = event.exchange
            events.append(reference.Exchange(exchange.asker, exchange.asked))
        follow(event)

    def updating(*arguments: Any) -> Any:
        index = learners._turn  # type: ignore[attr-defined]
        events.append(reference.Step(index, learners.steps[index]))
        return update(*arguments)

    learners._follow, learners.update = following, updating  # type: ignore
    return events


@pytest.mark.parametrize(("size", "num_learners"), [(2, 1), (5, 1), (3, 2)])
def test_the_cluster_does_what_the_matrix_does(size: int, num_learners: int) -> None:
    virtual = VirtualCluster(
        Bowl(),
        size,
        num_learners,
        "complete",
        ReadyPairs(max_wait=0.3),
        loss=bowl,
        optimizer=lambda parameters: torch.optim.SGD(parameters, LR),
        compute=Compute(1.0, spread=0.4, slow={1: 3.0}),
        link=Link(BANDWIDTH, LATENCY),
        samples_in=lambda batch: 1,
    )
    events = recorded(virtual)
    report = virtual.fit(batches_of, 60 * num_learners)

    def gradients(weights: Tensor, number: int) -> Tensor:
        noise = [
            sum(
                random_rows(1, seed=1000 * (i * num_learners + n) + number)[0]
                for n in range(num_learners)
            )
            / num_learners
            for i in range(size)
        ]
        return weights.sin() + torch.stack(noise)  # type: ignore[arg-type]

    start = torch.zeros(size, 7, dtype=torch.float64)
    paired = reference.ready_pairs(events)
    *_, (expected, pending) = reference.asynchronous(start, gradients, paired, LR)
    found = virtual.weights()[0][:, :7]
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert not pending.any()
    totals = report.totals
    assert totals.exchanges > 10
    assert totals.skipped > 0
    assert set(totals.staleness) == {0}
