"""The mean over islands and their distances from it, by shards."""

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_adpsgd.gossip.protocol import BEGINNING, Pulled, furthest
from lightning_adpsgd.mixing.averages import all_finite, squared_norm
from lightning_adpsgd.mixing.consensus import Consensus, all_diverged

_log = logging.getLogger(__name__)


class Mean(NamedTuple):
    """The mean over islands.

    Attributes:
        values: one tensor for each chunk of this learner's shard, on the host.
        members: number of islands in it.
        spread: mean squared distance of the islands from the mean, in this shard.
        square: squared norm of the mean, in this shard.
    """

    values: list[Tensor]
    members: int
    spread: float
    square: float


class Total:
    """An accumulator of the mean that reuses the memory of its inputs.

    Args:
        own: weights of the first island, by chunk; they become the mean.
    """

    def __init__(self, own: list[Tensor]) -> None:
        self._mean, self._squares, self._members = own, 0.0, 1
        if not _is_finite(own):
            self._members = 0
            for chunk in own:
                chunk.zero_()

    def add(self, values: Sequence[Tensor]) -> None:
        """Adds an island, whose values it overwrites; leaves out a diverged one."""
        if not _is_finite(values):
            return
        self._members += 1
        share = 1 / self._members
        for mean, chunk in zip(self._mean, values, strict=True):
            difference = chunk.sub_(mean)
            # Welford's sum: no large squares are subtracted from one another.
            self._squares += (1 - share) * float(squared_norm(difference))
            mean.add_(difference, alpha=share)

    def mean(self) -> Mean:
        """The mean of all islands, with distances; FloatingPointError without any."""
        if not self._members:
            raise all_diverged("islands that answered")
        spread = self._squares / self._members
        square = sum(float(squared_norm(chunk)) for chunk in self._mean)
        return Mean(self._mean, self._members, spread, square)


def _is_finite(values: Sequence[Tensor]) -> bool:
    if not (found := all_finite(values)):
        _log.warning("the weights of an island are infinite or NaN: left out")
    return found


def consensus_over_shards(shards: Iterable[Sequence[float]]) -> Consensus:
    """The distance of islands from their mean, from the last fields of `Mean`s."""
    members, spreads, squares = zip(*shards, strict=True)
    return Consensus.of(sum(spreads), sum(squares), int(min(members)))


def mean_of(found: Iterable[Pulled], shares_epochs: bool = False) -> Pulled | None:
    """The mean of several pulled weights, at the furthest position; None for none."""
    position, total = BEGINNING, None
    for pulled in found:
        position = furthest((position, pulled.position), shares_epochs)
        if total is None:
            total = Total(pulled.values)
        else:
            total.add(pulled.values)
    return None if total is None else Pulled(position, total.mean().values)
