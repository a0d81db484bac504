"""Weights that stay frozen need not travel: the learners end where they would have."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.learners import Quadratic, gossip, learners, loader, trainer_of, values

NUM_FROZEN = 100


class Adapted(Quadratic):
    """A frozen part beside three weights that learn."""

    def __init__(self, start: float) -> None:
        super().__init__(start)
        frozen = torch.full((NUM_FROZEN,), start, dtype=torch.float64)
        self.base = nn.Parameter(frozen, requires_grad=False)


class Run(NamedTuple):
    """What a learner has come to."""

    weight: Tensor
    base: Tensor
    bytes_sent: int


def fit(rank: int, exchange_frozen: bool) -> Run:
    module = Adapted(start=1.0 + rank)
    strategy = gossip("complete", "sync", exchange_frozen=exchange_frozen)
    trainer_of(strategy, 2).fit(module, loader(16, rank, 2))
    statistics = strategy.gossip_statistics()
    return Run(module.weight.data, module.base.data, statistics.bytes_sent)


def test_frozen_weights_that_do_not_travel_are_those_of_learner_0() -> None:
    def program(rank: int) -> tuple[Run, Run]:
        return fit(rank, True), fit(rank, False)

    for whole, lean in values(learners(2, program)):
        assert torch.equal(lean.weight, whole.weight)
        assert lean.base.tolist() == whole.base.tolist() == [1.0] * NUM_FROZEN
        num_trained = len(whole.weight)
        assert lean.bytes_sent > 0
        assert lean.bytes_sent * (NUM_FROZEN + num_trained) == (
            whole.bytes_sent * num_trained
        )
