"""What happens when on the simulated clock, against arithmetic by hand."""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.virtual.clock import BUCKET_BYTES, Compute, Link
from lightning_adpsgd.virtual.timeline import (
    Asynchronous,
    Begun,
    Ended,
    Event,
    Lockstep,
    Scenario,
    Stepped,
)
from tests.helpers import topologies_of

WEIGHTS = 100.0  # bytes


def scenario(num: int, topology: Any = "ring", **arguments: Any) -> Scenario:
    return Scenario(find_topology(topology), num, **arguments)


def until(timeline: Asynchronous, seconds: float) -> list[Event]:
    """All events before this time."""
    return list(itertools.takewhile(lambda e: e.seconds < seconds, timeline))


def asynchronous(given: Scenario, **arguments: Any) -> Asynchronous:
    return Asynchronous(given, WEIGHTS, WEIGHTS, **arguments)


def of(kind: Any, events: Iterable[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def steps(events: Iterable[Event]) -> Counter[int]:
    return Counter(event.super_learner for event in of(Stepped, events))


def ends(given: Scenario, num_steps: int, hidden: bool, **more: Any) -> list:
    return list(itertools.islice(Lockstep(given, WEIGHTS, hidden, **more), num_steps))


@pytest.mark.parametrize("number", [4, -1, 0.5, "0"])
def test_a_slow_learner_that_is_not_there_is_refused(number: Any) -> None:
    scenario(2, super_learner_size=2, compute=Compute(1.0, slow={0: 2.0, 3: 2.0}))
    with pytest.raises(ValueError, match=f"from 0 to 3, got {number!r}"):
        scenario(2, super_learner_size=2, compute=Compute(1.0, slow={number: 2.0}))


# --- in lockstep


def test_a_round_after_the_step_waits_for_the_neighbours_alone() -> None:
    given = scenario(5, compute=Compute(1.0, slow={0: 3.0}))
    first, second = ends(given, 2, hidden=False)
    assert first == [3.0, 3.0, 1.0, 1.0, 3.0]
    # 2 and 3 now wait for 1 and 4, who had to wait for 0.
    assert second == [6.0, 6.0, 4.0, 4.0, 6.0]


def test_a_round_of_exact_means_waits_for_all_and_takes_an_allreduce() -> None:
    given = scenario(4, "complete", compute=Compute(1.0, slow={2: 2.0}))
    assert ends(given, 2, hidden=False) == [[2.0] * 4, [4.0] * 4]
    link = Link(bandwidth=50.0, latency=0.1)
    given = scenario(4, "complete", link=link)
    # 6 turns with a quarter of 100 bytes each.
    assert ends(given, 1, hidden=False)[0] == pytest.approx([1 + 6 * (0.1 + 0.5)] * 4)


def test_a_round_takes_the_bytes_of_all_neighbours_over_one_link() -> None:
    given = scenario(5, link=Link(bandwidth=100.0, latency=0.25))
    assert ends(given, 2, hidden=False) == [[1 + 2.25] * 5, [2 * 3.25] * 5]


def test_a_hidden_round_costs_only_what_is_longer_than_the_gradient() -> None:
    for seconds, bandwidth in ((1.0, 250.0), (2.0, 100.0)):
        given = scenario(5, link=Link(bandwidth))
        assert ends(given, 3, hidden=True) == [
            [1.0] * 5,  # no round is under way yet
            [1.0 + seconds] * 5,
            [1.0 + 2 * seconds] * 5,
        ]
        assert ends(given, 1, hidden=True, from_start=True) == [[seconds] * 5]


def test_rounds_come_every_third_step() -> None:
    given = scenario(3, "complete", gossip_every=3, compute=Compute(1, slow={0: 2.0}))
    found = ends(given, 4, hidden=False)
    assert found[:3] == [[2.0, 1.0, 1.0], [4.0, 2.0, 2.0], [6.0] * 3]
    hidden = ends(given, 4, hidden=True)
    assert hidden[2:] == [[6.0, 3.0, 3.0], [8.0, 6.0, 6.0]]


def test_a_super_learner_is_as_fast_as_its_slowest_learner_and_its_allreduce() -> None:
    given = scenario(
        2,
        super_learner_size=2,
        compute=Compute(1.0, slow={3: 5.0}),
        inner_link=Link(bandwidth=100.0),
        link=Link(bandwidth=10.0),
    )
    first = next(iter(Asynchronous(given, WEIGHTS, WEIGHTS)))
    assert first == Stepped(1.0 + 2 * 0.5, 0)
    # The slow one's gradient, its all-reduce, its half of the weights, an all-gather.
    assert ends(given, 1, hidden=False) == [[5.0 + 1.0 + 5.0 + 0.5] * 2]


def test_one_super_learner_alone_has_no_round() -> None:
    inner = Link(bandwidth=100.0)
    given = scenario(1, super_learner_size=2, inner_link=inner, link=Link(10.0))
    assert ends(given, 2, hidden=False) == [[1.0 + 1.0], [2.0 + 2.0]]


def test_a_backward_pass_hides_all_but_the_last_bucket_of_an_allreduce() -> None:
    given = scenario(
        1,
        super_learner_size=2,
        inner_link=Link(latency=0.25),
        backward=0.8,
        gradient_seconds=0.1,
    )
    buckets = itertools.islice(Lockstep(given, 5 * BUCKET_BYTES, False), 1)
    assert next(buckets) == pytest.approx([1.0 + 2 * 0.25 / 5 + 0.1])


def test_a_boundary_takes_its_time_after_a_hidden_round() -> None:
    given = scenario(5, link=Link(100.0))
    found = ends(given, 2, hidden=True, boundary_seconds=0.5)
    assert found == [[1.5] * 5, [1.5 + 2.0 + 0.5] * 5]


# --- asynchronously


def test_a_straggler_slows_nobody_else() -> None:
    given = scenario(4, compute=Compute(1.0, slow={1: 10.0}))
    events = until(asynchronous(given), 100.5)
    assert steps(events) == {0: 100, 1: 10, 2: 100, 3: 100}


@pytest.mark.parametrize(("topology", "size"), topologies_of(2, 3, 8, 9))
def test_at_equal_speeds_each_edge_of_a_round_is_exchanged_on_once(
    topology: str, size: int
) -> None:
    given = scenario(size, topology)
    events = until(asynchronous(given), 12.5)
    schedule = given.schedule()
    expected = Counter[frozenset[int]]()
    for round in range(1, 13):
        parts = [schedule.part(i, round) for i in range(size)]
        edges = {(j, i) for i, part in enumerate(parts) for j in part.takes if j != i}
        expected.update({frozenset(edge) for edge in edges})
    found = Counter(frozenset(e.exchange.ends) for e in of(Ended, events))
    assert found == expected


def weights(events: Iterable[Event]) -> list[tuple[int, int, float]]:
    return [
        (*event.exchange.ends, event.exchange.weight) for event in of(Begun, events)
    ]


def test_two_that_meet_alone_weigh_a_half_and_overlapping_ones_a_third() -> None:
    slow = Link(bandwidth=50.0)
    pair = until(asynchronous(scenario(2, link=slow)), 9.0)
    assert {weight for *_, weight in weights(pair)} == {1 / 2}
    three = scenario(3, link=slow, mixing_gain=0.6)
    # All wait for an exchange, and ask at once: 0 has one under way, 1 and 2 then two.
    found = weights(until(asynchronous(three, max_staleness=0), 1.5))
    assert found[:2] == [(0, 1, 0.6 / 2), (0, 2, pytest.approx(0.6 / 3))]


@pytest.mark.parametrize("topology", ["ring", "complete", "random_ring"])
@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_exchanges_of_a_learner_follow_one_another_and_no_peer_is_forgotten(
    topology: str, size: int
) -> None:
    """Whoever asks, however many ask the same one, and however steps are spread."""
    given = scenario(
        size,
        topology,
        link=Link(bandwidth=WEIGHTS / 2.5, latency=0.01),
        compute=Compute(1.0, spread=0.3),
    )
    found = weights(until(asynchronous(given), 300.0))
    assert {weight for *_, weight in found} == {1 / 2}
    edges = Counter(frozenset(ends) for *ends, _ in found)
    num_edges = size if topology == "ring" else size * (size - 1) // 2
    assert len(edges) == num_edges
    assert min(edges.values()) > max(edges.values()) / 4
    # Of the exchanges that links and even numbers of learners allow.
    assert len(found) > 0.7 * (size // 2) * 300 / 2.5


def test_who_asks_takes_one_peer_after_another_and_returns_to_none_at_once() -> None:
    given = scenario(4, link=Link(bandwidth=WEIGHTS / 2.5))
    busy, met, asked = Counter[int](), list[int](), 0
    for event in until(asynchronous(given), 100.0):
        if isinstance(event, Begun | Ended):
            asker, peer = event.exchange.ends
            if isinstance(event, Begun):
                assert event.seconds < 10.0 or not busy[asker]
                asked += 1
                met += [peer] if asker == 0 else [asker] if peer == 0 else []
            busy.update(
                {end: 1 if isinstance(event, Begun) else -1 for end in (asker, peer)}
            )
    assert asked > 50
    turns = [one != other for one, other in itertools.pairwise(met)]
    assert sum(turns) > 0.8 * len(turns)


def test_an_exchange_takes_its_bytes_and_four_latencies() -> None:
    """A request, its admission, a question and its answer."""
    given = scenario(2, link=Link(bandwidth=1000.0, latency=0.05))
    events = until(asynchronous(given), 1.9)
    (begun,), (ended,) = of(Begun, events), of(Ended, events)
    assert (begun.seconds, ended.seconds) == pytest.approx((1.1, 1.3))
    assert begun.exchange is ended.exchange


def test_exchanges_follow_one_another_no_faster_than_the_link() -> None:
    given = scenario(2, link=Link(bandwidth=WEIGHTS / 2.5))
    events = until(asynchronous(given), 101.0)
    times = [event.seconds for event in of(Ended, events)]
    # 2.5 seconds each; the next begins with a step at the latest.
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert all(2.5 <= gap <= 3.5 for gap in gaps)
    assert steps(events) == {0: 100, 1: 100}


def test_who_is_too_stale_waits_for_an_exchange() -> None:
    given = scenario(2, link=Link(bandwidth=WEIGHTS / 10))
    free = steps(until(asynchronous(given), 100.5))
    bound = steps(until(asynchronous(given, max_staleness=2), 100.5))
    assert free == {0: 100, 1: 100}
    # Ten seconds to an exchange and at most three steps between two of them.
    assert all(25 <= bound[i] <= 40 for i in (0, 1))


def test_the_same_seed_gives_the_same_events_and_another_seed_others() -> None:
    def times(seed: int) -> list[tuple[str, float]]:
        given = scenario(
            7,
            "random_ring",
            compute=Compute(1.0, spread=0.4),
            link=Link(300.0, 0.1),
            seed=seed,
        )
        events = until(asynchronous(given), 20.0)
        return [(type(event).__name__, event.seconds) for event in events]

    assert times(3) == times(3)
    assert times(3) != times(4)
