"""Chooses and makes the engine that averages the weights of a job, from its options.

`make_engine` is where a mode gets its code: `RoundMixer` behind "sync" and
"delay_by_one", `Gossip` behind "async" and "ready_pairs", and `Island` around `Gossip`
with `islands`.
"""

import math
import os
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_adpsgd.coordination.groups import Groups, has_nccl
from lightning_adpsgd.dials import Dials
from lightning_adpsgd.gossip.codecs import LONGEST_BLOCK
from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.islands.island import Island, Sections
from lightning_adpsgd.islands.rendezvous import RendezvousAddress
from lightning_adpsgd.mixing.communication import Communication
from lightning_adpsgd.mixing.consensus import Average, Consensus
from lightning_adpsgd.mixing.mean_of_all import (
    average_buffers,
    average_shards,
    average_whole,
)
from lightning_adpsgd.mixing.rounds import RoundMixer
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.mixing.synchronous import Rounds
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.process_group import (
    DeviceTransport,
    DistributedTransport,
)
from lightning_adpsgd.weights.flat import FlatParameters, Weights
from lightning_adpsgd.weights.sections import Section, sections_of
from lightning_adpsgd.weights.shards import LocalShards, is_sharded

# Two exchanges at a time hold twelve messages in memory: an eighth of the shards.
_MESSAGES_OF_SHARDS, _SHORTEST_MESSAGE = 96, 1 << 15
# The number of parts of a small model, each of which may be a message.
_PARTS = 8


def weights_of(
    module: nn.Module,
    dials: Dials,
    partition: Partition,
    kept_out: Collection[str] = (),
) -> Weights:
    """The weights of a module in the form that the engine reads."""
    has_shards = max(partition.sizes) > 1 or is_sharded(module)
    if dials.inside == "model_parallel" and has_shards:
        return LocalShards(module, partition.tensor_parallel_size)
    sizes = _sizes_of_islands(dials) or partition.sizes
    flat = FlatParameters(module, math.lcm(*sizes), dials.exchange_frozen, kept_out)
    if max(sizes) > 1:
        _check_complex(flat)
    return flat


def _check_complex(flat: FlatParameters) -> None:
    """Refuses two vectors that have the same dtype once viewed as real numbers.

    They would share messages, while learners gather each vector separately.
    """
    dtypes = {vector.dtype for vector in flat.vectors}
    both = [dtype for dtype in dtypes if dtype.is_complex and dtype.to_real() in dtypes]
    if both:
        raise ValueError(
            f"with `super_learner_size` above 1, {both[0]} weights must not be mixed "
            f"with {both[0].to_real()} ones: hold them as real numbers "
            "(`torch.view_as_real`), or set `super_learner_size=1`"
        )


def _sizes_of_islands(dials: Dials) -> tuple[int, ...]:
    """The sizes that islands may have; empty if all islands have one size."""
    sizes = dials.super_learner_size
    if dials.islands is None or not isinstance(sizes, tuple):
        return ()
    return tuple(sorted(set(sizes)))


def sections_between(weights: Weights, partition: Partition) -> list[Section] | None:
    """The sections that super-learners exchange; None if all have one size."""
    if partition.is_even:
        return None
    sections = sections_of([weights.owned(size) for size in partition.sizes])
    for s, size in enumerate(partition.sizes):
        if {section.owners[s] for section in sections} != {*range(size)}:
            raise ValueError(
                f"`super_learner_size` must leave each learner some weights, got {size}"
                ": the weights have too few rows; use smaller super-learners"
            )
    return sections


def average_of(
    weights: Weights,
    groups: Groups,
    communication: Communication,
    island: Island | None,
    timeout: timedelta,
) -> Average:
    """The function for the mean over super-learners."""
    if island is not None:
        return partial(_average_island, island, weights, groups)
    if isinstance(weights, LocalShards):
        return partial(
            average_shards,
            group=super_learner_of(weights, groups),
            partition=groups.partition,
            counterparts=groups.counterparts,
            buffers=weights.buffers_in(weights.vectors),
            timeout=timeout,
        )
    partition = groups.partition
    if partition.is_even:
        # Also of the floating-point buffers of all learners, which may differ until the
        # next forward.
        partition = Partition((1,) * partition.num_learners)
    assert isinstance(weights, FlatParameters)
    return partial(
        average_whole,
        partition=partition,
        is_slow=lambda: communication.sends_few_bits,
        spans=weights.spans,
    )


def _average_island(
    island: Island,
    weights: Weights,
    groups: Groups,
    vectors: list[Tensor],
    trained: list[Tensor],
) -> Consensus:
    consensus = island.average()
    if isinstance(weights, LocalShards) and groups.gradients is not None:
        # Nothing else makes buffers equal inside an island.
        average_buffers(weights.buffers_in(vectors), groups.gradients)
    return consensus


def super_learner_of(
    weights: Weights, groups: Groups, own: int | None = None
) -> SuperLearnerGroup:
    """The learners of this super-learner, and the weights that each exchanges."""
    holds_all = not isinstance(weights, LocalShards)
    if not holds_all and groups.tensor_parallel is not None:
        return _group_with_shared_layers(weights, groups, groups.tensor_parallel)
    if groups.sections is None:
        return SuperLearnerGroup(groups.shards, holds_all)
    own = groups.partition.super_learner(dist.get_rank()) if own is None else own
    size = groups.partition.sizes[own]
    sections = [
        [one for one in groups.sections if one.owners[own] == place]
        for place in range(size)
    ]
    if not holds_all:
        owned = weights.owned(len(sections))
        sections = [
            [section.seen_by(ranges) for section in of_learner]
            for of_learner, ranges in zip(sections, owned, strict=True)
        ]
    return SuperLearnerGroup(groups.shards, holds_all, sections)


def _group_with_shared_layers(
    weights: LocalShards, groups: Groups, sharing: dist.ProcessGroup
) -> SuperLearnerGroup:
    own = [weights.exchanged(dist.get_rank(sharing))]
    size = groups.partition.size(dist.get_rank())
    replicated = [[weights.replicated(place)] for place in range(weights.shared_by)]
    holders = SuperLearnerGroup(sharing, sections=replicated)
    return SuperLearnerGroup(groups.shards, False, [own] * size, holders)


def mixes_on_device(dials: Dials, partition: Partition, device: torch.device) -> bool:
    """Whether weights are mixed on the GPU over NCCL rather than on the host over Gloo.

    NCCL suits only learners in lockstep, because a receive that waits for a peer
    occupies the GPU. It is not used while gradients are being reduced or where a
    learner has several sections, because two communicators may deadlock.
    """
    at_boundary = dials.effective_order == "step_then_average"
    is_alone = max(partition.sizes) == 1
    fits = dials.in_lockstep and partition.is_even and (at_boundary or is_alone)
    return fits and has_nccl(device)


def make_engine(
    dials: Dials,
    flat: Weights,
    groups: Groups,
    store: Store,
    lost_peer: Callable[[str], None],
) -> tuple[Communication, Island | None]:
    """Makes what the training thread drives, and its island, without starting them."""
    if dials.islands is not None:
        island = _make_island(dials, dials.islands, flat, groups, store)
        return island.engine, island
    partition = groups.partition
    schedule = Schedule(
        dials.topology, partition.num_super_learners, dials.mixing_gain, dials.seed
    )
    if dials.in_lockstep:
        return _make_rounds(dials, flat, groups, schedule), None
    named = partial(DistributedTransport, hosts=groups.hosts)
    transport, *further = map(named, groups.counterparts)
    gossip = Gossip(
        flat.vectors,
        transport,
        super_learner_of(flat, groups),
        Members.fixed(schedule, partition.super_learner(dist.get_rank())),
        _options(dials, flat, groups),
        lost_peer,
        further,
    )
    return gossip, None


def _make_rounds(
    dials: Dials, flat: Weights, groups: Groups, schedule: Schedule
) -> Communication:
    carrier = DeviceTransport if groups.on_device else DistributedTransport
    named = partial(carrier, hosts=groups.hosts)
    transport, *further = map(named, groups.counterparts)
    mixer = RoundMixer(
        flat.vectors,
        transport,
        super_learner_of(flat, groups),
        schedule,
        dials.timeout,
        chunk_elements(flat, groups),
        further,
    )
    mode = "sync" if dials.communication == "sync" else "delay_by_one"
    return Rounds(mixer, mode, dials.effective_order, dials.gossip_every)


def _make_island(
    dials: Dials, url: str, flat: Weights, groups: Groups, store: Store
) -> Island:
    sizes, rank, size = _sizes_of_islands(dials), dist.get_rank(), dist.get_world_size()
    # Sections are those of one job with a super-learner of each size.
    partition = Partition(sizes or (size,), dials.tensor_parallel_size)
    cut, own = sections_between(flat, partition), partition.sizes.index(size)
    groups, sections = groups._replace(partition=partition, sections=cut), None
    if cut is not None:
        numbers = (n for n, one in enumerate(cut) if one.owners[own] == rank)
        sections = Sections((*numbers,), len(cut), sizes)
    return Island(
        flat.vectors,
        RendezvousAddress.parse(url),
        Schedule(dials.topology, 1, dials.mixing_gain, dials.seed),
        _options(dials, flat, groups),
        flat.layout(),
        Credentials.from_environment(os.environ),
        super_learner_of(flat, groups, own),
        PrefixStore("island", store),
        sections=sections,
        shares_epochs=bool(dials.work_sharing),
    )


def chunk_elements(weights: Weights, groups: Groups) -> int:
    """The most elements in a message, equal in all learners that exchange."""
    if not isinstance(weights, LocalShards):
        return GossipOptions.chunk_elements
    fitting = max(
        _own_elements(weights, groups) // _MESSAGES_OF_SHARDS, _SHORTEST_MESSAGE
    )
    return min(fitting, GossipOptions.chunk_elements)


def part_elements(weights: Weights, groups: Groups) -> int:
    """The most elements averaged at once, equal in all learners that exchange."""
    several = _own_elements(weights, groups) // _PARTS
    in_whole_blocks = -(-several // LONGEST_BLOCK) * LONGEST_BLOCK
    return min(max(in_whole_blocks, _SHORTEST_MESSAGE), GossipOptions.part_elements)


def _own_elements(weights: Weights, groups: Groups) -> int:
    """About the number of weights per learner in the largest super-learner."""
    size = max(groups.partition.sizes)
    if groups.sections is not None:
        whole = (end - begin for one in groups.sections for _, begin, end in one.ranges)
        return sum(whole) // size
    in_all = sum(len(vector) for vector in weights.vectors)
    return in_all if isinstance(weights, LocalShards) else in_all // size


def _options(dials: Dials, weights: Weights, groups: Groups) -> GossipOptions:
    in_pairs = dials.communication == "ready_pairs"
    return GossipOptions(
        order=dials.effective_order,
        every=dials.gossip_every,
        wire_dtype=dials.wire_dtype,
        # The training thread waits anyway, so an exchange takes no time from it.
        cpu_share=1.0 if in_pairs else dials.cpu_share,
        max_staleness=dials.max_staleness,
        look_ahead=dials.looks_ahead,
        timeout=dials.timeout,
        chunk_elements=chunk_elements(weights, groups),
        part_elements=part_elements(weights, groups),
        in_pairs=in_pairs,
        max_wait=dials.max_wait,
    )
