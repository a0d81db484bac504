"""The life of one training job in one of its learners, whatever framework drives it.

A job begins when all learners have the same module, and ends in the consensus model or
with one message that names what failed. In between it averages around each optimizer
step. Nothing here knows a Trainer, a loop or an optimizer: `strategy` is the face of it
that Lightning sees.
"""

import atexit
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

from lightning_adpsgd.coordination.failures import FailureReport
from lightning_adpsgd.coordination.gather import gather_plain, number_from_learner_0
from lightning_adpsgd.coordination.groups import Groups, has_nccl, make_groups
from lightning_adpsgd.coordination.startup.checks import check_same_layout
from lightning_adpsgd.coordination.startup.linking import link
from lightning_adpsgd.coordination.store import Coordinator
from lightning_adpsgd.dials import Dials
from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.exchange import BEGINNING, Position
from lightning_adpsgd.islands.island import Island
from lightning_adpsgd.islands.rendezvous import Place
from lightning_adpsgd.mixing.communication import Communication
from lightning_adpsgd.mixing.consensus import Consensus, ConsensusModel
from lightning_adpsgd.mixing.rounds import RoundMixer
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.mixing.super_learner import Node
from lightning_adpsgd.mixing.synchronous import BehindGradient, synchronous
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.base import (
    DeviceTransport,
    DistributedTransport,
    Transport,
)
from lightning_adpsgd.transport.links import Credentials, LinkTransport
from lightning_adpsgd.weights.flat import FlatParameters
from lightning_adpsgd.weights.streams import side_stream, wait_for_stream
from lightning_adpsgd.weights.views import Ties

NAMESPACE = "lightning_adpsgd"
"""Prefix of the job's keys in the store, and its key in a checkpoint."""

END_OF_TRAINING = "end of training"
"""The meeting to which all learners come last."""

_BROADCAST_BYTES = 250 * 1024 * 1024


def has_peers(num_learners: int, super_learner_size: int) -> bool:
    """Whether there is more than one super-learner; says so once where there is not.

    Raises:
        ValueError: The learners do not form whole super-learners.
    """
    if num_learners % super_learner_size:
        raise ValueError(
            f"`super_learner_size` must divide the number of learners "
            f"{num_learners}, got {super_learner_size}"
        )
    if num_learners == super_learner_size and num_learners > 1:
        rank_zero_info(
            f"All {num_learners} learners form one super-learner, which is "
            "plain synchronous allreduce (ddp). To gossip, set "
            "`super_learner_size` to a proper divisor of "
            f"{num_learners}, or use several machines."
        )
    return num_learners > super_learner_size


def set_up_job(module: nn.Module, dials: Dials, super_learner_size: int) -> "Job":
    """Brings all learners together; a collective over the default process group.

    Afterwards the weights of the module are views of one vector per dtype, and those of
    learner 0 in every learner, as under DDP.

    Args:
        module: On its final device and in its final dtype.
        dials: How to average.
        super_learner_size: N, which divides the number of learners.

    Raises:
        ValueError: There is no such topology of that many super-learners, or the model
            cannot be flattened.
        StartUpError: The models of the learners differ, or links could not be made.
    """
    dials.topology.check_size(dist.get_world_size() // super_learner_size)
    flat = FlatParameters(module, shards=super_learner_size)
    rank, num_learners = dist.get_rank(), dist.get_world_size()
    store = _own_store(flat.device)
    layout = flat.layout()
    check_same_layout(store, rank, num_learners, layout, dials.start_patience)
    on_device = _mixes_on_device(dials, super_learner_size, flat.device)
    groups = make_groups(super_learner_size, dials.timeout, flat.device, on_device)
    _take_weights_of_learner_0(module)
    links = _make_links(dials, super_learner_size, store)
    ties = Ties(module, flat)
    coordinator = Coordinator(store, rank, num_learners, dials.timeout)
    coordinator.start()
    return Job(dials, super_learner_size, flat, ties, groups, store, coordinator, links)


def _make_links(dials: Dials, size: int, store: Store) -> LinkTransport | None:
    """What carries exchanges in the place of Gloo; none where Gloo does."""
    if dials.transport != "links" or dials.islands is not None:
        return None
    rank, num_learners = dist.get_rank(), dist.get_world_size()
    return link(
        PrefixStore("links", store),
        rank,
        num_learners,
        size,
        dials.topology.peers(rank // size, num_learners // size),
        dials.timeout,
        dials.start_patience,
    )


def _let_go_of_groups(process: int) -> None:
    """Ends the threads of Gloo before the interpreter does.

    One that frees the last tensor of a collective then needs Python, and torch aborts
    the process. A forked child shares the connections with its parent.
    """
    if os.getpid() == process and dist.is_initialized():
        dist.destroy_process_group()


def _mixes_on_device(dials: Dials, size: int, device: torch.device) -> bool:
    """Whether weights are mixed on the GPU, over NCCL, and not on the host, over Gloo.

    In "async" they are not: a receive of NCCL that waits for a peer occupies the GPU.
    Nor behind the gradients of learners that allreduce them meanwhile: two
    communicators at work at once may each wait for what the other holds.
    """
    at_boundary = dials.effective_order == "step_then_average"
    fits = dials.communication != "async" and (at_boundary or size == 1)
    return fits and has_nccl(device)


def by_super_learner(learners: list[Any], size: int) -> list[dict[str, Any]]:
    """What all learners keep, for a checkpoint: `own` of each, the rest of the first.

    Args:
        learners: By rank.
        size: N.
    """
    return [
        {
            **{name: value for name, value in first.items() if name != "own"},
            "learners": [one["own"] for one in learners[n * size : (n + 1) * size]],
        }
        for n, first in enumerate(learners[::size])
    ]


def learner_of(
    saved: list[Any], rank: int, num_learners: int, super_learner_size: int
) -> dict[str, Any] | None:
    """What `Job.gather_learners` kept of one learner.

    Returns:
        None where the job that saved had another S or N, which is said once.
    """
    size, num_super_learners = super_learner_size, num_learners // super_learner_size
    # Before version 0.2 a checkpoint kept nothing of each learner.
    sizes = [len(group.get("learners") or [None] * size) for group in saved]
    if sizes != [size] * num_super_learners:
        rank_zero_info(
            f"The checkpoint holds {len(saved)} super-learners of {max(sizes)} and "
            f"this job has {num_super_learners} of {size}: all start from their mean."
        )
        return None
    group, place = divmod(rank, size)
    own = (saved[group].get("learners") or [{}] * size)[place]
    return {**saved[group], "own": own}


@final
class Job:
    """One learner's part in a job; made by `set_up_job`, driven by the training thread.

    Between `start` and `finish` (or `fail`, or `close`) it communicates; before and
    after, `update` is a plain optimizer step and `meet` does nothing.

    Args:
        dials: How to average.
        super_learner_size: N.
        flat: The weights.
        ties: Of the module's weights to `flat`.
        groups: The process groups of this learner.
        store: Keys of this job alone, shared by all learners.
        coordinator: Watches already.
        links: What carries exchanges; none: `groups`.

    Attributes:
        on_reload: Called when the weights were replaced by those of a peer, because
            they had gone astray.
    """

    def __init__(
        self,
        dials: Dials,
        super_learner_size: int,
        flat: FlatParameters,
        ties: Ties,
        groups: Groups,
        store: Store,
        coordinator: Coordinator,
        links: LinkTransport | None = None,
    ) -> None:
        self._dials, self._super_learner_size = dials, super_learner_size
        self._links = links
        self.flat, self.groups, self._ties = flat, groups, ties
        self.store, self.coordinator = store, coordinator
        self._rank, self._num_learners = dist.get_rank(), dist.get_world_size()
        first = self._rank - self._rank % super_learner_size
        super_learner = list(range(first, first + super_learner_size))
        self.failures = FailureReport(coordinator, self._rank, super_learner)
        self._communication: Communication | None = None
        self._consensus: ConsensusModel | None = None
        self._statistics: Statistics | None = None
        self._restored_position: tuple[int, int] | None = None
        self._closed = False
        self._process = os.getpid()
        atexit.register(self._close_at_exit)
        self.on_reload: Callable[[], None] = lambda: None

    # --- what it is, and what it has done

    @property
    def running(self) -> bool:
        """Whether it communicates at present."""
        return self._communication is not None

    @property
    def asynchronous(self) -> bool:
        """Whether learners may be at different steps."""
        return self._dials.communication == "async"

    @property
    def island(self) -> Island | None:
        """Its part among islands; none before the start, and in one job."""
        communication = self._communication
        return communication if isinstance(communication, Island) else None

    @property
    def in_consensus(self) -> bool:
        """Whether the module holds the consensus model at present."""
        return self._consensus is not None and self._consensus.entered

    def statistics(self) -> Statistics | None:
        """What its communication has done; none before the start."""
        if self._communication is not None:
            self._statistics = self._communication.statistics()
        return self._statistics

    # --- from start to end

    def wrap(
        self,
        model: nn.Module,
        device_ids: list[int] | None,
        arguments: Mapping[str, Any],
    ) -> DistributedDataParallel:
        """DDP over the learners of this super-learner."""
        device = self.flat.device
        # On a stream of its own, as torch's notes on CUDA ask and Lightning does; what
        # is queued before and in it is done when its borders are crossed.
        wait_for_stream(device)
        with side_stream(device):
            wrapped = DistributedDataParallel(
                model,
                device_ids=device_ids,
                process_group=self.groups.gradients,
                **arguments,
            )
            wait_for_stream(device)
        return wrapped

    def start(self, position: Position = BEGINNING) -> Position | None:
        """Begins to communicate, from the weights as they are; again after `finish`.

        An island begins from the weights of those who are there, if there are any.

        Args:
            position: How far the training has come.

        Returns:
            How far those have come whose weights it took; none if it took none.

        Raises:
            RuntimeError: It is closed, or an island cannot reach the others.
        """
        if self._closed:
            raise RuntimeError(
                "this training has ended; set the module up once more to train on"
            )
        self._ties.renew()
        self.flat.check_views()
        communication = self._make_communication()
        if self._restored_position is not None:
            communication.go_on_from(*self._restored_position)
            self._restored_position = None
        island = communication if isinstance(communication, Island) else None
        self._consensus = ConsensusModel(
            self.flat,
            communication,
            self.coordinator,
            island.average if island is not None else None,
        )
        self._communication = communication
        self.coordinator.when_failed(communication.release)
        if island is not None:
            island.position = position
        communication.start()
        return island.started_from if island is not None else None

    def note(self, samples: int, epochs: int) -> Position | None:
        """What others are to know, and what they have made of this learner.

        Args:
            samples: Of the batch that begins.
            epochs: Completed.

        Returns:
            How far others have come whose weights it had to take up since.
        """
        return None if self.island is None else self.island.note(samples, epochs)

    @property
    def position(self) -> Position | None:
        """How far this island has come; none where it is not among any."""
        return None if self.island is None else self.island.position

    def depart(self) -> str | None:
        """Leaves the other islands in order, and keeps what they have given.

        Returns:
            A name that no other island has; none if it was not among any.
        """
        if (island := self.island) is None:
            return None
        island.depart()
        self._forget_communication()
        return island.name

    def ask_to_leave(self) -> None:
        """Lets all learners of this island come to one step; for a signal handler."""
        if self.island is not None:
            self.island.ask_to_leave()

    @property
    def leaves(self) -> bool:
        """Whether they are at that step; all learners find the same."""
        return self.island is not None and self.island.leaves

    def finish(self, occasion: str = END_OF_TRAINING) -> Consensus | None:
        """Ends in the consensus model, which stays in the module; all learners come.

        Returns:
            How far apart the super-learners were; none if it did not communicate.
        """
        if self._consensus is None or self._communication is None:
            return None
        self._ties.renew()
        with self.failures.named():
            consensus = self._consensus.enter(occasion)
            self._communication.stop()
        self._forget_communication()
        atexit.unregister(_let_go_of_groups)
        atexit.register(_let_go_of_groups, os.getpid())
        return consensus

    def fail(self, exception: BaseException) -> None:
        """Ends with an exception of this learner, and tells the others."""
        self.failures.announce(exception)
        if self._rank == 0:
            self.coordinator.linger(timedelta(seconds=1))
        self.abort()

    def abort(self) -> None:
        """Ends communication within seconds, without a peer's help; can be repeated."""
        if self._communication is not None:
            self._communication.abort()
        self._forget_communication()

    def close(self) -> None:
        """Lets go of everything, whether it ended well or not; waits for nobody."""
        atexit.unregister(self._close_at_exit)
        self.abort()
        if self._links is not None:
            self._links.close()
        self._closed = True
        self.coordinator.stop()

    def _close_at_exit(self) -> None:
        """Ends the threads: torch aborts a process at whose end they are in its code.

        A forked child has none of them, and shares the connections with its parent.
        """
        if os.getpid() == self._process:
            self.close()

    # --- the step

    def raise_if_failed(self) -> None:
        """Ends this learner if another has failed."""
        with self.failures.named():
            self.coordinator.raise_if_failed()

    def update(
        self,
        step: Callable[[Callable[[], Any]], Any],
        closure: Callable[[], Any],
    ) -> Any:
        """Takes an optimizer step, with the averages where the order has them.

        Args:
            step: An optimizer's `step`; calls the closure that it is given.
            closure: Computes the gradients.
        """
        communication = self._communication
        if communication is None:
            return step(closure)
        with self.failures.named():
            output = step(_AveragingClosure(closure, communication, self._ties))
            communication.after_update()
        return output

    # --- where all learners come

    def meet(self, name: str) -> None:
        """Waits until all learners have come; ends early if one of them fails."""
        if self.running:
            with self.failures.named():
                self.coordinator.meet(name)

    def meet_if_asynchronous(self, name: str) -> None:
        """Comes to a collective of all learners only when all have come.

        Learners that gossip asynchronously may be far apart, or on the way to another
        collective; here one can wait for long, and be told.
        """
        if self.asynchronous:
            self.meet(name)

    def renew_ties(self) -> None:
        """Takes up weights that were given other memory."""
        self._ties.renew()

    def enter_consensus(self, occasion: str) -> Consensus | None:
        """Puts the consensus model into the module; all learners come.

        Returns:
            How far apart the super-learners are; none if it does not communicate.
        """
        if self._consensus is None:
            return None
        self._ties.renew()
        with self.failures.named():
            return self._consensus.enter(occasion)

    def leave_consensus(self, adopt: bool) -> None:
        """Goes on from the local weights, or from the mean if it is adopted."""
        if self._consensus is not None:
            self._consensus.leave(adopt)

    # --- what a checkpoint keeps of each super-learner

    def gather_learners(
        self, optimizer_states: list[Any], own: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """All that the super-learners and their learners are made of; a collective.

        Args:
            optimizer_states: Equal within a super-learner.
            own: Of this learner alone; plain data.

        Returns:
            What `learner_of` takes, in the order of the super-learners, in learner 0;
            nothing elsewhere.
        """
        mine: dict[str, Any] = {"own": dict(own or {})}
        if self._rank % self._super_learner_size == 0:
            mine |= {"weights": self._local_weights(), "states": optimizer_states}
            mine |= {"position": self._position()}
        all_learners = gather_plain(mine, self.flat.device)
        return by_super_learner(all_learners or [], self._super_learner_size)

    @torch.no_grad()
    def restore_learner(self, learner: Mapping[str, Any]) -> None:
        """Takes up the weights and the round that `learner_of` gave."""
        for vector, weights in zip(self.flat.vectors, learner["weights"], strict=True):
            vector.copy_(weights)
        position = learner.get("position")
        if self._communication is None:
            self._restored_position = position
        elif position is not None:
            self._communication.go_on_from(*position)

    # --- private

    def _reloaded(self) -> None:
        # Behind a gradient, it was taken at the weights that are gone.
        for weight in self.flat.parameters():
            if weight.grad is not None:
                weight.grad.zero_()
        self.on_reload()

    def _position(self) -> tuple[int, int]:
        assert self._communication is not None
        return self._communication.step_and_round

    def _local_weights(self) -> list[Tensor]:
        kept = self._consensus.local_weights if self._consensus is not None else None
        return kept or self.flat.vectors

    def _forget_communication(self) -> None:
        self.statistics()
        self._communication = self._consensus = None

    def _make_communication(self) -> Communication:
        if self._dials.islands is not None:
            return self._make_island(self._dials.islands)
        dials, vectors = self._dials, self.flat.vectors
        transport = self._transport()
        node = Node(self.groups.shards)
        schedule = Schedule(
            dials.topology,
            self._num_learners // self._super_learner_size,
            dials.mixing_gain,
            dials.seed,
        )
        if dials.communication == "async":
            options = _options(dials, self._reloaded)
            lost_peer = self.failures.lost_peer
            return Gossip(vectors, transport, node, schedule, options, lost_peer)
        mixer = RoundMixer(
            vectors,
            transport,
            node,
            schedule,
            dials.timeout,
            max_reloads=dials.max_reloads,
            on_reload=self._reloaded,
        )
        if dials.communication == "sync":
            return synchronous(mixer, dials.effective_order, dials.gossip_every)
        return BehindGradient(mixer, dials.gossip_every)

    def _transport(self) -> Transport:
        if self._links is not None:
            return self._links
        carrier = DeviceTransport if self.groups.on_device else DistributedTransport
        return carrier(self.groups.counterparts)

    def _make_island(self, url: str) -> Island:
        dials = self._dials
        return Island(
            self.flat.vectors,
            Place.parse(url),
            Schedule(dials.topology, 1, dials.mixing_gain, dials.seed),
            _options(dials, self._reloaded),
            self.flat.layout(),
            Credentials.from_environment(os.environ),
            Node(self.groups.shards),
            PrefixStore("island", self.store),
        )


def _options(dials: Dials, on_reload: Callable[[], None]) -> GossipOptions:
    return GossipOptions(
        order=dials.effective_order,
        every=dials.gossip_every,
        wire_dtype=dials.wire_dtype,
        link_budget=dials.link_budget,
        cpu_share=dials.cpu_share,
        max_staleness=dials.max_staleness,
        timeout=dials.timeout,
        max_reloads=dials.max_reloads,
        on_reload=on_reload,
    )


class _AveragingClosure:
    """An optimizer's closure after which the average may be taken.

    LBFGS calls it several times a step; the average belongs to the first.
    """

    def __init__(
        self, closure: Callable[[], Any], communication: Communication, ties: Ties
    ) -> None:
        self._closure, self._communication, self._ties = closure, communication, ties
        self._first = True

    def __call__(self) -> Any:
        output = self._closure()
        self._ties.renew()
        if self._first:
            self._first = False
            self._communication.before_update()
        return output


def _take_weights_of_learner_0(module: nn.Module) -> None:
    world = dist.distributed_c10d._get_default_group()
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    _sync_module_states(module, world, _BROADCAST_BYTES, 0, ignored)


def _own_store(device: torch.device) -> Store:
    root = dist.distributed_c10d._get_default_store()
    # Each job of a process group has keys of its own.
    count = PrefixStore(NAMESPACE, root)
    run = count.add("runs", 1) if dist.get_rank() == 0 else 0
    return PrefixStore(f"{NAMESPACE}/{number_from_learner_0(run, device)}", root)
