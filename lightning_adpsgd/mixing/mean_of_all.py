"""The mean of all super-learners' weights, by collectives in which all take part."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_adpsgd.mixing.averages import all_finite, squared_norm
from lightning_adpsgd.mixing.consensus import Consensus, all_diverged
from lightning_adpsgd.mixing.lattice_mean import lattice_means
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup, gather_shards
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.weights.replica import averaging_dtype, to_averaging_dtype

_CHUNK = 1 << 22
# The fewest weights that are worth the two further collectives of a lattice.
_FEWEST_ON_LATTICE = 1 << 16


class SlowLink(NamedTuple):
    """What decides whether the weights of a mean travel in few bits (`lattice_mean`).

    Attributes:
        is_slow: function that tells whether this learner's link is slow; that of one
            learner is enough.
        untrained: function that gives the parts of the vectors, [n] each, whose equal
            values must stay as they are: those of buffers and frozen weights. They
            travel exactly.
    """

    is_slow: Callable[[], bool]
    untrained: Callable[[], list[Tensor]]

    def exact_parts(self) -> list[Tensor]:
        """The untrained parts that would be rounded."""
        parts = self.untrained()
        return [part for part in parts if averaging_dtype(part.dtype) == torch.float32]


@torch.no_grad()
def average_whole(
    vectors: list[Tensor],
    trained: list[Tensor],
    partition: Partition,
    slow_link: SlowLink | None = None,
) -> Consensus:
    """Replaces the vectors by their mean over all super-learners with finite weights.

    The first learner of each gives its weights.

    Returns:
        The distance of the weights in `trained` from that mean.
    """
    exact = slow_link.exact_parts() if slow_link else []
    is_slow = slow_link is not None and slow_link.is_slow()
    plan = _agree(vectors, partition, is_slow, sum(map(len, exact)))
    plan = plan._replace(speaks=plan.speaks and not partition.place(dist.get_rank()))
    means = _exact_means(exact, plan) if plan.few_bits and exact else []
    consensus = _average([_Pieces(vectors, trained, None)], plan)
    for part, mean in zip(exact, means, strict=False):
        part.copy_(mean)
    return consensus


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
    plan = _agree(vectors, partition)
    both = group.own(vectors), group.own(trained)
    # In ascending order in all learners, so that none waits for another in a cycle.
    pieces = [_Pieces(*one) for one in zip(*both, counterparts, strict=True)]
    consensus = _average(pieces, plan)
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

    def chunks(self, plan: "_Plan") -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Both in chunks, with their means, so that no copy of all is needed."""
        for vector, local in zip(self.vectors, self.trained, strict=True):
            begin = 0
            for mean in plan.means(vector, self.group):
                place = slice(begin, begin + len(mean))
                yield vector[place], local[place], mean
                begin = place.stop


class _Plan(NamedTuple):
    """What all learners have agreed on for a mean.

    Attributes:
        speaks: whether this learner adds its weights.
        number: number of super-learners in the mean.
        few_bits: whether weights travel in few bits.
    """

    speaks: bool
    number: int
    few_bits: bool

    def means(
        self, vector: Tensor, group: dist.ProcessGroup | None
    ) -> Iterator[Tensor]:
        """The means of all weights, chunk by chunk, in the precision of averages."""
        is_long = len(vector) >= _FEWEST_ON_LATTICE
        if self.few_bits and is_long and averaging_dtype(vector.dtype) == torch.float32:
            yield from lattice_means(vector, self.number, self.speaks, group)
            return
        for chunk in vector.split(_CHUNK):
            mean = to_averaging_dtype(chunk)
            dist.all_reduce(mean if self.speaks else mean.zero_(), group=group)
            yield mean.div_(self.number)


def _average(pieces: Sequence[_Pieces], plan: _Plan) -> Consensus:
    """Replaces pieces by their mean."""
    held = [vector for one in pieces for vector in one.vectors]
    device = held[0].device if held else torch.device("cpu")
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for one in pieces:
        for chunk, local_chunk, mean in one.chunks(plan):
            if plan.speaks:
                sums[0] += squared_norm(local_chunk - mean)
                sums[1] += squared_norm(mean)
            chunk.copy_(mean)
    dist.all_reduce(sums)
    return Consensus.of(*sums.div_(plan.number).tolist())


def _exact_means(parts: Sequence[Tensor], plan: _Plan) -> Sequence[Tensor]:
    """The means of these parts, which travel together and unrounded."""
    joined = torch.cat([to_averaging_dtype(part) for part in parts])
    plan = plan._replace(few_bits=False)
    mean = torch.cat([*plan.means(joined, None)])
    return mean.split([len(part) for part in parts])


def _agree(
    vectors: list[Tensor],
    partition: Partition,
    is_slow: bool = False,
    num_exact: int = 0,
) -> _Plan:
    """Leaves out super-learners whose weights are not finite."""
    device = vectors[0].device if vectors else torch.device("cpu")
    own = torch.tensor([all_finite(vectors), is_slow, num_exact], device=device)
    of_all = torch.zeros(3, dist.get_world_size(), dtype=torch.int64, device=device)
    of_all[:, dist.get_rank()] = own
    dist.all_reduce(of_all)
    flags, votes, exact = of_all
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
    speaks = together[partition.super_learner(dist.get_rank())]
    # Weights that are not finite are near no others. What travels exactly crosses
    # twice, and learners may freeze weights at different times.
    is_worth = 8 * num_exact <= sum(map(len, vectors))
    fits = flags.all() and (exact == num_exact).all() and is_worth
    return _Plan(speaks, sum(together), bool(votes.any() and fits))
