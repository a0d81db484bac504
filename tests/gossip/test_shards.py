"""The asynchronous engine where the learners of a super-learner hold shards."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from tests.helpers import (
    PATIENCE,
    ThreadSuperLearner,
    memory_of_tensors,
    random_rows,
    running,
    together,
    until,
    until_any,
)
from tests.threads import ThreadTransport

pytestmark = pytest.mark.usefixtures("engine_device")

LENGTHS = (3, 1, 2)
Learner = tuple[list[Tensor], Gossip]


def super_learners(rows: Tensor, wire_dtype: torch.dtype | None) -> list[list[Learner]]:
    """Two learners for each row, with three tensors of six elements each."""
    across = [ThreadTransport.connect(len(rows)) for _ in range(2)]
    schedule = Schedule(find_topology("ring"), len(rows))
    options = GossipOptions(timeout=PATIENCE, wire_dtype=wire_dtype, chunk_elements=4)

    def learner(half: Tensor, s: int, n: int, group: ThreadSuperLearner) -> Learner:
        shards = list(half.clone().split(LENGTHS))
        members = Members.fixed(schedule, s)
        return shards, Gossip(shards, across[n][s], group, members, options)

    return [
        [
            learner(half, s, n, group)
            for (n, half), group in zip(
                enumerate(row.chunk(2)),
                ThreadSuperLearner.connect(2, holds_all=False),
                strict=True,
            )
        ]
        for s, row in enumerate(rows)
    ]


def train(learners: list[list[Learner]], step: Callable[[int, int], float]) -> None:
    """Twenty steps of each learner; `step` gives what is added, by s and number."""

    def steps(s: int, shards: list[Tensor], gossip: Gossip) -> None:
        for number in range(20):
            gossip.before_update()
            for shard in shards:
                shard += step(s, number)
            gossip.after_update()

    everyone = [(s, *one) for s, pair in enumerate(learners) for one in pair]
    with running([gossip for _, _, gossip in everyone]):
        together([lambda one=one: steps(*one) for one in everyone])


def values_of(learners: list[list[Learner]]) -> Tensor:
    rows = [torch.cat([t for shards, _ in pair for t in shards]) for pair in learners]
    return torch.stack(rows)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.int8])
def test_gradients_alone_change_the_sum_of_each_shard(
    wire_dtype: torch.dtype | None,
) -> None:
    rows = random_rows(3, 12)
    learners = super_learners(rows, wire_dtype)
    train(learners, lambda s, number: s + 1.0)
    after = values_of(learners)
    torch.testing.assert_close(after.sum(0), rows.sum(0) + 20 * 6.0)
    assert sum(g.statistics().exchanges for pair in learners for _, g in pair) > 0


def test_all_shards_of_a_super_learner_go_on_from_one_peer_at_one_step() -> None:
    """One learner alone has weights that are not finite, and notices it."""
    learners = super_learners(random_rows(3, 12), None)
    learners[1][0][0][0][:] = torch.nan
    everyone = [gossip for pair in learners for _, gossip in pair]

    def step(gossip: Gossip) -> int:
        gossip.before_update()
        gossip.after_update()
        return gossip.statistics().reloads

    with running(everyone):
        reloads = until_any([lambda g=gossip: step(g) for gossip in everyone])
    assert reloads == [0, 0, 1, 1, 0, 0]
    assert values_of(learners).isfinite().all()


def test_a_learner_takes_at_most_a_third_of_its_shards_beside_the_changes() -> None:
    """All tensors of two learners who exchange, but for their weights."""
    elements = 96 << 15
    shards = [[torch.zeros(elements // 4) for _ in range(4)] for _ in range(2)]
    before = memory_of_tensors()
    schedule = Schedule(find_topology("complete"), 2)
    options = GossipOptions(timeout=PATIENCE, chunk_elements=elements // 96)
    gossips = [
        Gossip(
            shards[transport.index],
            transport,
            SuperLearnerGroup(),
            Members.fixed(schedule, transport.index),
            options,
        )
        for transport in ThreadTransport.connect(2)
    ]
    with running(gossips):
        for _ in range(4):
            for gossip in gossips:
                gossip.before_update()
                gossip.after_update()
            until(lambda: gossips[0].statistics().exchanges > 0, "an exchange")
        taken = memory_of_tensors() - before
    assert 1.0 <= taken / (2 * 4 * elements) <= 1.3
