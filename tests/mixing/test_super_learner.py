"""Learners of one super-learner: in threads, and over Gloo."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.mixing.super_learner import (
    ShardGather,
    SuperLearnerGroup,
    Votes,
    gather_shards,
)
from lightning_adpsgd.weights.replica import Replica
from lightning_adpsgd.weights.streams import Guard
from lightning_adpsgd.weights.worker import InlineWorker
from tests.helpers import PATIENCE, ThreadSuperLearner, forked, together


def test_a_super_learner_of_one_has_its_own_part_and_flags() -> None:
    into = torch.zeros(3)
    SuperLearnerGroup().gather(torch.arange(3.0), [into], PATIENCE)
    assert SuperLearnerGroup().agree([0, 1], PATIENCE) == [0, 1]
    SuperLearnerGroup().share(into, 0, PATIENCE)
    assert into.tolist() == [0, 1, 2]


def cross(group: SuperLearnerGroup) -> Any:
    """What a learner has after the collectives of a group."""
    into = [torch.zeros(2, dtype=torch.float64) for _ in range(group.size)]
    group.gather(torch.full((2,), group.index, dtype=torch.float64), into, PATIENCE)
    flags = [int(n == group.index) for n in range(group.size + 1)]
    largest = group.agree(flags, PATIENCE)
    last = torch.full((3,), group.index, dtype=torch.float64)
    group.share(last, group.size - 1, PATIENCE)
    return [part.tolist() for part in into], largest, last.tolist()


def over_gloo(folder: Path) -> list[Any]:
    def learner(rank: int) -> Any:
        dist.init_process_group(
            "gloo", f"file://{folder}/store", world_size=2, rank=rank
        )
        group = dist.new_group([0, 1], backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return cross(SuperLearnerGroup(group))

    return [outcome.value for outcome in forked(2, learner)]


@pytest.mark.parametrize("where", ["threads", "gloo"])
def test_a_group_gathers_in_order_agrees_on_the_largest_and_shares_what_one_has(
    where: str, tmp_path: Path
) -> None:
    if where == "gloo":
        results = over_gloo(tmp_path)
    else:
        results = together(
            [lambda n=n: cross(n) for n in ThreadSuperLearner.connect(2)]
        )
    assert results == [([[0, 0], [1, 1]], [1, 1, 0], [1, 1, 1])] * 2


def test_all_learners_get_the_shard_of_each() -> None:
    def learner(group: ThreadSuperLearner) -> list[float]:
        vector = torch.zeros(6)
        vector.tensor_split(2)[group.index].fill_(group.index + 1.0)
        gather_shards([vector], group, PATIENCE)
        return vector.tolist()

    results = together([lambda n=n: learner(n) for n in ThreadSuperLearner.connect(2)])
    assert results == [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 2


def gather_of(weights: Tensor) -> ShardGather:
    """A super-learner's merge in one learner; each chunk has two parts."""
    replica = Replica([[weights]], 4, threading.Condition(), part_elements=2)
    alone = SuperLearnerGroup()
    return ShardGather([weights], replica, alone, PATIENCE, InlineWorker())


def test_a_change_is_merged_once_though_another_of_its_chunk_follows() -> None:
    merge = gather_of(weights := torch.zeros(4))
    first, second = merge._replica.chunks[0].parts
    first.add(torch.ones(2), 1.0)
    merge.merge(Votes())
    second.add(torch.ones(2), 2.0)
    for _ in range(2):
        merge.merge(Votes())
    assert weights.tolist() == [1.0, 1.0, 2.0, 2.0]


def test_what_has_been_agreed_on_is_not_voted_for_again() -> None:
    merge, found = gather_of(torch.zeros(4)), list[bool]()
    for _ in range(3):  # until this learner has seen the others' votes
        merge.merge(Votes(recover=True))
        found.append(merge.agreed.recover)
    assert found == [False, True, False]
    merge.begin_anew()
    assert merge.agreed == Votes()


class Counting(ThreadSuperLearner):
    """Notes whose changes are shared, and how many numbers that are."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shared: list[tuple[int, int]] = []

    @override
    def share(self, part: Tensor, owner: int, timeout: timedelta) -> None:
        self.shared.append((owner, len(part)))
        super().share(part, owner, timeout)


def test_only_the_chunks_that_a_learner_changed_are_shared() -> None:
    def learner(group: Counting) -> Any:
        weights, state = torch.zeros(8), threading.Condition()
        replica = Replica([[weights.tensor_split(2)[group.index]]], 2, state)
        merge = ShardGather([weights], replica, group, PATIENCE)
        if group.index == 1:  # in its second chunk
            replica.chunks[1].parts[0].add(torch.tensor([3.0, 4.0]), 0.5)
        merge.begin()
        merge.finish()
        merge.stop(1.0)
        return weights.tolist(), group.shared

    results = together([lambda n=n: learner(n) for n in Counting.connect(2)])
    assert results == [([0, 0, 0, 0, 0, 0, 1.5, 2.0], [(1, 2)])] * 2


class Watching(Guard):
    """Notes x of all chunks whenever the lock is taken or released."""

    def __init__(self, replica: Replica, state: threading.Condition) -> None:
        super().__init__(state, replica.device)
        self._replica, self.seen = replica, list[list[float]]()

    @override
    def __enter__(self) -> None:
        super().__enter__()
        self._look()

    @override
    def leave(self) -> None:
        self._look()
        super().leave()

    def _look(self) -> None:
        values = [torch.empty(len(chunk)) for chunk in self._replica.chunks]
        for chunk, value in zip(self._replica.chunks, values, strict=True):
            chunk.read(value)
        self.seen.append(torch.cat(values).tolist())


def test_an_exchange_never_reads_a_change_twice() -> None:
    def learner(group: ThreadSuperLearner) -> list[list[float]]:
        weights, state = torch.zeros(8), threading.Condition()
        replica = Replica([[weights.tensor_split(2)[group.index]]], 2, state)
        merge = ShardGather([weights], replica, group, PATIENCE)
        for chunk in replica.chunks:
            chunk.parts[0].add(torch.ones(2), 1.0)
        replica.guard = guard = Watching(replica, state)
        merge.begin()
        merge.finish()
        merge.stop(1.0)
        assert weights.tolist() == [1.0] * 8
        return guard.seen

    for seen in together(
        [lambda n=n: learner(n) for n in ThreadSuperLearner.connect(2)]
    ):
        assert len(seen) > 4
        assert all(one == [1.0] * 4 for one in seen)
