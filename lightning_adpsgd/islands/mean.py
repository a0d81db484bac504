"""The mean over islands, and how far they are from it; shard by shard."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_adpsgd.gossip.protocol import Pulled
from lightning_adpsgd.mixing.averages import all_finite
from lightning_adpsgd.mixing.consensus import Consensus, all_diverged

_log = logging.getLogger(__name__)


class Mean(NamedTuple):
    """The mean over islands.

    Attributes:
        values: One tensor for each chunk of this learner's shard, on the host.
        members: How many islands were in it.
        spread: Mean square of how far they were from it, in this shard.
        square: Of its norm, in this shard.
    """

    values: list[Tensor]
    members: int
    spread: float
    square: float

    @property
    def consensus(self) -> Consensus:
        """How far they were from it, where the shard is all."""
        return consensus_of([self])


class Total:
    """Sums weights, and how long they are, in double precision."""

    def __init__(self, own: list[Tensor]) -> None:
        self._sums = [torch.zeros_like(chunk, dtype=torch.float64) for chunk in own]
        self._squares, self._members = 0.0, 0
        self.add(own)
        self._own = own

    def add(self, values: Sequence[Tensor]) -> None:
        """One more island; one that has diverged is left out."""
        if not all_finite(values):
            _log.warning("the weights of an island are infinite or NaN: left out")
            return
        self._members += 1
        for total, chunk in zip(self._sums, values, strict=True):
            total.add_(chunk)
            self._squares += float(chunk.double().square().sum())

    def mean(self) -> Mean:
        """Their mean, and how far they were from it.

        Raises:
            FloatingPointError: All have diverged.
        """
        if not self._members:
            raise all_diverged("islands that answered")
        means = [total / self._members for total in self._sums]
        square = sum(float(mean.square().sum()) for mean in means)
        # E|w|^2 - |E w|^2
        spread = max(0.0, self._squares / self._members - square)
        values = [m.to(own.dtype) for m, own in zip(means, self._own, strict=True)]
        return Mean(values, self._members, spread, square)


def consensus_of(shards: Sequence[Mean]) -> Consensus:
    """How far the islands were from their mean, by the shards of it."""
    return Consensus.of(
        sum(mean.spread for mean in shards),
        sum(mean.square for mean in shards),
        min(mean.members for mean in shards),
    )


def mean_of(found: Sequence[Pulled]) -> Pulled:
    """The mean of what several gave, at the position of the furthest."""
    chunks = zip(*(pulled.values for pulled in found), strict=True)
    values = [torch.stack(same).mean(0) for same in chunks]
    return Pulled(max(pulled.position for pulled in found), values)
