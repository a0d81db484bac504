"""The strategy that Lightning sees: one class, three options.

`topology` says who averages with whom, `communication` when, and `super_learner_size`
how many learners allreduce their gradients and act as one. Each registered strategy
name stands for a setting of these three. Inside a super-learner, Lightning's DDP runs
on the process group of its learners; between them, `mixing` and `gossip` average.

An optimizer step goes from `optimizer_step` to `Job.update` in `job`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_adpsgd.coordination.failures import FailureReport
from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.strategy.checkpoints.contents import (
    EPOCH,
    WITHOUT_MEAN,
    Resumed,
    add_learners,
    place_in_epoch,
    plain,
    resumed_from,
    warn_of_lost_rest,
)
from lightning_adpsgd.strategy.checkpoints.file_names import keep_files_apart
from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO
from lightning_adpsgd.strategy.checkpoints.mid_epoch import PlaceInEpoch
from lightning_adpsgd.strategy.checkpoints.saving import (
    BackgroundCheckpointIO,
    apart,
    must_wait,
    only_warns,
)
from lightning_adpsgd.strategy.compatibility import (
    check_optimizers,
    explain_unused_parameters,
    forget_loader_without_iterator,
    refuse_unsupported,
)
from lightning_adpsgd.strategy.gradients import clip_on_all_meshes
from lightning_adpsgd.strategy.job import together
from lightning_adpsgd.strategy.launchers import connect_learners, launch_from_whole
from lightning_adpsgd.strategy.model_parallel import ModelParallelInside
from lightning_adpsgd.strategy.optimizer_reset import InitialState
from lightning_adpsgd.strategy.overrides import Overrides
from lightning_adpsgd.strategy.run import TrainingRun, set_up_run
from lightning_adpsgd.strategy.scope import ALONE
from lightning_adpsgd.strategy.signals import SharedStop, end_alone
from lightning_adpsgd.strategy.work_sharing import WorkSharing, prepare_training_loaders

_Broadcast = TypeVar("_Broadcast")
_Context = AbstractContextManager[None]


class HADPSGDStrategy(ModelParallelInside):
    """Hierarchical asynchronous decentralized parallel SGD (H-ADPSGD) and its variants.

    The learning rate is the one for the global batch (learners x local batch), because
    gradients are means; nothing is divided by the number of learners.

    During training, learner 0 writes checkpoints in the background, which takes one
    more copy of the checkpoint in host memory. `checkpoint_io.wait()` waits for the
    file. The constructor documents the arguments.

    Attributes:
        last_consensus: consensus distance at the last mean; None before the first.
    """

    _run: TrainingRun | None = None
    _place: PlaceInEpoch | None = None
    _resumed = Resumed()
    _initial_states: tuple[InitialState, ...] = ()
    _overrides: Overrides | None = None
    _stop: SharedStop | None = None
    _outside: FailureReport | None = None
    _statistics: Statistics | None = None
    last_consensus: Consensus | None = None

    # --- what it has done

    @property
    def work_sharing(self) -> WorkSharing | None:
        """The sharing of epochs; None with equal shares, and outside `fit`."""
        return self._run.work_sharing if self._run is not None else None

    def gossip_statistics(self) -> Statistics | None:
        """Counters of this learner's communication; None if nothing communicates."""
        return self._run.job.statistics() if self._run is not None else self._statistics

    # --- set-up and end

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        # Not undone: a launcher belongs to its strategy.
        Overrides().wrap(self._launcher, "launch", launch_from_whole)

    @override
    def setup_environment(self) -> None:
        self.set_world_ranks()
        connect = super().setup_environment
        self._outside = connect_learners(self, self.dials, connect)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if isinstance(self.checkpoint_io, WholeCheckpointIO | BackgroundCheckpointIO):
            self.checkpoint_io.hurry_if(self._ends_soon)
        gossips, self._overrides = self.check_peers(), Overrides()
        if trainer.state.fn != TrainerFn.FITTING:
            end_alone(trainer, self._overrides)
            super().setup(trainer)
            return
        keep_files_apart(trainer, self._overrides)
        if self.dials.tensor_parallel_size > 1:
            clip_on_all_meshes(self.precision_plugin, self._overrides)
        if self.dials.save_learners:
            self._place = place_in_epoch(trainer, self._resumed)
        if gossips:
            size, inside = max(self.partition.sizes), self.dials.inside
            refuse_unsupported(trainer, self, size, inside)
        elif self.world_size > 1:
            self._stop = SharedStop(trainer, self._overrides, self._together)
            if not self.is_sharded:
                prepare_training_loaders(trainer, None, self._place, self._overrides)
                super().setup(trainer)
                return
        with self._together("set-up"):
            self._set_up_without_ddp(trainer, self._overrides, gossips)

    def _together(self, collective: str, of_all: bool = True) -> _Context:
        """A context that explains why a collective fails; all its learners enter it."""
        job = self._run.job if self._run is not None else None
        return together(job, self._outside, collective, of_all)

    def _set_up_without_ddp(
        self, trainer: pl.Trainer, overrides: Overrides, gossips: bool
    ) -> None:
        """Does Lightning's set-up, with DDP only inside a super-learner."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        # Within a super-learner of one there is no batch-norm to synchronise.
        has_ddp = self.super_learner_size > 1 and not self.is_sharded
        if self._layer_sync is not None and has_ddp:
            self.model = self._layer_sync.apply(self.model)
        self.prepare_model()
        if gossips:
            self._run = set_up_run(trainer, self._resumed, self._reset_optimizers)
            self._run.adapt(overrides)
            if has_ddp:
                self.configure_ddp()
        # Before `configure_optimizers`, which may ask for the number of batches.
        sharing = self._run.sharing if self._run is not None else None
        prepare_training_loaders(trainer, sharing, self._place, overrides)
        self.setup_optimizers(trainer)
        if sharing is not None and sharing.default is not None:
            sharing.default.look_at_schedules()
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)
        if gossips:
            check_optimizers(self.optimizers)
            self._initial_states = tuple(map(InitialState, self.optimizers))

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        if self._run is None:
            return self._unfreezing.make(model, partial(super()._setup_model, model))
        return self._wrap(model, self._run.job, self.determine_ddp_device_ids())

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._place is not None:
            self._place.begin()
        resumed, self._resumed = self._resumed, Resumed()
        if self.work_sharing is None:
            warn_of_lost_rest(resumed)
        if self._run is not None:
            self._run.begin(resumed)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if isinstance(self.checkpoint_io, BackgroundCheckpointIO):
            self.checkpoint_io.wait()
            # Each learner may read a file as soon as `fit` has returned.
            self.barrier("the files are written")

    @override
    def on_exception(self, exception: BaseException) -> None:
        # First, because Lightning's own message recommends an option of its DDP.
        explain_unused_parameters(exception)
        forget_loader_without_iterator(self._trainer_or_none())
        super().on_exception(exception)
        # Before the first step and after the last one, others wait outside of the job.
        was_running = self._is_running
        if self._run is not None:
            self._run.fail(exception)
        if self._outside is not None and not was_running:
            self._outside.announce(exception)

    @override
    def teardown(self) -> None:
        try:
            if isinstance(self.checkpoint_io, BackgroundCheckpointIO):
                self.checkpoint_io.finish()
        finally:
            if self._run is not None:
                self._run.close()
                self._statistics = self._run.job.statistics()
            if self._overrides is not None:
                self._overrides.undo()
            if self._stop is not None:
                self._stop.tell_lightning()
            run, self._stop = self._run, None
            self._run = self._place = self._overrides = self._outside = None
            with suppress(AttributeError):  # it is made at its first use
                del self._unfreezing
            self._resumed, self._initial_states = Resumed(), ()
            super().teardown()
            if isinstance(self.checkpoint_io, BackgroundCheckpointIO):
                # SIGTERM keeps nothing that is to go after training has ended well.
                self.checkpoint_io.hurry_if(self._interrupted)
            # After Lightning has moved weights on a GPU to the CPU, out of the vectors.
            if run is not None:
                run.job.flat.release()

    # --- the step

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._run is not None:
            self._run.begin_batch(batch)
        if self._place is not None:
            self._place.count(batch)
        super().on_train_batch_start(batch, batch_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._run.scope.of_step() if self._run is not None else nullcontext():
            return super().training_step(*args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        closure = self._unfreezing.checked(optimizer, closure)
        if self._run is None:
            with self._together("allreduce of gradients"):
                return step(closure)
        output = self._run.job.update(step, closure)
        if self.work_sharing is not None:
            self.work_sharing.end_step()
        return output

    def _reset_optimizers(self) -> None:
        for state, one in zip(self._initial_states, self.optimizers, strict=True):
            state.restore(one)

    # --- evaluation and checkpoints: the consensus model

    @override
    def on_validation_end(self) -> None:
        if self._run is not None:
            self._run.job.leave_consensus(self.dials.adopts)
        super().on_validation_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the consensus model; all learners must call it.

        After a failure, when the other learners can no longer be asked, it is the state
        of the local weights.
        """
        run = self._run
        if run is None or not self._is_running or self._interrupted():
            return super().lightning_module_state_dict()
        within = run.job.in_consensus
        if not within:
            # With `save_learners`, the file holds local weights with all exchanges.
            run.enter("checkpoint", unmerged=not self.dials.save_learners)
        # What is written later, by a plugin that saves in the background, must not
        # change when the local weights come back.
        state = apart(super().lightning_module_state_dict())
        if not within:
            run.job.leave_consensus(adopt=False)
        return state

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        interrupted = self._interrupted()
        for name in {"optimizer_states", "lr_schedulers"} & checkpoint.keys():
            checkpoint[name] = plain(checkpoint[name])
        # Without optimizer states it is a file of weights, and no run resumes from it.
        whole = "optimizer_states" in checkpoint and not interrupted
        if self._place is not None and whole:
            job = self._run.job if self._run is not None else None
            add_learners(checkpoint, self._place, self, job)
        if self._run is not None and (names := self._run.job.flat.without_mean):
            checkpoint[WITHOUT_MEAN] = list(names)
        # Islands need not ask one another what is left.
        may_ask = not interrupted or self.dials.islands is not None
        if self.work_sharing is not None and may_ask:
            checkpoint[EPOCH] = self.work_sharing.state()
        if self.is_sharded:
            # The learners of an island leave the others at one step.
            departed = self._run is not None and self._run.job.has_departed
            all_come = departed or not interrupted
            self.save_shards(checkpoint, filepath, storage_options, all_come)
        elif not isinstance(files := self.checkpoint_io, BackgroundCheckpointIO):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero and must_wait(self._trainer_or_none(), filepath):
            with only_warns(self._interrupted):
                files.save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            files.save_in_background(checkpoint, filepath, storage_options)

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        trainer = self._trainer_or_none()
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self._resumed = resumed_from(checkpoint, self.global_rank, self.partition)

    # --- collectives and their scope

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._interrupted():
            return
        if self._run is not None and self._is_running:
            name = args[0] if args else kwargs.get("name")
            self._run.job.meet(str(name or "barrier"))
            return
        if self._run is not None and self._run.job.has_finished:
            # Without a limit of time, because a hook may take long in one learner.
            self._run.job.meet("barrier after training")
        # Learner 0 may end next, and the store of a meeting with it.
        with self._together("barrier"):
            super().barrier(*args, **kwargs)

    @override
    def reduce(
        self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean"
    ) -> Tensor:
        group = self._scope(group, "reduce")
        if group is ALONE:
            return tensor
        is_of_all = group is None and isinstance(tensor, Tensor)
        with self._together("reduce", is_of_all):
            return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False
    ) -> Tensor:
        group = self._scope(group, "all_gather")
        if group is ALONE:
            return tensor.unsqueeze(0)
        with self._together("all_gather", group is None):
            return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Callbacks decide for all learners, in hooks of a step to which all come.
        with self._run.scope.of_all() if self._run is not None else nullcontext():
            return super().reduce_boolean_decision(decision, all)

    @override
    def broadcast(self, obj: _Broadcast, src: int = 0) -> _Broadcast:
        with self._together("broadcast"):
            return super().broadcast(obj, src)

    def _scope(self, group: Any, operation: str) -> Any:
        return group if self._run is None else self._run.scope(group, operation)

    @property
    def _is_running(self) -> bool:
        return self._run is not None and self._run.job.running

    def _interrupted(self) -> bool:
        trainer = self._trainer_or_none()
        return trainer is not None and trainer.interrupted

    def _ends_soon(self) -> bool:
        """Whether an exception or SIGTERM ends this training; for any thread."""
        trainer, run = self._trainer_or_none(), self._run
        told = trainer is not None and trainer.received_sigterm
        told = told or (self._stop is not None and self._stop.is_told)
        return told or self._interrupted() or (run is not None and run.is_told_to_leave)

    def _trainer_or_none(self) -> pl.Trainer | None:
        return getattr(self.lightning_module, "_trainer", None)
