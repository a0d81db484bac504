"""The engine that averages the weights of a job, as its dials ask for it."""

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_adpsgd.coordination.groups import Groups, has_nccl
from lightning_adpsgd.dials import Dials
from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.protocol import Position
from lightning_adpsgd.islands.island import Island
from lightning_adpsgd.islands.rendezvous import RendezvousAddress
from lightning_adpsgd.mixing.communication import Communication, Exchanges
from lightning_adpsgd.mixing.consensus import (
    Average,
    Consensus,
    average_buffers,
    average_shards,
)
from lightning_adpsgd.mixing.rounds import RoundMixer
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.mixing.synchronous import delay_by_one, synchronous
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.links import Credentials
from lightning_adpsgd.transport.process_group import (
    DeviceTransport,
    DistributedTransport,
)
from lightning_adpsgd.weights.flat import FlatParameters, Weights
from lightning_adpsgd.weights.shards import LocalShards, is_sharded

# Two exchanges at a time have twelve messages in memory: an eighth of the shards.
_MESSAGES_OF_SHARDS, _SHORTEST_MESSAGE = 96, 1 << 15


class Engine(NamedTuple):
    """What averages the weights of one learner with those of others.

    Attributes:
        communication: averaging, as the training thread drives it.
        exchanges: what goes on beside the training thread; None in rounds.
        island: this learner's part among islands; None in one job.
    """

    communication: Communication
    exchanges: Exchanges | None = None
    island: Island | None = None

    def start(self, position: Position) -> Position | None:
        """Begins to communicate; gives where those are whose weights an island took."""
        if self.island is None:
            self.communication.start()
            return None
        self.island.start(position)
        return self.island.started_from

    def stop(self) -> None:
        """Ends cleanly: peers are told, threads joined."""
        (self.island or self.communication).stop()

    def abort(self) -> None:
        """Ends within seconds, without a peer's help."""
        (self.island or self.communication).abort()

    def statistics(self) -> Statistics:
        """What was done so far."""
        return (self.island or self.communication).statistics()


def weights_of(module: nn.Module, dials: Dials, super_learner_size: int) -> Weights:
    """The weights of a module as the engine reads them.

    Raises:
        ValueError: The module cannot be flattened, or is not sharded as it must be.
    """
    has_shards = super_learner_size > 1 or is_sharded(module)
    if dials.inside == "model_parallel" and has_shards:
        return LocalShards(module, super_learner_size)
    return FlatParameters(module, super_learner_size, dials.exchange_frozen)


def average_of(
    weights: Weights, groups: Groups, island: Island | None
) -> Average | None:
    """What takes the mean over all super-learners; None: a mean over all learners."""
    if island is not None:
        return partial(_average_island, island, weights, groups)
    if not isinstance(weights, LocalShards):
        return None
    return partial(
        average_shards,
        counterparts=groups.counterparts,
        num_buffers=weights.num_buffers,
    )


def _average_island(
    island: Island,
    weights: Weights,
    groups: Groups,
    vectors: list[Tensor],
    trained: list[Tensor],
) -> Consensus:
    consensus = island.average(vectors, trained)
    if isinstance(weights, LocalShards) and groups.gradients is not None:
        # Nothing else makes them equal inside an island.
        average_buffers(vectors, weights.num_buffers, groups.gradients)
    return consensus


def _super_learner(weights: Weights, groups: Groups) -> SuperLearnerGroup:
    holds_all = not isinstance(weights, LocalShards)
    return SuperLearnerGroup(groups.shards, holds_all)


def mixes_on_device(dials: Dials, size: int, device: torch.device) -> bool:
    """Whether weights are mixed on the GPU, over NCCL, and not on the host, over Gloo.

    In lockstep alone: a receive of NCCL that waits for a peer occupies the GPU.
    Nor behind the gradients of learners that allreduce them meanwhile: two
    communicators at work at once may each wait for what the other holds.
    """
    at_boundary = dials.effective_order == "step_then_average"
    fits = dials.in_lockstep and (at_boundary or size == 1)
    return fits and has_nccl(device)


def make_engine(
    dials: Dials,
    flat: Weights,
    groups: Groups,
    store: Store,
    lost_peer: Callable[[str], None],
) -> Engine:
    """Makes the engine, which is not started yet."""
    if dials.islands is not None:
        island = _make_island(dials, dials.islands, flat, groups, store)
        return Engine(island.engine, island.engine, island)
    schedule = Schedule(
        dials.topology,
        dist.get_world_size(groups.counterparts),
        dials.mixing_gain,
        dials.seed,
    )
    if dials.in_lockstep:
        return Engine(_make_rounds(dials, flat, groups, schedule))
    gossip = Gossip(
        flat.vectors,
        DistributedTransport(groups.counterparts),
        _super_learner(flat, groups),
        Members.fixed(schedule, dist.get_rank(groups.counterparts)),
        _options(dials, flat),
        lost_peer,
    )
    return Engine(gossip, gossip)


def _make_rounds(
    dials: Dials, flat: Weights, groups: Groups, schedule: Schedule
) -> Communication:
    carrier = DeviceTransport if groups.on_device else DistributedTransport
    mixer = RoundMixer(
        flat.vectors,
        carrier(groups.counterparts),
        _super_learner(flat, groups),
        schedule,
        dials.timeout,
        chunk_elements(flat),
    )
    if dials.communication == "sync":
        return synchronous(mixer, dials.effective_order, dials.gossip_every)
    return delay_by_one(mixer, dials.gossip_every)


def _make_island(
    dials: Dials, url: str, flat: Weights, groups: Groups, store: Store
) -> Island:
    return Island(
        flat.vectors,
        RendezvousAddress.parse(url),
        Schedule(dials.topology, 1, dials.mixing_gain, dials.seed),
        _options(dials, flat),
        flat.layout(),
        Credentials.from_environment(os.environ),
        _super_learner(flat, groups),
        PrefixStore("island", store),
    )


def chunk_elements(weights: Weights) -> int:
    """Elements of a message; of shards few enough that they take little beside them."""
    if not isinstance(weights, LocalShards):
        return GossipOptions.chunk_elements
    in_all = sum(len(vector) for vector in weights.vectors)
    fitting = max(in_all // _MESSAGES_OF_SHARDS, _SHORTEST_MESSAGE)
    return min(fitting, GossipOptions.chunk_elements)


def _options(dials: Dials, weights: Weights) -> GossipOptions:
    in_pairs = dials.communication == "ready_pairs"
    return GossipOptions(
        order=dials.effective_order,
        every=dials.gossip_every,
        wire_dtype=dials.wire_dtype,
        link_budget=dials.link_budget,
        # The training thread waits, so that an exchange takes nothing from it.
        cpu_share=1.0 if in_pairs else dials.cpu_share,
        max_staleness=dials.max_staleness,
        timeout=dials.timeout,
        chunk_elements=chunk_elements(weights),
        max_reloads=dials.max_reloads,
        in_pairs=in_pairs,
        max_wait=dials.max_wait,
    )
