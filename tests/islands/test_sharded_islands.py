"""Islands whose learners hold one model together, each its own shards."""

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.gossip.protocol import Pulled
from lightning_adpsgd.transport.links import Refused
from tests.helpers import (
    ThreadSuperLearner,
    engine_threads,
    memory_of_tensors,
    random_rows,
    together,
    until,
)
from tests.islands.archipelago import Server, Trained, rendezvous
from tests.islands.test_wide_islands import Wide, end, start, step, train_together

SIZES = (5, 3)
"""Elements of the shards of two learners: FSDP2 gives the first one more rows."""


def sharded(server: Server, row: Tensor, holds_all: bool = False) -> Wide:
    """An island of two learners, each of which holds its part of a row alone."""
    store, parts = HashStore(), row.split(SIZES)
    nodes = ThreadSuperLearner.connect(2, holds_all)
    return [
        Trained(server, part, node=node, store=store)
        for part, node in zip(parts, nodes, strict=True)
    ]


def row_of(island: Wide) -> Tensor:
    """The weights of an island, with what is not merged yet."""
    return torch.cat([c for one in island for c in one.island.engine.snapshot()])


def put(island: Wide, row: Tensor) -> None:
    for one, part in zip(island, row.split(SIZES), strict=True):
        one.vector.copy_(part)


def begun(server: Server, rows: Tensor) -> list[Wide]:
    """Islands that have joined one after another, and then have these weights."""
    islands = [sharded(server, row) for row in rows]
    for island in islands:
        start(island)
    learners = [one for island in islands for one in island]
    until(lambda: all(one.members == len(rows) for one in learners), "the ring")
    for island, row in zip(islands, rows, strict=True):
        put(island, row)
    return islands


def test_a_newcomer_takes_each_shard_from_who_holds_it() -> None:
    rows = random_rows(2, length=8)
    with rendezvous() as server:
        islands = [sharded(server, row) for row in rows]
        try:
            for island in islands:
                start(island)
            assert torch.equal(row_of(islands[1]), rows[0])
        finally:
            end(*islands)
    assert engine_threads() == []


def test_steps_alone_change_the_sum_of_each_shard() -> None:
    rows = random_rows(3, length=8)
    with rendezvous() as server:
        islands = begun(server, rows)
        try:
            learners = [one for island in islands for one in island]
            for number in range(30):
                for s, island in enumerate(islands):
                    step(island, 0.1 * s if number < 10 else 0.0)
            train_together(islands, lambda: all(o.exchanges > 3 for o in learners))
            until(lambda: all(one.is_idle for one in learners), "the last exchanges")
            after = torch.stack([row_of(island) for island in islands])
            torch.testing.assert_close(after.sum(0), rows.sum(0) + 10 * 0.3)
            assert (after - rows).abs().max() > 0.1
        finally:
            end(*islands)


def test_the_mean_is_taken_shard_by_shard() -> None:
    rows = random_rows(2, length=8)
    with rendezvous() as server:
        islands = begun(server, rows)
        try:
            first = islands[0]
            found = together(
                [lambda one=one: one.island.average([one.vector], []) for one in first]
            )
            distance = (rows - rows.mean(0)).square().sum(1).mean().sqrt()
            mean = torch.cat([one.vector for one in first])
            torch.testing.assert_close(mean, rows.mean(0))
            for consensus in found:
                assert consensus.members == 2
                torch.testing.assert_close(consensus.distance, float(distance))
        finally:
            end(*islands)


def test_an_island_dies_and_comes_back_with_the_weights_of_the_others() -> None:
    rows = random_rows(2, length=8)
    with rendezvous() as server:
        islands = begun(server, rows)
        try:
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
        finally:
            end(*islands)


def test_whole_and_sharded_learners_do_not_exchange() -> None:
    """Learners of equal numbers would hold other elements."""
    rows = random_rows(2, length=8)
    with rendezvous() as server:
        islands = [sharded(server, row, s == 0) for s, row in enumerate(rows)]
        start(islands[0])

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
            pull, before = first._pull, memory_of_tensors()

            def watched(number: int, seconds: float) -> Pulled | None:
                limit = before + 1.1 * 4 * elements  # of the mean so far
                until(lambda: memory_of_tensors() < limit, "the end of the last pull")
                asked.append(number)
                return pull(number, seconds)

            first._pull = watched
            assert first.mean().members == 4
            assert len(asked) == 3
        finally:
            end(islands)
