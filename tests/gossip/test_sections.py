"""The asynchronous engine among super-learners of different sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from tests.helpers import (
    PATIENCE,
    memory_of_tensors,
    random_rows,
    running,
    together,
    until,
    until_any,
)
from tests.unequal import SIZES, Learner, learners_of, num_elements, rows_of

pytestmark = pytest.mark.usefixtures("engine_device")


def engine_of(learner: Learner, num: int, **options: Any) -> Gossip:
    schedule = Schedule(find_topology("complete"), num)
    dials = GossipOptions(**{"timeout": PATIENCE, "chunk_elements": 3, **options})
    return Gossip(
        learner.vectors,
        learner.transport,
        learner.group,
        Members.fixed(schedule, learner.number),
        dials,
        further=learner.further,
    )


def step(learner: Learner, gossip: Gossip, change: float = 0.0) -> None:
    gossip.before_update()
    for vector in learner.vectors:
        vector += change
    gossip.after_update()


def train(
    learners: list[Learner], gossips: list[Gossip], change: Callable[[int], float]
) -> None:
    """Twenty steps of each learner; `change` gives what is added by super-learner.

    Steps that change nothing follow, until all have exchanged: on a busy machine twenty
    may be over sooner.
    """

    def steps(learner: Learner, gossip: Gossip) -> None:
        for _ in range(20):
            step(learner, gossip, change(learner.number))

    pairs = [*zip(learners, gossips, strict=True)]
    with running(gossips):
        together([lambda p=pair: steps(*p) for pair in pairs])
        for _ in range(2000):
            if all(gossip.statistics().exchanges for gossip in gossips):
                break
            together([lambda p=pair: step(*p) for pair in pairs])


@pytest.mark.parametrize("wire_dtype", [None, torch.int8])
@pytest.mark.parametrize("holds_all", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_alone_change_the_sum_over_super_learners(
    sizes: tuple[int, ...], holds_all: bool, wire_dtype: torch.dtype | None
) -> None:
    rows = random_rows(len(sizes), num_elements(holds_all))
    learners = learners_of(rows, sizes, holds_all)
    gossips = [engine_of(one, len(sizes), wire_dtype=wire_dtype) for one in learners]
    train(learners, gossips, lambda s: s + 1.0)
    after = rows_of(learners, sizes)
    added = 20 * sum(range(1, len(sizes) + 1))
    torch.testing.assert_close(after.sum(0), rows.sum(0) + added)
    assert all(gossip.statistics().exchanges > 0 for gossip in gossips)


@pytest.mark.parametrize("holds_all", [True, False])
@pytest.mark.parametrize("sizes", [(2, 4), (1, 3)])
def test_two_that_meet_alone_take_their_mean_in_every_section(
    sizes: tuple[int, ...], holds_all: bool
) -> None:
    """Exchanges of other sections, at the same time, do not weigh against it."""
    rows = random_rows(2, num_elements(holds_all))
    learners = learners_of(rows, sizes, holds_all)
    gossips = [engine_of(one, 2) for one in learners]
    with running(gossips):
        pairs = [*zip(learners, gossips, strict=True)]
        together([lambda p=pair: step(*p) for pair in pairs])
        for learner, gossip in pairs:
            num = 1 + len(learner.further)
            until(lambda g=gossip, n=num: g.statistics().exchanges >= n, "exchanges")
    assert [g.statistics().exchanges for g in gossips] == [
        1 + len(one.further) for one in learners
    ]
    expected = rows.mean(0).expand(2, -1)
    after = rows_of(learners, sizes)
    torch.testing.assert_close(after, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("diverged", [0, 1])
def test_all_learners_go_on_from_all_owners_of_one_peer(diverged: int) -> None:
    """One learner alone has weights that are not finite, and notices it."""
    sizes = (2, 4)
    learners = learners_of(random_rows(2, num_elements(True)), sizes, holds_all=True)
    ill = [one for one in learners if one.number == diverged]
    for one in ill:
        one.vectors[0][one.owned[0].begin if one is ill[0] else 0] = torch.nan
    gossips = [engine_of(one, 2) for one in learners]
    pairs = [*zip(learners, gossips, strict=True)]

    def reloads(learner: Learner, gossip: Gossip) -> int:
        step(learner, gossip)
        return gossip.statistics().reloads

    with running(gossips):
        found = until_any([lambda p=pair: reloads(*p) for pair in pairs])
    assert found == [int(one.number == diverged) for one in learners]
    assert rows_of(learners, sizes).isfinite().all()


@pytest.mark.parametrize("sizes", [(2, 4), (1, 3)])
def test_pairs_at_their_boundaries_take_their_mean(sizes: tuple[int, ...]) -> None:
    rows = random_rows(2, num_elements(True))
    learners = learners_of(rows, sizes, holds_all=True)
    wait = PATIENCE.total_seconds() / 2
    gossips = [engine_of(one, 2, in_pairs=True, max_wait=wait) for one in learners]
    pairs = [*zip(learners, gossips, strict=True)]
    with running(gossips):
        together([lambda p=pair: step(*p) for pair in pairs])
        after = rows_of(learners, sizes).clone()
    expected = rows.mean(0).expand(2, -1)
    torch.testing.assert_close(after, expected, atol=1e-12, rtol=0)


def test_learners_of_different_sizes_take_at_most_a_third_beside_the_changes() -> None:
    """All tensors of six learners who exchange, but for their weights.

    A message has as many elements as `strategy.engines` gives it for these sizes.
    """
    shapes, sizes = ((1536, 512),) * 4, (2, 4)
    elements = sum(rows * columns for rows, columns in shapes)
    rows = torch.zeros(2, elements)
    learners = learners_of(rows, sizes, holds_all=False, shapes=shapes)
    before = memory_of_tensors()
    length = elements // max(sizes) // 96
    gossips = [engine_of(one, 2, chunk_elements=length) for one in learners]
    pairs = [*zip(learners, gossips, strict=True)]
    with running(gossips):
        together([lambda p=pair: step(*p) for pair in pairs])
        for learner, gossip in pairs:
            num = 1 + len(learner.further)
            until(lambda g=gossip, n=num: g.statistics().exchanges >= n, "exchanges")
        taken = memory_of_tensors() - before
    assert 1.0 <= taken / rows.nbytes <= 1.3
