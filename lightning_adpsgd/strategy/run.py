"""One `fit` of learners that gossip: the job, and the Trainer's adaptations to it."""

import os.path
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, BinaryIO, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_adpsgd.dials import Dials
from lightning_adpsgd.epochs.claims import LearnerIndex
from lightning_adpsgd.gossip.protocol import Position
from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.strategy.checkpoints.contents import Resumed
from lightning_adpsgd.strategy.checkpoints.file_names import agree_on_names
from lightning_adpsgd.strategy.checkpoints.last_good import PREEMPTED
from lightning_adpsgd.strategy.checkpoints.own_folders import hold_folders
from lightning_adpsgd.strategy.checkpoints.saving import BackgroundCheckpointIO
from lightning_adpsgd.strategy.clocks import BatchEnd, describe_clocks, follow_clocks
from lightning_adpsgd.strategy.compatibility import (
    callbacks_of,
    refuse_callbacks_of_islands,
)
from lightning_adpsgd.strategy.default_sharing import (
    DefaultSharing,
    problem_of,
    shares_work,
)
from lightning_adpsgd.strategy.fast_forward import batch_size, catch_up
from lightning_adpsgd.strategy.garbage import without_old_objects
from lightning_adpsgd.strategy.job import Job
from lightning_adpsgd.strategy.overrides import Overrides
from lightning_adpsgd.strategy.scope import CollectiveScope
from lightning_adpsgd.strategy.set_up import set_up_job
from lightning_adpsgd.strategy.signals import handle_signals
from lightning_adpsgd.strategy.weight_callbacks import (
    average_copies,
    prune_together,
    transfer_in_consensus,
)
from lightning_adpsgd.strategy.work_sharing import WorkSharing

# By then Lightning has counted a step, even if gradients are accumulated.
_MANY_BATCHES = 100


@final
class TrainingRun:
    """A learner under a Trainer, from the set-up of its job to the end.

    Attributes:
        sharing: sharing of epochs, on which the learners may still have to decide;
            None: equal shares.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        job: Job,
        dials: Dials,
        sharing: WorkSharing | None,
    ) -> None:
        self._trainer, self._dials = trainer, dials
        self.job, self.sharing = job, sharing
        self.scope = CollectiveScope(trainer, job)
        self._batch_end: BatchEnd | None = None
        self._folders: list[BinaryIO] = []
        self._collections = ExitStack()
        self._begun: tuple[int, int] | None = None

    @property
    def work_sharing(self) -> WorkSharing | None:
        """The sharing of epochs; None if each learner has an equal share."""
        shares = self.sharing is not None and self.sharing.shares
        return self.sharing if shares else None

    @property
    def is_told_to_leave(self) -> bool:
        """Whether a learner of this island of several has received SIGTERM."""
        island = self.job.island
        return island is not None and island.engine.members.wants_to_leave

    def adapt(self, overrides: Overrides) -> None:
        """Replaces the parts of Lightning for which learners must be in lockstep."""
        trainer, job = self._trainer, self.job
        if self._dials.islands is not None:
            self._folders = hold_folders(trainer)
        for layer in trainer.lightning_module.modules():
            if isinstance(layer, torch.nn.SyncBatchNorm):
                layer.process_group = job.groups.gradients
        stop_together = self._dials.islands is not None and job.super_learner_size > 1
        handle_signals(trainer, job if stop_together else None, overrides)
        # Each learner has looked for the last checkpoint by itself.
        step = trainer._checkpoint_connector._loaded_checkpoint.get("global_step", 0)
        # Before `on_fit_start`, in which a `Timer` begins a collective.
        with job.failures.named():
            clocks = describe_clocks(trainer)
            job.coordinator.meet(
                f"set-up from step {step}, with these clocks: {clocks}"
            )
        self._batch_end = follow_clocks(trainer, job, overrides)
        epochs = trainer.fit_loop.epoch_loop
        overrides.wrap(epochs, "run", self._run_epoch)
        transfer_in_consensus(trainer, self.enter, job.adopt, overrides)
        prune_together(trainer, job, overrides)
        agree_on_names(trainer, overrides)
        overrides.wrap(trainer.fit_loop, "on_run_end", self._end)
        overrides.wrap(epochs.val_loop, "_on_evaluation_start", self._begin_validation)

    def begin(self, resumed: Resumed) -> None:
        """Starts training: the learners communicate from here on."""
        trainer, sharing = self._trainer, self.work_sharing
        self._collections.enter_context(without_old_objects())
        if resumed.learner is not None:
            self.job.restore_learner(resumed.learner)
        if trainer.received_sigterm:  # this learner has not joined the others yet
            raise SIGTERMException
        begun = Position(trainer.global_step, 0, trainer.current_epoch)
        if (position := self.job.start(begun, self._batch_end)) is not None:
            catch_up(trainer, position)
        if sharing is not None:
            sharing.begin()
        self._begun = trainer.global_step, self._num_changes()

    def begin_batch(self, batch: Any) -> None:
        """Starts a batch; raises if another learner has failed."""
        self.job.raise_if_failed()
        if self._trainer.fit_loop.total_batch_idx == _MANY_BATCHES:
            self._warn_of_own_steps()  # an epoch may last for hours
        if (island := self.job.island) is not None:
            samples = batch_size(batch) * self.job.partition.num_readers
            position = island.note(samples, self._trainer.current_epoch)
            if position is not None:
                catch_up(self._trainer, position)
        if self.work_sharing is not None:
            self.work_sharing.begin_batch()

    def _run_epoch(self, run: Callable[..., Any], data_fetcher: Any) -> Any:
        end = self._batch_end
        with end.epoch() if end is not None else nullcontext():
            return self.scope.run_epoch(run, data_fetcher)

    # --- the consensus model

    def enter(
        self, occasion: str, adopts: bool = False, unmerged: bool = False
    ) -> None:
        """Puts the consensus model into the module; all learners must call it."""
        if self.job.running:
            self._warn_of_own_steps()
            self._note(self.job.enter_consensus(occasion, adopts, unmerged))

    def _begin_validation(self, begin: Callable[..., None], *args: Any) -> None:
        # Before all hooks. A callback that swaps in an average of its own keeps the
        # weights that it finds, and puts them back: they must be the mean.
        for callback in callbacks_of(self._trainer, Callback):
            if (hook := getattr(callback, "on_consensus_start", None)) is not None:
                hook(self._trainer, self._trainer.lightning_module)
        self.enter("validation", self._dials.adopts)
        begin(*args)

    def _note(self, consensus: Consensus | None) -> None:
        strategy: Any = self._trainer.strategy
        strategy.last_consensus = consensus
        average_copies(self._trainer, self.job.partition)

    # --- the end

    def fail(self, exception: BaseException) -> None:
        """Ends after an exception in this learner, and tells the others."""
        # Now, because Lightning does not tear down if what follows raises.
        self._collections.close()
        try:
            if self.job.island is not None and isinstance(exception, SIGTERMException):
                self._leave_in_order()
        finally:
            self.job.fail(exception)

    def close(self) -> None:
        """Releases all resources, and waits for no learner."""
        self._collections.close()
        self.job.close(ends_ddp=True)
        if self.work_sharing is not None:
            self.work_sharing.leave()
        for folder in self._folders:
            folder.close()

    def _end(self, on_run_end: Any) -> None:
        checkpoint_io = self._trainer.strategy.checkpoint_io
        if isinstance(checkpoint_io, BackgroundCheckpointIO):
            checkpoint_io.wait()  # raises, because nothing else would tell of it
        if self.job.running:
            # Others may need what this island holds. What a job knows of the epoch is
            # saved by callbacks at the end, too.
            if self.work_sharing is not None and self.job.island is not None:
                self.work_sharing.leave()
            self._warn_of_own_steps()
            self._note(self.job.finish())
        on_run_end()

    def _num_changes(self) -> int:
        """How often the program has changed parameters; averages do not count."""
        return sum(weight._version for weight in self.job.flat.module.parameters())

    def _warn_of_own_steps(self) -> None:
        """Warns once of optimizer steps that Lightning does not see."""
        if self._begun is None or self._trainer.global_step != self._begun[0]:
            return
        if self._num_changes() != self._begun[1]:
            self._begun = None
            rank_zero_warn(
                "Weights have changed since training began, but `trainer.global_step` "
                "has not, and learners have exchanged nothing: return the optimizer "
                "from `configure_optimizers`, and step what `self.optimizers()` gives"
            )

    def _leave_in_order(self) -> None:
        if self.work_sharing is not None:
            self.work_sharing.leave()
        name = self.job.depart()
        folder = getattr(self._trainer.checkpoint_callback, "dirpath", None)
        # Not a `Path`, which would make one slash of the two in a URL.
        root = folder or self._trainer.default_root_dir
        path = os.path.join(root, f"{PREEMPTED}{name}.ckpt")
        # Before the save, because an error of the save is only a warning.
        rank_zero_info(f"This island has left the others, and saves {path}.")
        self._trainer.save_checkpoint(path)


def set_up_run(
    trainer: pl.Trainer,
    resumed: Resumed,
    on_reload: Callable[[], None],
) -> TrainingRun:
    """Makes the job of a Trainer's `fit`; a collective over all learners."""
    strategy: Any = trainer.strategy
    dials, partition = strategy.dials, strategy.partition
    if dials.islands is not None:
        refuse_callbacks_of_islands(trainer)
    asked, sharing = shares_work(trainer, dials), None
    kept_out = resumed.without_mean
    job = set_up_job(strategy.model, dials, partition, on_reload, kept_out)
    if asked is not False:
        rank = trainer.global_rank
        index = LearnerIndex(
            partition.super_learner(rank),
            partition.num_super_learners,
            partition.place(rank),
            job.super_learner_size,
        )
        problem = problem_of(trainer, dials, resumed)
        decides = None if asked else DefaultSharing(trainer, problem)
        rest, url = resumed.epoch, dials.islands
        sharing = WorkSharing(trainer, job, index, rest, url, decides)
    return TrainingRun(trainer, job, dials, sharing)
