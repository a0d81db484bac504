"""The counters of a learner's communication, before there is any."""

from dataclasses import asdict, astuple, fields
from typing import Any

from lightning_adpsgd.mixing.statistics import Statistics, Tally


def test_counters_begin_at_nothing() -> None:
    assert not any(astuple(Statistics()))
    assert not any(astuple(Tally()))


def test_the_counters_of_several_are_their_sums() -> None:
    """`peer_ages` are of one learner."""
    names = [f.name for f in fields(Tally) if f.name not in ("staleness", "peer_ages")]
    first: dict[str, Any] = {name: place for place, name in enumerate(names, 1)}
    second: dict[str, Any] = {name: 100 * place for name, place in first.items()}
    tallies = [
        Tally(**first, staleness={0: 1, 2: 3}),
        Tally(**second, staleness={1: 5, 2: 4}),
        Tally(),
    ]
    total = Tally.total(tallies)
    assert isinstance(total, Tally)
    assert {name: getattr(total, name) for name in names} == {
        name: 101 * place for name, place in first.items()
    }
    assert [*total.staleness.items()] == [(0, 1), (1, 5), (2, 7)]
    assert not any(astuple(Tally.total([])))


def test_a_snapshot_stays_as_it_is_while_the_counters_run() -> None:
    tally = Tally(exchanges=3, staleness={1: 2})
    snapshot = tally.snapshot(members=4)
    assert type(snapshot) is Statistics
    assert asdict(snapshot) == asdict(Statistics(3, staleness={1: 2}, members=4))
    tally.exchanges += 1
    tally.merged_all(steps := [1, 5, 6], 7)
    tally.merged_all([], 8)
    assert steps == []
    assert (snapshot.exchanges, snapshot.staleness) == (3, {1: 2})
    assert (tally.merges, tally.staleness) == (1, {1: 3, 2: 1, 6: 1})
