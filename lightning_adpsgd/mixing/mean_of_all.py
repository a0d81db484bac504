"""The mean of all super-learners' weights, by collectives in which all take part."""

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_adpsgd.mixing.averages import all_finite, squared_norm
from lightning_adpsgd.mixing.consensus import Consensus, all_diverged
from lightning_adpsgd.mixing.exact_mean import MESSAGE, exact_means
from lightning_adpsgd.mixing.lattice_mean import lattice_means
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup, gather_shards
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.weights.flat import Span
from lightning_adpsgd.weights.replica import averaging_dtype

# The number of weights that are computed at once: what a cache holds.
_CHUNK = 1 << 18
# Fewer weights, such as biases, would fill few blocks of a lattice.
_FEWEST_ON_LATTICE = 1 << 12
# Learners that shard a model may have no memory for more than a share of their weights,
# twice: a message is a copy, and the all-reduce makes another.
_MESSAGES_OF_SHARDS, _SHORTEST_MESSAGE = 8, 1 << 20


def average_whole(
    vectors: list[Tensor],
    trained: list[Tensor],
    partition: Partition,
    is_slow: Callable[[], bool] = bool,
    spans: Callable[[], list[list[Span]]] = list,
) -> Consensus:
    """Replaces the vectors by their mean over all super-learners with finite weights.

    The first learner of each gives its weights.

    Args:
        is_slow: whether this learner's link is slow. If that of any is, weights travel
            in few bits (`lattice_means`).
        spans: gives the spans of each vector. Those that are not trained travel
            exactly, because programs rely on their values.

    Returns:
        The distance of the weights in `trained` from that mean.
    """
    found = spans()
    plan = _agree(vectors, partition, is_slow(), found)
    plan = plan._replace(speaks=plan.speaks and not partition.place(dist.get_rank()))
    if plan.few_bits:
        return _average(_by_precision(vectors, trained, found), plan)
    return _average([_Pieces(vectors, trained)], plan)


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
        counterparts: process group of the owners of each section exchanged here.
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
    group: dist.ProcessGroup | None = None
    few_bits: bool = False

    @property
    def longest_message(self) -> int:
        if self.group is None:
            return MESSAGE
        share = sum(map(len, self.vectors)) // _MESSAGES_OF_SHARDS
        return min(max(share, _SHORTEST_MESSAGE), MESSAGE)


def _by_precision(
    vectors: Sequence[Tensor], trained: Sequence[Tensor], spans: list[list[Span]]
) -> list[_Pieces]:
    """What travels in few bits, and what exactly."""
    coarse, exact = _Pieces([], [], few_bits=True), _Pieces([], [])
    for vector, local, of_one in zip(vectors, trained, spans, strict=True):
        lengths = [span.length for span in of_one]
        parts = zip(of_one, vector.split(lengths), local.split(lengths), strict=True)
        for span, part, local_part in parts:
            is_long = span.is_trained and span.length >= _FEWEST_ON_LATTICE
            fits = is_long and averaging_dtype(vector.dtype) == torch.float32
            into = coarse if fits else exact
            into.vectors.append(part)
            into.trained.append(local_part)
    return [coarse, exact]


class _Plan(NamedTuple):
    """What all learners have agreed on for a mean.

    Attributes:
        speaks: whether this learner adds its weights.
        number: number of super-learners in the mean.
        few_bits: whether weights may travel in few bits.
    """

    speaks: bool
    number: int
    few_bits: bool


def _average(pieces: Sequence[_Pieces], plan: _Plan) -> Consensus:
    """Replaces pieces by their mean."""
    held = [vector for one in pieces for vector in one.vectors]
    device = held[0].device if held else torch.device("cpu")
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for one in pieces:
        chunks, local = _in_chunks(one.vectors), _in_chunks(one.trained)
        how = chunks, plan.number, plan.speaks, one.group
        if one.few_bits and chunks:
            each = lattice_means(*how)
        else:
            each = exact_means(*how, one.longest_message)
        for chunk, local_chunk in zip(chunks, local, strict=True):
            mean = next(each)
            if plan.speaks:
                sums[0] += squared_norm(local_chunk - mean)
                sums[1] += squared_norm(mean)
            chunk.copy_(mean)
            del mean  # a view of a whole message
        assert next(each, None) is None, "more means than chunks"
    # No learner leaves, and asks another for weights, before all have written theirs.
    return Consensus.of(*_gathered(sums).sum(0).div_(plan.number).tolist())


def _gathered(numbers: Tensor) -> Tensor:
    """The numbers of all learners, [learners, n].

    An all-reduce of as few takes twice the messages, each of which a link delays.
    """
    of_all = numbers.new_empty(dist.get_world_size(), len(numbers))
    dist.all_gather([*of_all], numbers)
    return of_all


def _in_chunks(vectors: Sequence[Tensor]) -> list[Tensor]:
    return [chunk for vector in vectors for chunk in vector.split(_CHUNK)]


def _agree(
    vectors: list[Tensor],
    partition: Partition,
    is_slow: bool = False,
    spans: Sequence[Sequence[Span]] = (),
) -> _Plan:
    """Leaves out super-learners whose weights are not finite."""
    device = vectors[0].device if vectors else torch.device("cpu")
    # Learners may freeze weights at different times.
    mark = zlib.crc32(repr(spans).encode())
    own = torch.tensor([all_finite(vectors), is_slow, mark], device=device)
    flags, votes, marks = _gathered(own).T
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
    # Weights that are not finite are near no others.
    fits = flags.all() and (marks == mark).all()
    return _Plan(speaks, sum(together), bool(votes.any() and fits))
