"""Islands whose learners hold one model together, each its own shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.gossip.protocol import Pulled
from lightning_adpsgd.islands.island import Sections
from lightning_adpsgd.islands.member_list import Heartbeat
from lightning_adpsgd.transport.links.handshake import Refused
from lightning_adpsgd.weights.sections import (
    Range,
    Section,
    row_ranges,
    sections_of,
)
from tests.helpers import (
    PATIENCE_S,
    ThreadSuperLearner,
    engine_threads,
    memory_of_tensors,
    random_rows,
    together,
    until,
)
from tests.islands.archipelago import (
    HEARTBEAT,
    PATIENCE,
    Server,
    Trained,
    are_idle,
    rendezvous,
)
from tests.islands.test_wide_islands import (
    Wide,
    end,
    in_a_ring,
    shard_of,
    start,
    step,
    train_together,
    wide,
)

SIZES = (5, 3)
"""Elements of the shards of two learners: FSDP2 gives the first one more rows."""


def sharded(server: Server, row: Tensor, holds_all: bool = False) -> Wide:
    """An island of two learners, each of which holds its part of a row alone."""
    store, parts = HashStore(), row.split(SIZES)
    groups = ThreadSuperLearner.connect(2, holds_all)
    return [
        Trained(server, part, group=group, store=store)
        for part, group in zip(parts, groups, strict=True)
    ]


def row_of(island: Wide) -> Tensor:
    """The weights of an island, with what is not merged yet."""
    return torch.cat([chunk for one in island for chunk in shard_of(one)])


def put(island: Wide, row: Tensor) -> None:
    for one, part in zip(island, row.split(SIZES), strict=True):
        one.vector.copy_(part)


@contextmanager
def begun(server: Server, rows: Tensor) -> Iterator[list[Wide]]:
    """Islands that have joined one after another, and then have these weights."""
    with in_a_ring([sharded(server, row) for row in rows]) as islands:
        for island, row in zip(islands, rows, strict=True):
            put(island, row)
        yield islands


def test_a_newcomer_takes_each_shard_from_who_holds_it() -> None:
    rows = random_rows(2, length=8)
    with (
        rendezvous() as server,
        in_a_ring([sharded(server, row) for row in rows]) as islands,
    ):
        assert torch.equal(row_of(islands[1]), rows[0])
    assert engine_threads() == []


def test_steps_alone_change_the_sum_of_each_shard() -> None:
    rows = random_rows(3, length=8)
    with rendezvous() as server, begun(server, rows) as islands:
        learners = [one for island in islands for one in island]
        for number in range(30):
            for s, island in enumerate(islands):
                step(island, 0.1 * s if number < 10 else 0.0)
        train_together(islands, lambda: all(o.exchanges > 3 for o in learners))
        until(lambda: are_idle(learners), "the last exchanges")
        after = torch.stack([row_of(island) for island in islands])
        torch.testing.assert_close(after.sum(0), rows.sum(0) + 10 * 0.3)
        assert (after - rows).abs().max() > 0.1


def test_the_mean_is_taken_shard_by_shard() -> None:
    rows = random_rows(2, length=8)
    with rendezvous() as server, begun(server, rows) as islands:
        first = islands[0]
        found = together([lambda one=one: one.average() for one in first])
        distance = (rows - rows.mean(0)).square().sum(1).mean().sqrt()
        mean = torch.cat([one.vector for one in first])
        torch.testing.assert_close(mean, rows.mean(0))
        for consensus in found:
            assert consensus.members == 2
            torch.testing.assert_close(consensus.distance, float(distance))


def test_an_island_dies_and_comes_back_with_the_weights_of_the_others() -> None:
    rows = random_rows(2, length=8)
    with rendezvous() as server, begun(server, rows) as islands:
        staying, dying = islands
        for one in dying:
            one.die()
        until(lambda: all(one.members == 1 for one in staying), "the closed ring")
        step(staying, 1.0)
        put(staying, rows[0])
        islands[1] = back = sharded(server, rows[1])
        start(back)
        assert torch.equal(row_of(back), rows[0])
        assert [one.island.position.steps for one in back] == [1, 1]


@pytest.mark.parametrize("late", [0, 1])
def test_whole_and_sharded_learners_do_not_exchange(late: int) -> None:
    """Learners of equal numbers would hold other elements.

    All learners end with the refusal, also one for which it has not lasted yet.
    """
    rows = random_rows(2, length=8)
    with rendezvous() as server:
        islands = [sharded(server, row, s == 0) for s, row in enumerate(rows)]
        start(islands[0])
        slow = Heartbeat(HEARTBEAT.interval_s, PATIENCE_S, HEARTBEAT.empty_s)
        islands[1][late].island._joining._timeouts = replace(PATIENCE, heartbeat=slow)

        def join(one: Trained) -> None:
            with pytest.raises(Refused, match="`inside` is 'model_parallel' here"):
                one.island.start()

        try:
            together([lambda one=one: join(one) for one in islands[1]])
        finally:
            end(*islands)


def test_a_mean_takes_one_shard_beside_the_weights_of_the_one_that_answers() -> None:
    """The weights of an island are let go of before the next one is asked."""
    elements, asked = 1 << 20, list[int]()
    row = torch.zeros(elements)
    with rendezvous() as server:
        islands = [Trained(server, row) for _ in range(4)]
        try:
            for one in islands:
                one.island.start()
            until(lambda: all(one.members == 4 for one in islands), "the ring")
            first = islands[0].island
            pull, before = first._connections.pull, memory_of_tensors()

            def watched(
                number: int, seconds: float, watch: Any = None
            ) -> Pulled | None:
                limit = before + 1.1 * 4 * elements  # of the mean so far
                until(lambda: memory_of_tensors() < limit, "the end of the last pull")
                asked.append(number)
                return pull(number, seconds)

            first._connections.pull = watched
            assert first.mean().members == 4
            assert len(asked) == 3
        finally:
            end(islands)


SHAPE = 8, 2
"""A matrix, of which a learner of 2 holds 4 rows and one of 4 holds 2."""


def unequal(server: Server, row: Tensor, size: int, holds_all: bool) -> Wide:
    """An island of so many learners, where islands have 2 or 4."""
    owned = [row_ranges([SHAPE], n) for n in (2, 4)]
    cut, number, store = sections_of(owned), (2, 4).index(size), HashStore()
    of_learners = [[one for one in cut if one.owners[number] == n] for n in range(size)]
    island = list[Trained]()
    for n, group in enumerate(ThreadSuperLearner.connect(size, holds_all)):
        own = tuple(i for i, one in enumerate(cut) if one.owners[number] == n)
        group._sections, weights = of_learners, row
        if not holds_all:
            mine = owned[number][n]
            group._sections = [[one.seen_by(mine) for one in of_learners[n]]] * size
            weights = row[mine[0].begin : mine[0].end]
        sections = Sections(own, len(cut), (2, 4))
        division: Any = {"group": group, "sections": sections}
        whole = {"store": store, "num_elements": len(row)}
        island.append(Trained(server, weights, **division, **whole))
    return island


@pytest.mark.parametrize("holds_all", [True, False])
def test_islands_of_two_and_of_four_learners_exchange(holds_all: bool) -> None:
    """One comes to the mean of both, and so does one that joins, dies and returns."""
    rows = random_rows(2, length=16)

    def row(island: Wide) -> Tensor:
        parts = [one.vector for one in island]
        return parts[0] if holds_all else torch.cat(parts)

    with (
        rendezvous() as server,
        in_a_ring(
            [unequal(server, rows[s], size, holds_all) for s, size in enumerate((2, 4))]
        ) as islands,
    ):
        assert torch.equal(row(islands[1]), rows[0])
        length = len(rows[0])
        for island, weights in zip(islands, rows, strict=True):
            parts = [length // (1 if holds_all else len(island))] * len(island)
            held = [weights] * len(island) if holds_all else weights.split(parts)
            for one, part in zip(island, held, strict=True):
                one.vector.copy_(part)
        mean = rows.mean(0)
        train_together(
            islands,
            lambda: all((row(i) - mean).abs().max() < 0.01 for i in islands),
        )
        if holds_all:
            for island in islands:
                assert all(torch.equal(o.vector, row(island)) for o in island)
        found = together([lambda o=o: o.average() for o in islands[0]])
        assert [consensus.members for consensus in found] == [2, 2]
        torch.testing.assert_close(row(islands[0]), mean, atol=0.01, rtol=0)

        for one in islands[1]:
            one.die()
        until(lambda: all(one.members == 1 for one in islands[0]), "its absence")
        islands[1] = unequal(server, rows[1], 4, holds_all)
        start(islands[1])
        torch.testing.assert_close(row(islands[1]), row(islands[0]))
    assert engine_threads() == []


def test_islands_that_were_told_of_other_sizes_are_refused() -> None:
    row = random_rows(1, length=16)[0]
    with rendezvous() as server:
        islands = [unequal(server, row, 2, True), wide(server, row)]
        start(islands[0])

        def join(one: Trained) -> None:
            with pytest.raises(Refused, match=r"`sizes of islands` is 'absent' here"):
                one.island.start()

        try:
            together([lambda one=one: join(one) for one in islands[1]])
        finally:
            end(*islands)


def sharing_layers(server: Server, row: Tensor) -> Wide:
    """An island of two learners that both have the last five weights of eight."""
    parts = Range(0, 3, 5), Range(0, 5, 8)
    owned = [[Section((), (part,))] for part in parts]
    exchanged = [[Section((), (Range(0, 0, 3), part))] for part in parts]
    groups = ThreadSuperLearner.connect(2, False, exchanged)
    for group, holders in zip(
        groups, ThreadSuperLearner.connect(2, sections=owned), strict=True
    ):
        group._replicated = holders
    store = HashStore()
    return [Trained(server, row, group=group, store=store) for group in groups]


def test_what_both_learners_have_is_equal_in_a_newcomer_and_in_the_mean() -> None:
    rows = random_rows(2, length=8)
    with (
        rendezvous() as server,
        in_a_ring([sharing_layers(server, row) for row in rows]) as islands,
    ):
        for one in islands[1]:
            assert torch.equal(one.vector, rows[0])
        for one in islands[1]:
            one.vector.copy_(rows[1])
        found = together([lambda o=o: o.average() for o in islands[0]])
        distance = 0.5 * (rows[0] - rows[1])
        # The first three are those of two shards, which are alike here.
        square = distance.square().sum() + distance[:3].square().sum()
        for one, consensus in zip(islands[0], found, strict=True):
            torch.testing.assert_close(one.vector, rows.mean(0))
            torch.testing.assert_close(consensus.distance, float(square.sqrt()))
