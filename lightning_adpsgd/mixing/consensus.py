"""The consensus model: the mean of all super-learners, which replaces the weights.

Between `enter` and `leave`, the module's weights are the mean in all learners. The
local weights are kept aside and restored, but for buffers that a program has changed in
between: a threshold that a program sets at the end of a validation stays.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_adpsgd.mixing.averages import all_finite, squared_norm
from lightning_adpsgd.mixing.communication import Communication
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup, gather_shards
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.weights.flat import Weights
from lightning_adpsgd.weights.replica import to_averaging_dtype

_CHUNK = 1 << 22


class Consensus(NamedTuple):
    """The distance of the trained weights from their mean, when that was last taken.

    Attributes:
        distance: ``sqrt(mean_i |w_i - mean w|^2)`` over all weights.
        relative_distance: distance divided by ``|mean w|``.
        members: number of islands in the mean; 0 without islands.
    """

    distance: float
    relative_distance: float
    members: int = 0

    @classmethod
    def of(cls, spread: float, square: float, members: int = 0) -> "Consensus":
        """Makes it from the mean squared distance and the squared norm of the mean."""
        distance, norm = spread**0.5, square**0.5
        return cls(distance, distance / norm if norm else 0.0, members)


def all_diverged(whom: str) -> FloatingPointError:
    """The error when no weights are finite, so that there is no mean."""
    return FloatingPointError(
        f"the weights of all {whom} are infinite or NaN: training has diverged; lower "
        "the learning rate or lengthen its warm-up"
    )


Average = Callable[[list[Tensor], list[Tensor]], Consensus]


class ConsensusModel:
    """The mean over all super-learners; every learner must make the same calls.

    Args:
        communication: averaging, which pauses and settles before the mean is taken.
        meet: function that waits until all learners have come to the named meeting.
        average: function that replaces vectors by their mean and returns the distance
            of the trained weights from it.
        needs_trained: whether `average` reads the trained weights.

    Attributes:
        adopts: whether the last `enter` said that `leave` is to adopt the mean.
    """

    def __init__(
        self,
        flat: Weights,
        communication: Communication,
        meet: Callable[[str], object],
        average: Average,
        needs_trained: bool = True,
    ) -> None:
        self._flat, self._communication = flat, communication
        self._meet, self._average = meet, average
        self._needs_trained = needs_trained
        self._local: list[Tensor] | None = None
        self._mean_buffers: list[Tensor] = []
        self.adopts = False

    @property
    def entered(self) -> bool:
        """Whether the module holds the mean."""
        return self._local is not None

    def local_weights(self) -> list[Tensor] | None:
        """A copy of what `leave` would restore; None if the module holds no mean."""
        if self._local is None:
            return None
        copies = [vector.clone() for vector in self._local]
        self._take_changed_buffers(copies)
        return copies

    def enter(
        self, occasion: str, adopts: bool = False, unmerged: bool = False
    ) -> Consensus:
        """Replaces the weights of all learners by their mean.

        Args:
            occasion: name of the meeting, the same in all learners.
            adopts: whether `leave` is to adopt the mean. Peers that have left earlier
                then average with the mean, and not with the local weights.
            unmerged: whether `leave` restores the weights without what exchanges have
                changed, which is merged later: a program that puts back what it kept
                of the weights loses nothing.
        """
        self.adopts = adopts
        self._communication.pause()
        self._meet(occasion)
        unmerged = unmerged and self._communication.has_exchanges
        # The distance is that of the weights in training. Settling would make two
        # super-learners equal if their last exchange was the last event.
        keeps = self._needs_trained or unmerged
        trained = [vector.clone() for vector in self._flat.vectors if keeps]
        self._communication.settle()
        self._flat.check_views()
        vectors = self._flat.vectors
        self._local = trained if unmerged else [vector.clone() for vector in vectors]
        shown = vectors if adopts else self._local
        self._communication.set_aside(shown, unmerged)
        try:
            consensus = self._average(vectors, trained)
        except FloatingPointError:  # no learner has a mean, and all keep their weights
            self.leave(adopt=False)
            raise
        self._mean_buffers = [b.clone() for b in self._flat.buffers_in(vectors)]
        return consensus

    @torch.no_grad()
    def leave(self, adopt: bool) -> None:
        """Restores the local weights or adopts the mean, and resumes exchanges."""
        assert self._local is not None
        if not adopt:
            self._take_changed_buffers(self._local)
            pairs = zip(self._flat.vectors, self._local, strict=True)
            for vector, local in pairs:
                vector.copy_(local)
        self._local, self._mean_buffers = None, []
        self._communication.resume()

    @torch.no_grad()
    def _take_changed_buffers(self, local_weights: list[Tensor]) -> None:
        here = self._flat.buffers_in(self._flat.vectors)
        local = self._flat.buffers_in(local_weights)
        for now, mean, kept in zip(here, self._mean_buffers, local, strict=False):
            # A NaN of a learner that has diverged is in the mean, and changes nothing.
            if not torch.allclose(now, mean, rtol=0.0, atol=0.0, equal_nan=True):
                kept.copy_(now)


@torch.no_grad()
def average_whole(
    vectors: list[Tensor], trained: list[Tensor], partition: Partition
) -> Consensus:
    """Replaces the vectors by their mean over all super-learners with finite weights.

    The first learner of each gives its weights.

    Returns:
        The distance of the weights in `trained` from that mean.
    """
    mine, number = _finite_ones(vectors, partition)
    speaks = mine and not partition.place(dist.get_rank())
    return _average([_Pieces(vectors, trained, None)], speaks, number)


@torch.no_grad()
def average_shards(
    vectors: list[Tensor],
    trained: list[Tensor],
    group: SuperLearnerGroup,
    partition: Partition,
    counterparts: Sequence[dist.ProcessGroup],
    buffers: Sequence[Tensor],
    timeout: timedelta,
) -> Consensus:
    """Does the same as `average_whole` for learners that hold only their shards.

    Args:
        vectors: shards, and buffers, of which each learner has its own.
        counterparts: process group of the owners of each section that this learner
            exchanges.
        buffers: the buffers among the vectors, which become equal in all learners.
        timeout: longest wait for learners that share a weight.
    """
    finite = _finite_ones(vectors, partition)
    both = group.own(vectors), group.own(trained)
    # In ascending order in all learners, so that none waits for another in a cycle.
    pieces = [_Pieces(*one) for one in zip(*both, counterparts, strict=True)]
    consensus = _average(pieces, *finite)
    gather_shards(vectors, group, timeout)
    average_buffers(buffers, None)
    return consensus


@torch.no_grad()
def average_buffers(buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Averages buffers over a group; None: over all learners."""
    for buffer in buffers:
        dist.all_reduce(buffer, group=group)
        buffer.div_(dist.get_world_size(group))


class _Pieces(NamedTuple):
    vectors: list[Tensor]
    trained: list[Tensor]
    group: dist.ProcessGroup | None

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Both in chunks, so that no further copy of the weights is needed."""
        for vector, local in zip(self.vectors, self.trained, strict=True):
            yield from zip(vector.split(_CHUNK), local.split(_CHUNK), strict=True)


def _average(pieces: Sequence[_Pieces], speaks: bool, number: int) -> Consensus:
    """Replaces pieces by their mean, to which this learner adds its own if it speaks.

    Args:
        number: number of super-learners in the mean.
    """
    held = [vector for one in pieces for vector in one.vectors]
    device = held[0].device if held else torch.device("cpu")
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for one in pieces:
        for chunk, local_chunk in one.chunks():
            mean = to_averaging_dtype(chunk)
            dist.all_reduce(mean if speaks else mean.zero_(), group=one.group)
            mean.div_(number)
            if speaks:
                sums[0] += squared_norm(local_chunk - mean)
                sums[1] += squared_norm(mean)
            chunk.copy_(mean)
    dist.all_reduce(sums)
    return Consensus.of(*sums.div_(number).tolist())


def _finite_ones(vectors: list[Tensor], partition: Partition) -> tuple[bool, int]:
    """Whether this super-learner's weights are finite, and the number of such ones."""
    device = vectors[0].device if vectors else torch.device("cpu")
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    flags[dist.get_rank()] = all_finite(vectors)
    dist.all_reduce(flags)
    are_finite = flags.bool().split(list(partition.sizes))
    together = [bool(of_one.all()) for of_one in are_finite]
    if not any(together):
        raise all_diverged("learners")
    if not flags.all():
        rank_zero_warn(
            "The weights of learners "
            f"{(flags == 0).nonzero().flatten().tolist()} are infinite or NaN; the "
            "consensus model is the mean of the others."
        )
    return together[partition.super_learner(dist.get_rank())], sum(together)
