"""Averages change weights that are trained, in a program that records a graph."""

from collections.abc import Callable
from threading import Condition, RLock
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lightning_adpsgd.mixing.consensus import Consensus, ConsensusModel
from lightning_adpsgd.mixing.super_learner import (
    MergeAlone,
    ShardMerge,
    SuperLearnerGroup,
    Votes,
    gather_shards,
)
from lightning_adpsgd.weights.replica import Replica
from tests.helpers import PATIENCE, ThreadSuperLearner, together


class Trained:
    """Memory of a trained weight, as FSDP2 keeps it, with an exchange to be merged."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(4))
        with torch.no_grad():
            self.vector = self.weight.view(-1)
        self.replica = Replica([[self.vector]], 4, Condition(RLock()))
        (self.chunk,) = self.replica.chunks
        self.chunk.add(torch.ones(4), 1.0)


def merging(kind: Any) -> Callable[[Trained], Any]:
    return lambda one: kind([one.vector], one.replica, SuperLearnerGroup(), PATIENCE)


@pytest.mark.parametrize("kind", [MergeAlone, ShardMerge])
@pytest.mark.parametrize("act", ["merge", "merge_all"])
def test_a_merge_leaves_no_graph(kind: Any, act: str) -> None:
    one = Trained()
    merge = merging(kind)(one)
    getattr(merge, act)(Votes())
    merge.stop(PATIENCE.total_seconds())
    assert one.vector.tolist() == [2.0] * 4
    assert one.weight.grad_fn is None


@pytest.mark.parametrize("act", ["put", "spread"])
def test_weights_that_are_written_leave_no_graph(act: str) -> None:
    one, values = Trained(), [torch.full((4,), 5.0)]
    if act == "put":
        one.replica.put(values)
    else:
        one.replica.spread(values, [[one.vector]])
    assert one.vector.tolist() == [5.0] * 4
    assert one.weight.grad_fn is None


def test_what_is_gathered_leaves_no_graph() -> None:
    both = [Trained(), Trained()]
    for place, one in enumerate(both):
        one.weight.data.fill_(place)

    def learner(group: ThreadSuperLearner) -> None:
        gather_shards([both[group.index].vector], group, PATIENCE)

    together([lambda n=n: learner(n) for n in ThreadSuperLearner.connect(2)])
    for one in both:
        assert one.vector.tolist() == [0.0, 0.0, 1.0, 1.0]
        assert one.weight.grad_fn is None


class Quiet:
    """Weights and a communication of one learner, for a consensus model."""

    has_exchanges = False

    def __init__(self, vector: Tensor) -> None:
        self.vectors = [vector]

    def nothing(self, *_: Any, **__: Any) -> list[Tensor]:
        return []

    pause = resume = settle = set_aside = check_views = buffers_in = nothing


def test_weights_that_come_back_leave_no_graph() -> None:
    one = Trained()
    quiet: Any = Quiet(one.vector)

    def average(vectors: list[Tensor], trained: list[Tensor]) -> Consensus:
        one.weight.data.fill_(7.0)
        return cast(Consensus, None)

    model = ConsensusModel(quiet, quiet, lambda occasion: None, average)
    model.enter("validation")
    assert one.vector.tolist() == [7.0] * 4
    model.leave(adopt=False)
    assert one.vector.tolist() == [1.0] * 4
    assert one.weight.grad_fn is None
