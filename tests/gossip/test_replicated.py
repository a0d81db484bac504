"""The asynchronous engine where learners hold some weights together."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup, gather_shards
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.weights.sections import Range, Section
from tests.helpers import (
    PATIENCE,
    ThreadSuperLearner,
    random_rows,
    running,
    together,
    until_any,
)
from tests.threads import ThreadTransport

pytestmark = pytest.mark.usefixtures("engine_device")

SHARD, REPLICATED = 3, 5
Learner = tuple[list[Tensor], Gossip]


def groups() -> list[SuperLearnerGroup]:
    """Two learners that hold a shard each, and both the other vector."""
    parts = Range(1, 0, 2), Range(1, 2, REPLICATED)
    owned = [[Section((), (part,))] for part in parts]
    exchanged = [[Section((), (Range(0, 0, SHARD), part))] for part in parts]
    holders = ThreadSuperLearner.connect(2, sections=owned)
    found = ThreadSuperLearner.connect(2, False, exchanged)
    for group, of_group in zip(found, holders, strict=True):
        group._replicated = of_group
    return [*found]


def super_learners(rows: Tensor) -> list[list[Learner]]:
    """Two learners for each row: two shards, and what both have."""
    across = [ThreadTransport.connect(len(rows)) for _ in range(2)]
    schedule = Schedule(find_topology("ring"), len(rows))
    options = GossipOptions(timeout=PATIENCE, chunk_elements=2)

    def learner(row: Tensor, s: int, n: int, group: SuperLearnerGroup) -> Learner:
        first, second, both = row.split((SHARD, SHARD, REPLICATED))
        held = [(first, second)[n].clone(), both.clone()]
        members = Members.fixed(schedule, s)
        return held, Gossip(held, across[n][s], group, members, options)

    return [
        [learner(row, s, n, group) for n, group in enumerate(groups())]
        for s, row in enumerate(rows)
    ]


def rows_of(learners: list[list[Learner]]) -> Tensor:
    """The weights of each super-learner, in which its learners agree to the bit."""
    rows = []
    for (first, _), (second, _) in learners:
        assert torch.equal(first[1], second[1])
        rows.append(torch.cat([first[0], second[0], first[1]]))
    return torch.stack(rows)


def step(s: int, held: list[Tensor], gossip: Gossip, change: float) -> Any:
    gossip.before_update()
    for vector in held:
        vector += change * (s + 1)
    gossip.after_update()
    return held[1].clone()


def test_gradients_alone_change_the_sum_and_both_learners_have_the_same() -> None:
    rows = random_rows(3, 2 * SHARD + REPLICATED)
    learners = super_learners(rows)
    everyone = [(s, *one) for s, pair in enumerate(learners) for one in pair]

    def train(s: int, held: list[Tensor], gossip: Gossip) -> list[Tensor]:
        return [step(s, held, gossip, 0.5) for _ in range(20)]

    with running([gossip for _, _, gossip in everyone]):
        seen = together([lambda one=one: train(*one) for one in everyone])
    torch.testing.assert_close(
        rows_of(learners).sum(0), rows.sum(0) + 20 * 0.5 * (1 + 2 + 3)
    )
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert all(map(torch.equal, first, second))
    assert sum(g.statistics().exchanges for _, _, g in everyone) > 0
    assert not torch.equal(seen[0][-1], seen[2][-1])


@pytest.mark.parametrize("who", [0, 1])
def test_what_both_have_is_healthy_in_both_after_a_reload(who: int) -> None:
    """The first or the second learner exchanges the weight that is not finite."""
    learners = super_learners(random_rows(3, 2 * SHARD + REPLICATED))
    for held, _ in learners[1]:
        held[1][-who] = torch.nan
    everyone = [(s, *one) for s, pair in enumerate(learners) for one in pair]

    def reloads(s: int, held: list[Tensor], gossip: Gossip) -> int:
        step(s, held, gossip, 0.0)
        return gossip.statistics().reloads

    with running([gossip for _, _, gossip in everyone]):
        found = until_any([lambda one=one: reloads(*one) for one in everyone])
    assert found == [0, 0, 1, 1, 0, 0]
    assert rows_of(learners).isfinite().all()


def test_each_learner_gives_what_it_exchanges_and_nothing_else() -> None:
    def learner(group: SuperLearnerGroup, number: float) -> list[list[float]]:
        held = [torch.full((SHARD,), number), torch.full((REPLICATED,), number)]
        gather_shards(held, group, PATIENCE)
        return [vector.tolist() for vector in held]

    pairs = zip(groups(), (1.0, 2.0), strict=True)
    results = together([lambda pair=pair: learner(*pair) for pair in pairs])
    both = [1.0, 1.0, 2.0, 2.0, 2.0]
    assert results == [[[1.0] * SHARD, both], [[2.0] * SHARD, both]]
