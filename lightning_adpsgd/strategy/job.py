"""One training job in one of its learners, whichever framework drives it.

A job starts when all learners have the same module (`set_up`). It ends in the consensus
model, or with one message that names what failed. In between, `Job.update` surrounds
each optimizer step with averages. Nothing here knows a Trainer, a loop or an optimizer.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.nn.parallel import DistributedDataParallel

from lightning_adpsgd.coordination.failures import FailureReport
from lightning_adpsgd.coordination.groups import Groups, retire, retire_after
from lightning_adpsgd.coordination.store import Coordinator, Meanwhile
from lightning_adpsgd.dials import Dials
from lightning_adpsgd.gossip.protocol import BEGINNING, Position
from lightning_adpsgd.islands.island import Island
from lightning_adpsgd.mixing.communication import Communication, averaging_closure
from lightning_adpsgd.mixing.consensus import Consensus, ConsensusModel
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.strategy.engines import average_of, make_engine
from lightning_adpsgd.weights.flat import Weights, first_difference, same_order

NAMESPACE = "lightning_adpsgd"
"""The prefix of the job's keys in the store, and the job's key in a checkpoint."""

BUFFERS = "buffers"
"""The key, in a learner's part of a checkpoint, of the buffers that no average has."""

_AVERAGE = "an average of super-learners"
END_OF_TRAINING = "end of training"
"""The name of the last meeting of all learners."""

_LAST_TENSORS_S = 0.05


def _in_process(process: int, action: Callable[[], None]) -> None:
    # A forked child has the connections of its parent.
    if os.getpid() == process:
        action()


def _check_layout(saved: str | None, here: str) -> None:
    if saved is None or same_order(saved, here):
        return
    raise ValueError(
        "the checkpoint holds each learner's weights (`save_learners`) in the order of "
        f"another module: {first_difference(saved, here)}. Define the module as it was "
        "then, or load only the checkpoint's `state_dict`, without `ckpt_path`"
    )


def _destroy_groups() -> None:
    """Ends Gloo's threads before the interpreter exits.

    A thread that frees a collective's last tensor after the exit needs Python, and
    torch would abort the process.
    """
    if dist.is_initialized():
        # torch 2.6 joins the threads while it holds the interpreter lock: a thread that
        # is freeing its last tensor would wait forever.
        time.sleep(_LAST_TENSORS_S)
        dist.destroy_process_group()


@final
class Job:
    """One learner's part in a job, which `set_up_job` makes.

    The training thread drives it. It communicates between `start` and `finish` (or
    `fail`, or `close`). Before and after, `update` is a plain optimizer step.

    The training thread writes `_communication`. The coordinator's watch thread reads
    it, and releases peers when a learner has failed.

    No other job uses the `store`; `on_reload` is called after a peer's weights have
    replaced this learner's.

    Attributes:
        island: this learner's island; None before the start, and without `islands`.
        wrapped: module in DDP, if the super-learner has several learners.
        unfinished: error announced to the others if the process exits during training.
        closed: whether the job has ended for good.
        has_departed: whether this island has left the others with a goodbye.
    """

    def __init__(
        self,
        dials: Dials,
        flat: Weights,
        groups: Groups,
        store: Store,
        on_reload: Callable[[], None],
    ) -> None:
        self._dials, self.partition = dials, groups.partition
        self.flat, self.groups, self.store = flat, groups, store
        self._on_reload, self._num_reloads = on_reload, 0
        self._rank, num_learners = dist.get_rank(), dist.get_world_size()
        self.coordinator = Coordinator(
            store,
            self._rank,
            num_learners,
            dials.timeout,
            when_failed=self._release_peers,
        )
        own = [*self.partition.all_ranks[self.partition.super_learner(self._rank)]]
        self.super_learner_size = len(own)
        self.failures = FailureReport(self.coordinator, self._rank, own)
        self._meanwhile: Meanwhile | None = None
        self._communication: Communication | None = None
        self.island: Island | None = None
        self._consensus: ConsensusModel | None = None
        self._statistics: Statistics | None = None
        self._restored_position: tuple[int, int] | None = None
        self.wrapped: DistributedDataParallel | None = None
        self._broadcasts = False
        self.unfinished = RuntimeError("its process ended within training")
        self.closed = self.has_departed = self._has_started = False
        # Torch aborts a process that exits while threads run torch's code.
        self._at_exit = partial(_in_process, os.getpid(), self._end_at_exit)
        atexit.register(self._at_exit)

    # --- what it is, and what it has done

    @property
    def running(self) -> bool:
        """Whether the job communicates at present."""
        return self._communication is not None

    @property
    def has_finished(self) -> bool:
        """Whether all learners have ended in the consensus model."""
        return self.coordinator.has_ended

    @property
    def asynchronous(self) -> bool:
        """Whether learners may be at different steps."""
        return not self._dials.in_lockstep

    @property
    def in_consensus(self) -> bool:
        """Whether the module holds the consensus model at present."""
        return self._consensus is not None and self._consensus.entered

    def statistics(self) -> Statistics | None:
        """The counters of this learner's communication; None before the start."""
        if self._communication is not None:
            self._statistics = (self.island or self._communication).statistics()
        return self._statistics

    # --- from start to end

    def start(
        self, position: Position = BEGINNING, meanwhile: Meanwhile | None = None
    ) -> Position | None:
        """Starts to communicate, from the current weights, or again after `finish`.

        An island starts from the weights of the islands that are already training, if
        there are any, and returns their progress. `meanwhile` is work for this learner
        while it waits in a meeting.

        Raises:
            RuntimeError: The job is closed, or an island cannot reach the others.
        """
        if self.closed:
            raise RuntimeError(
                "this training has ended; set up the module again to continue training"
            )
        self.flat.rebind()
        self.flat.check_views()
        communication, island = make_engine(
            self._dials, self.flat, self.groups, self.store, self.failures.lost_peer
        )
        if self._restored_position is not None:
            communication.go_on_from(*self._restored_position)
            self._restored_position = None
        self._meanwhile = meanwhile
        self._consensus = ConsensusModel(
            self.flat,
            communication,
            partial(self.coordinator.meet, meanwhile=meanwhile),
            average_of(
                *(self.flat, self.groups, communication, island, self._dials.timeout)
            ),
        )
        self._communication, self.island = communication, island
        self._has_started = True
        self._num_reloads, self.coordinator.has_ended = 0, False
        if island is None:
            communication.start()
            return None
        with self.failures.named("the start of an island"):
            island.start(position)
        return island.started_from

    def depart(self) -> str:
        """Merges all exchanges, and leaves the other islands; returns the own name."""
        island = self.island
        assert island is not None
        island.depart()
        self._forget()
        self.has_departed = True
        return island.name

    def finish(self) -> Consensus | None:
        """Ends training and keeps the consensus model; all learners must call it."""
        if self._communication is None:
            return None
        consensus = self.enter_consensus(END_OF_TRAINING)
        # From here on no learner needs another, and any of them may end its process.
        self.coordinator.has_ended = True
        with self.failures.named():
            (self.island or self._communication).stop()
        self._forget()
        atexit.register(_in_process, os.getpid(), _destroy_groups)
        return consensus

    def fail(self, exception: BaseException) -> None:
        """Ends after an exception in this learner, and tells the others."""
        self.failures.announce(exception)
        if self._rank == 0:
            # The others read the reason in a store that ends with this process.
            self.coordinator.silent_learners()
        self._abort()

    def close(self, ends_ddp: bool = False) -> None:
        """Releases all resources, however training ended; waits for no learner."""
        atexit.unregister(self._at_exit)
        self._abort()
        groups = self.groups
        # After a failure, operations may be under way.
        if self.has_finished or not self._has_started:
            retire(*groups.counterparts, groups.shards, groups.tensor_parallel)
            if ends_ddp or self.wrapped is None:
                retire(groups.gradients)
            else:  # a module in DDP may be evaluated after its training
                retire_after(self.wrapped, groups.gradients)
        self.groups = Groups((), None, None, groups.on_device, groups.partition)
        self.closed, self.wrapped = True, None
        self._on_reload = lambda: None  # which may hold the module
        self.store = HashStore()
        self.coordinator.stop()

    def _end_at_exit(self) -> None:
        if self.running:
            # The interpreter sets it when an exception has ended the program. Lightning
            # tells no strategy of one if a callback raises in `on_exception`.
            self.fail(getattr(sys, "last_value", None) or self.unfinished)
        self.close()

    def _abort(self) -> None:
        """Ends communication within seconds, without a peer's help."""
        if self._communication is not None:
            (self.island or self._communication).abort()
        self._forget()

    def _release_peers(self) -> None:
        if (communication := self._communication) is not None:
            communication.release()

    def _forget(self) -> None:
        self.statistics()
        self._communication = self.island = self._consensus = self._meanwhile = None

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
        """Takes an optimizer step, with averages before or after it as `order` says."""
        if self._communication is None:
            return step(closure)
        # Alone in its super-learner, a learner has no DDP: an error in the closure is
        # the program's own.
        shares_gradients = self.super_learner_size > 1
        with self.failures.named() if shares_gradients else nullcontext():
            gradients = partial(self._compute, closure)
            output = step(averaging_closure(gradients, self._before_update))
        self.flat.rebind()
        with self.failures.named(_AVERAGE):
            self._communication.after_update()
        self._reset_if_reloaded()
        return output

    def _compute(self, closure: Callable[[], Any]) -> Any:
        output = closure()
        self.flat.rebind()
        return output

    def _before_update(self) -> None:
        assert self._communication is not None
        with self.failures.named(_AVERAGE):
            self._communication.before_update()
        self._reset_if_reloaded()

    def _reset_if_reloaded(self) -> None:
        """Drops gradients and optimizer state of weights that a reload replaced."""
        assert self._communication is not None
        if (num := self._communication.num_reloads) == self._num_reloads:
            return
        self._num_reloads = num
        for weight in self.flat.module.parameters():
            if weight.grad is not None:
                weight.grad.zero_()
        self._on_reload()

    # --- what all learners call

    def meet(self, name: str) -> None:
        """Waits until all learners have come; raises at once if one of them fails.

        In contrast to a collective, this wait has no time limit.
        """
        with self.failures.named(f"a meeting of all learners ({name})"):
            self.coordinator.meet(name, self._meanwhile)

    def enter_consensus(
        self, occasion: str, adopts: bool = False, unmerged: bool = False
    ) -> Consensus | None:
        """Puts the consensus model into the module; all learners must call it.

        Without communication it does nothing, and returns None.
        """
        if self._consensus is None:
            return None
        self.flat.rebind()
        with self.failures.named("the mean of all learners"):
            consensus = self._consensus.enter(occasion, adopts, unmerged)
        if (wrapped := self.wrapped) is not None and not self._broadcasts:
            # All have the mean's buffers, and one of them may evaluate it alone.
            self._broadcasts = wrapped.require_forward_param_sync
            wrapped.require_forward_param_sync = False
        self._reset_if_reloaded()
        return consensus

    def leave_consensus(self, adopt: bool) -> None:
        """Restores the local weights, or keeps the mean if `adopt` is set."""
        if self.in_consensus:
            assert self._consensus is not None
            self.flat.rebind()  # an evaluation may have gathered the mean's shards
            self._consensus.leave(adopt)
            if self.wrapped is not None:
                # Each learner has its own buffers again. After a forward without
                # gradients, DDP would not broadcast them in the next one.
                self.wrapped.require_forward_param_sync = self._broadcasts
                self._broadcasts = False

    def adopt(self, meeting: str) -> None:
        """Keeps what a program has put in place of the consensus model.

        All learners must call it. Once they have met, peers of those that are late
        already average with what these adopt, and not with their former weights.
        """
        if self.in_consensus:
            assert self._communication is not None
            self.flat.rebind()
            self._communication.set_aside(self.flat.vectors)
            self.meet(meeting)
            self.leave_consensus(adopt=True)

    # --- what a checkpoint holds of each super-learner

    def learner_state(self, optimizer_states: list[Any]) -> dict[str, Any]:
        """The state of a super-learner; empty except in its first learner."""
        if self.partition.place(self._rank):
            return {}
        communication, consensus = self._communication, self._consensus
        self.flat.rebind()  # as `leave_consensus` does, and training continues from it
        kept = None
        if consensus is not None and not consensus.adopts:
            kept = consensus.local_weights()
        return {
            "weights": kept or self.flat.vectors,
            "layout": self.flat.layout(),
            "states": optimizer_states,
            # None after the end, where all learners hold the consensus model.
            "position": communication and communication.step_and_round,
        }

    @torch.no_grad()
    def restore_learner(self, learner: Mapping[str, Any]) -> None:
        """Restores weights, buffers and round of a checkpoint's super-learner.

        Before `start`, the round is kept for it.

        Raises:
            ValueError: The module has other weights, or the same in another order.
        """
        # A learner without peers had no weights of its own to save.
        if saved := learner.get("weights"):
            # Up to version 0.2 a checkpoint had no layout.
            _check_layout(learner.get("layout"), self.flat.layout())
            for vector, weights in zip(self.flat.vectors, saved, strict=True):
                vector.copy_(weights)
        buffers = self.flat.own_tensors()
        # Up to version 0.2 all learners restored the buffers of learner 0.
        for name, values in learner.get("own", {}).get(BUFFERS, {}).items():
            if name in buffers and buffers[name].shape == values.shape:
                buffers[name].copy_(values)
        position = learner.get("position")
        if self._communication is None:
            self._restored_position = position
        elif position is not None:
            self._communication.go_on_from(*position)


def together(
    job: Job | None, outside: FailureReport | None, collective: str, of_all: bool = True
) -> AbstractContextManager[None]:
    """A context that explains why a collective fails; all its learners enter it.

    Args:
        job: the job, if there is one.
        outside: report of failures while no job communicates; None: a single learner.
        collective: its name.
        of_all: whether it is over all learners, who then meet before it.
    """
    if job is not None and job.running:
        outside = job.failures
        if of_all and job.asynchronous:
            job.meet(collective)
    named = f"{collective} of {'all' if of_all else 'some'} learners"
    return nullcontext() if outside is None else outside.named(named)
