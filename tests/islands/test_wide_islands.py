"""Islands of several learners, each of which carries its shard."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.gossip import quarantine
from lightning_adpsgd.gossip.protocol import Position
from lightning_adpsgd.gossip.quarantine import WeightsDiverged
from tests.helpers import (
    ThreadSuperLearner,
    engine_threads,
    random_rows,
    together,
    until,
)
from tests.islands.archipelago import Server, Trained, are_idle, rendezvous

Wide = list[Trained]
"""The learners of one island."""


def wide(server: Server, weights: Tensor, size: int = 2, **options: Any) -> Wide:
    store = HashStore()
    return [
        Trained(server, weights, group=group, store=store, **options)
        for group in ThreadSuperLearner.connect(size)
    ]


def step(island: Wide, update: float = 0.0) -> None:
    """All learners of an island make their steps together, as under DDP."""
    together([lambda one=one: one.step(update) for one in island])


def start(island: Wide) -> None:
    together([one.island.start for one in island])


def end(*islands: Wide) -> None:
    for island in islands:
        together([one.island.abort for one in island])


@contextmanager
def in_a_ring(islands: list[Wide]) -> Iterator[list[Wide]]:
    """Islands that have joined one after another, until the end of a test."""
    try:
        for island in islands:
            start(island)
        learners = [one for island in islands for one in island]
        until(lambda: all(o.members == len(islands) for o in learners), "the ring")
        yield islands
    finally:
        end(*islands)


def test_learners_of_an_island_begin_alike_and_stay_alike() -> None:
    rows = random_rows(2, length=8)
    with (
        rendezvous() as server,
        in_a_ring([wide(server, row) for row in rows]) as islands,
    ):
        for one in islands[1]:
            assert one.island.started_from == Position()
            assert torch.equal(one.vector, rows[0])
        for island, row in zip(islands, rows, strict=True):
            for one in island:
                one.vector.copy_(row)
        mean = rows.mean(0)

        def at_the_mean() -> bool:
            for island in islands:
                step(island)
            learners = [one for island in islands for one in island]
            return all((o.vector - mean).abs().max() < 0.01 for o in learners)

        until(at_the_mean, "the mean")
        for first, second in islands:
            assert torch.equal(first.vector, second.vector)
    assert engine_threads() == []


def test_the_mean_is_that_of_whole_islands() -> None:
    rows = random_rows(2, length=8)
    with (
        rendezvous() as server,
        in_a_ring([wide(server, row) for row in rows]) as islands,
    ):
        for island, row in zip(islands, rows, strict=True):
            for one in island:
                one.vector.copy_(row)
        first = islands[0]
        found = together([lambda one=one: one.average() for one in first])
        distance = (rows - rows.mean(0)).square().sum(1).mean().sqrt()
        for one, consensus in zip(first, found, strict=True):
            torch.testing.assert_close(one.vector, rows.mean(0))
            assert consensus.members == 2
            torch.testing.assert_close(consensus.distance, float(distance))


def test_an_island_of_several_learners_that_was_stopped_goes_on_if_it_is_alone() -> (
    None
):
    """The others have ended meanwhile, so none of them has gone on without it."""
    rows = random_rows(2, length=8)
    with (
        rendezvous() as server,
        in_a_ring([wide(server, row) for row in rows]) as (one, other),
    ):
        with one[0].stopped():
            until(lambda: set(other[0].listed) == {1}, "the eviction")
            together([each.island.stop for each in other])

        def is_back() -> bool:
            step(one)
            return all(each.members == len(each.listed) == 1 for each in one)

        until(is_back, "its way back")


def test_the_death_of_an_island_is_survived_by_all_learners_of_another() -> None:
    rows = random_rows(3, length=8)
    with (
        rendezvous() as server,
        in_a_ring([wide(server, row) for row in rows]) as islands,
    ):
        rest = [one for island in (islands[0], islands[2]) for one in island]
        for one in islands[1]:
            one.die()
        until(lambda: all(one.members == 2 for one in rest), "the closed ring")
        least = [one.exchanges + 3 for one in rest]

        def all_exchange() -> bool:
            step(islands[0])
            step(islands[2])
            return all(o.exchanges >= n for o, n in zip(rest, least, strict=True))

        until(all_exchange, "exchanges without the dead")


def test_an_island_that_the_others_went_on_without_ends_at_once() -> None:
    rows = random_rows(2, length=8)
    with (
        rendezvous() as server,
        in_a_ring([wide(server, row) for row in rows]) as islands,
    ):
        first = islands[1][0]
        first.membership._stand_aside("as after a stop")
        threads = first.island.engine.threads
        until(lambda: threads.has_failed, "its end")
        with pytest.raises(RuntimeError, match=r"^the others went on without this is"):
            threads.raise_if_failed()


def train_together(islands: list[Wide], condition: Callable[[], bool]) -> None:
    def train_and_look() -> bool:
        for island in islands:
            step(island)
        return condition()

    until(train_and_look, "what training brings about")


def test_one_learner_is_told_to_leave_and_all_do_at_one_step() -> None:
    """They have merged what the others gave, and nothing else has changed the sum."""
    rows = random_rows(2, length=8)
    with (
        rendezvous() as server,
        in_a_ring([wide(server, row) for row in rows]) as islands,
    ):
        leaving, staying = islands
        learners = [*leaving, *staying]
        for island, row in zip(islands, rows, strict=True):
            for one in island:
                one.vector.copy_(row)
        train_together(islands, lambda: all(o.exchanges > 3 for o in learners))
        leaving[1].island.engine.members.wants_to_leave = True
        assert not any(one.island.engine.leaves for one in leaving)
        train_together([leaving], lambda: any(o.island.engine.leaves for o in leaving))
        assert all(one.island.engine.leaves for one in leaving)
        until(lambda: are_idle(learners), "the last exchanges")
        left = torch.cat([*shard_of(staying[0]), *shard_of(staying[1])])
        together([one.island.depart for one in leaving])
        for one in leaving:
            torch.testing.assert_close(one.vector, rows.sum(0) - left)
        until(lambda: all(o.members == 1 for o in staying), "its absence")
        assert [one.island.statistics().lost for one in staying] == [0, 0]


def shard_of(one: Trained) -> list[Tensor]:
    return one.island.engine.replica.snapshot()


@pytest.mark.parametrize("sick_element", [0, 7])
def test_all_learners_of_a_sick_island_go_on_from_one_peer(sick_element: int) -> None:
    """Whichever of them notices it in its shard."""
    rows = random_rows(3, length=8)
    with (
        rendezvous() as server,
        in_a_ring([wide(server, row) for row in rows]) as islands,
    ):
        learners = [one for island in islands for one in island]
        for island, row in zip(islands, rows, strict=True):
            for one in island:
                one.vector.copy_(row)
        sick = islands[1]
        for one in sick:
            one.vector[sick_element] = float("nan")
        train_together(islands, lambda: reloads(sick) == [1, 1])
        train_together(islands, lambda: all_are_finite(learners))
        for first, second in islands:
            assert torch.equal(first.vector, second.vector)
        assert [reloads(island) for island in islands] == [[0, 0], [1, 1], [0, 0]]
        assert [one.island.engine.num_reloads for one in sick] == [1, 1]
        assert all(one.vector.abs().max() < 100 for one in learners)


def reloads(island: Wide) -> list[int]:
    return [one.island.statistics().reloads for one in island]


def all_are_finite(learners: Wide) -> bool:
    return all(bool(one.vector.isfinite().all()) for one in learners)


def test_a_wide_island_ends_as_a_whole_when_it_is_sick_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantine, "MOST_RELOADS", 0)
    rows = random_rows(2, length=8)
    with (
        rendezvous() as server,
        in_a_ring([wide(server, row) for row in rows]) as islands,
    ):
        errors: list[WeightsDiverged] = []

        def train_to_its_end(one: Trained) -> None:
            one.vector[0] = float("nan")
            with pytest.raises(WeightsDiverged, match="after 0 attempts") as error:
                until(lambda: bool(one.step()), "the end of the learner")
            errors.append(error.value)

        ended = threading.Event()

        def train_on() -> None:
            while not ended.is_set():
                step(islands[0])

        others = threading.Thread(target=train_on)
        others.start()
        together([lambda one=one: train_to_its_end(one) for one in islands[1]])
        ended.set()
        others.join(20)
        assert len(errors) == 2
        assert all_are_finite(islands[0])
