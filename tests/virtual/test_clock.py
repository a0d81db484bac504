"""Simulated time: steps, links that are shared, and what comes first."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from lightning_adpsgd.virtual.clock import Agenda, Compute, Link, Network, StepTimes


def run(agenda: Agenda) -> None:
    while agenda._entries:
        agenda.happen()


# --- steps


def test_a_constant_step_takes_its_seconds_and_a_slow_learner_a_factor_more() -> None:
    times = StepTimes(Compute(0.25, slow={3: 8.0}), seed=0)
    assert times.end(0, 10.0) == 10.25
    assert times.end(3, 10.0) == 12.0


def test_lognormal_steps_have_the_mean_and_spread_that_were_asked_for() -> None:
    times = StepTimes(Compute(2.0, spread=0.5), seed=1)
    drawn = [times.end(0, 0.0) for _ in range(20_000)]
    logarithms = [math.log(seconds) for seconds in drawn]
    mean = sum(logarithms) / len(drawn)
    variance = sum((x - mean) ** 2 for x in logarithms) / len(drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(2.0, rel=0.02)
    assert math.sqrt(variance) == pytest.approx(0.5, rel=0.02)


def test_a_learners_times_depend_on_the_seed_and_on_nobody_else() -> None:
    compute = Compute(1.0, spread=0.3)
    alone, among = StepTimes(compute, seed=7), StepTimes(compute, seed=7)
    for _ in range(5):
        among.end(1, 0.0)
        assert among.end(0, 0.0) == alone.end(0, 0.0)
    assert StepTimes(compute, seed=8).end(0, 0.0) != StepTimes(compute, 7).end(0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": 0.0}, "`seconds` must be positive and finite, got 0.0"),
        ({"spread": -1.0}, "`spread` must be at least 0 and finite, got -1.0"),
        ({"spread": math.inf}, "`spread` must be at least 0 and finite, got inf"),
        ({"slow": {2: 0.0}}, r"`slow\[2\]` must be positive and finite, got 0.0"),
    ],
)
def test_impossible_times_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Compute(**arguments)


# --- what comes first


def test_what_happens_at_once_is_in_the_order_of_rank_and_then_of_entry() -> None:
    agenda, seen = Agenda(), list[str]()
    for seconds, rank, name in (
        (2.0, 0, "e"),
        (1.0, 1, "c"),
        (1.0, 0, "a"),
        (1.0, 1, "d"),
        (1.0, 0, "b"),
    ):
        agenda.enter(seconds, rank, seen.append, name)
    run(agenda)
    assert "".join(seen) == "abcde"
    assert agenda.now == 2.0


# --- links


def arrivals(
    bandwidth: float, crossings: list[tuple[float, tuple[int, int], float]]
) -> list[float]:
    """When crossings of (begin, ends, bytes) are done."""
    agenda = Agenda()
    network, found = Network(bandwidth, agenda), [math.nan] * len(crossings)

    def begin(number: int, ends: tuple[int, int], num_bytes: float) -> None:
        network.begin(ends, num_bytes, note(number))

    def note(number: int) -> Callable[[], None]:
        return lambda: found.__setitem__(number, agenda.now)

    for number, (seconds, ends, num_bytes) in enumerate(crossings):
        agenda.enter(seconds, 1, begin, number, ends, num_bytes)
    run(agenda)
    return found


def test_alone_a_crossing_has_the_whole_link() -> None:
    assert arrivals(100.0, [(1.0, (0, 1), 50.0), (1.0, (2, 3), 200.0)]) == [1.5, 3.0]


def test_two_at_one_end_share_its_link_and_the_rest_has_it_alone() -> None:
    # Half the rate until 1.0; then 50 of 100 bytes are left for the whole link.
    assert arrivals(100.0, [(0.0, (0, 1), 50.0), (0.0, (0, 2), 100.0)]) == [1.0, 1.5]


def test_a_crossing_that_joins_slows_the_one_under_way() -> None:
    # 50 bytes until 0.5 and 50 more at half the rate; then 50 alone.
    assert arrivals(100.0, [(0.0, (0, 1), 100.0), (0.5, (1, 2), 100.0)]) == [1.5, 2.0]


def test_over_an_infinite_link_everything_arrives_at_once() -> None:
    assert arrivals(math.inf, [(3.0, (0, 1), 1e12), (3.0, (1, 2), 1.0)]) == [3.0, 3.0]


def test_a_ring_allreduce_passes_each_part_on_twice_but_for_its_own() -> None:
    link = Link(bandwidth=1000.0, latency=0.5)
    assert link.allreduce_seconds(4000.0, 1) == 0.0
    assert link.allreduce_seconds(4000.0, 4) == 6 * (0.5 + 1.0)
    assert link.allgather_seconds(4000.0, 4) == 3 * (0.5 + 1.0)
    assert Link().allreduce_seconds(1e9, 64) == 0.0


def test_impossible_links_are_refused() -> None:
    with pytest.raises(ValueError, match="`bandwidth` must be positive, got 0"):
        Link(bandwidth=0)
    for latency in (-1, math.inf):
        with pytest.raises(ValueError, match=f"at least 0 and finite, got {latency}"):
            Link(latency=latency)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Compute, "seconds"), (Compute, "spread"), (Link, "bandwidth"), (Link, "latency")],
)
def test_a_time_or_rate_that_is_no_number_is_refused(kind: Any, name: str) -> None:
    message = f"`{name}` must be a number, got '1' of type str; for example `{name}="
    with pytest.raises(TypeError, match=message):
        kind(**{name: "1"})
