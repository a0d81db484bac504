"""Complex weights, in super-learners that gather what they share."""

import math
import threading
from unittest.mock import Mock

import torch
from torch import Tensor, nn

from lightning_adpsgd.mixing.consensus import Consensus, ConsensusModel
from lightning_adpsgd.mixing.rounds import RoundMixer
from lightning_adpsgd.mixing.super_learner import ShardGather
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.weights.flat import FlatParameters
from lightning_adpsgd.weights.replica import Replica, as_real
from tests.helpers import PATIENCE, ThreadSuperLearner, together
from tests.threads import ThreadTransport


class Spectral(nn.Module):
    """Weights of both kinds, and of different precision: others are refused."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.real = nn.Linear(3, 3, dtype=torch.float64)
        self.filters = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))
        self.more = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def values(self) -> Tensor:
        """All weights, as real numbers."""
        parts = [
            torch.view_as_real(w).flatten() if w.is_complex() else w.flatten()
            for w in self.parameters()
        ]
        return torch.cat(parts).detach().clone()


def test_a_round_of_super_learners_of_two_is_the_mean() -> None:
    modules = [[Spectral(s), Spectral(s)] for s in range(2)]
    expected = torch.stack([both[0].values() for both in modules]).mean(0)
    across = [ThreadTransport.connect(2) for _ in range(2)]
    schedule = Schedule(find_topology("complete"), 2)
    mixers = [
        RoundMixer(
            FlatParameters(modules[s][n], 2).vectors,
            across[n][s],
            group,
            schedule,
            PATIENCE,
        )
        for s in range(2)
        for n, group in enumerate(ThreadSuperLearner.connect(2))
    ]

    def a_round(mixer: RoundMixer) -> None:
        mixer.take_snapshot()
        mixer.mix()
        mixer.finish()

    together([lambda m=mixer: a_round(m) for mixer in mixers])
    for module in (module for both in modules for module in both):
        torch.testing.assert_close(module.values(), expected)


def test_a_change_is_merged_alike_by_both_learners() -> None:
    """Each adds one to all of what it exchanges."""
    modules = [Spectral(0), Spectral(0)]
    expected = modules[0].values() + 1.0

    def learner(module: Spectral, group: ThreadSuperLearner) -> None:
        flat, state = FlatParameters(module, 2), threading.Condition()
        vectors = [as_real(vector) for vector in flat.vectors]
        (own,) = group.own(vectors)
        replica = Replica([own], 4, state)
        merge = ShardGather(vectors, replica, group, PATIENCE)
        for part in (part for chunk in replica.chunks for part in chunk.parts):
            part.add(torch.ones(len(part), dtype=part.dtype), 1.0)
        merge.begin()
        merge.finish()
        merge.stop(1.0)

    groups = ThreadSuperLearner.connect(2)
    pairs = zip(modules, groups, strict=True)
    together([lambda m=m, n=n: learner(m, n) for m, n in pairs])
    for module in modules:
        torch.testing.assert_close(module.values(), expected)


def test_a_buffer_that_is_set_to_zero_in_place_of_nan_stays() -> None:
    module = Spectral(0)
    for name in ("kept", "placed"):
        module.register_buffer(name, torch.ones(2, dtype=torch.complex64))

    def mean_of_nan(vectors: list[Tensor], trained: list[Tensor]) -> Consensus:
        for vector in vectors:
            vector.fill_(math.nan)
        return Consensus(0.0, 0.0)

    flat = FlatParameters(module)
    model = ConsensusModel(flat, Mock(), lambda _: None, average=mean_of_nan)
    model.enter("validation")
    module.get_buffer("placed").zero_()
    model.leave(adopt=False)
    assert module.get_buffer("kept").tolist() == [1, 1]
    assert module.get_buffer("placed").tolist() == [0, 0]
