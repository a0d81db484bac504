"""Islands of several learners, each of which carries its shard."""

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.exchange import Position
from tests.helpers import ThreadNode, engine_threads, random_rows, together, until
from tests.islands.archipelago import Server, Trained, rendezvous

Wide = list[Trained]
"""The learners of one island."""


def wide(server: Server, weights: Tensor, size: int = 2) -> Wide:
    store = HashStore()
    return [
        Trained(server, weights, node=node, store=store)
        for node in ThreadNode.connect(size)
    ]


def step(island: Wide, update: float = 0.0) -> None:
    """All learners of an island make their steps together, as under DDP."""
    together([lambda one=one: one.step(update) for one in island])


def start(island: Wide) -> None:
    together([one.island.start for one in island])


def end(*islands: Wide) -> None:
    for island in islands:
        together([one.island.abort for one in island])


def test_learners_of_an_island_begin_alike_and_stay_alike() -> None:
    rows = random_rows(2, length=8)
    with rendezvous() as server:
        islands = [wide(server, row) for row in rows]
        try:
            for island in islands:
                start(island)
            until(lambda: all(o.members == 2 for i in islands for o in i), "the ring")
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
        finally:
            end(*islands)
    assert engine_threads() == []


def test_the_mean_is_that_of_whole_islands() -> None:
    rows = random_rows(2, length=8)
    with rendezvous() as server:
        islands = [wide(server, row) for row in rows]
        try:
            for island in islands:
                start(island)
            for island, row in zip(islands, rows, strict=True):
                for one in island:
                    one.vector.copy_(row)
            first = islands[0]
            until(lambda: all(one.members == 2 for one in first), "the ring")
            found = together(
                [lambda one=one: one.island.average([one.vector], []) for one in first]
            )
            distance = (rows - rows.mean(0)).square().sum(1).mean().sqrt()
            for one, consensus in zip(first, found, strict=True):
                torch.testing.assert_close(one.vector, rows.mean(0))
                assert consensus.members == 2
                torch.testing.assert_close(consensus.distance, float(distance))
        finally:
            end(*islands)


def test_the_death_of_an_island_is_survived_by_all_learners_of_another() -> None:
    rows = random_rows(3, length=8)
    with rendezvous() as server:
        islands = [wide(server, row) for row in rows]
        try:
            for island in islands:
                start(island)
            rest = [one for island in (islands[0], islands[2]) for one in island]
            until(lambda: all(one.members == 3 for one in rest), "the ring")
            for one in islands[1]:
                one.die()
            until(lambda: all(one.members == 2 for one in rest), "the closed ring")
            least = [one.exchanges + 3 for one in rest]

            def all_exchange() -> bool:
                step(islands[0])
                step(islands[2])
                return all(o.exchanges >= n for o, n in zip(rest, least, strict=True))

            until(all_exchange, "exchanges without the dead")
        finally:
            end(*islands)
