"""The strategy that Lightning sees: one class, three dials.

`topology` says who averages with whom, `communication` when (at the step boundary,
hidden behind the next gradient, or asynchronously), `super_learner_size` how many
learners allreduce their gradients and count as one. The registered names are settings
of these. Inside a super-learner this is Lightning's DDP on the process group of its
learners; between super-learners the engines of `mixing` and `gossip` do the work. `job`
has the life of a job; here are Lightning's hooks into it.
"""

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_adpsgd.coordination.gather import gather_plain
from lightning_adpsgd.coordination.startup.checks import Seats, check_start, open_store
from lightning_adpsgd.dials import (
    DEFAULT_TIMEOUT,
    CommunicationName,
    Dials,
    TransportName,
)
from lightning_adpsgd.epochs.claims import Place
from lightning_adpsgd.gossip.exchange import Position
from lightning_adpsgd.islands.rendezvous import ENVIRONMENT_VARIABLE
from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.strategy import clocks, pruning, signals, weight_averaging
from lightning_adpsgd.strategy.checkpoints import last_good
from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO
from lightning_adpsgd.strategy.checkpoints.mid_epoch import PlaceInEpoch
from lightning_adpsgd.strategy.checkpoints.saving import SaveThread, uploads_checkpoints
from lightning_adpsgd.strategy.compatibility import (
    check_ddp_arguments,
    check_island,
    refuse_unsupported,
    refuse_with_work_sharing,
)
from lightning_adpsgd.strategy.fast_forward import batch_size, catch_up
from lightning_adpsgd.strategy.job import (
    NAMESPACE,
    Job,
    by_super_learner,
    has_peers,
    learner_of,
    set_up_job,
)
from lightning_adpsgd.strategy.optimizer_reset import FreshState
from lightning_adpsgd.strategy.work_sharing import WorkSharing
from lightning_adpsgd.topology.named import TopologyLike, find_topology

_EPOCH = f"{NAMESPACE}/epoch"
"""What a checkpoint keeps of a shared epoch."""

_SAMPLES = f"{NAMESPACE}/samples"
"""In a checkpoint: samples that all learners together have trained on."""

_Broadcast = TypeVar("_Broadcast")

# The scope of a collective in a super-learner of one.
_ALONE = object()

# In these hooks an asynchronous learner is on its own: others are at other steps.
_HOOKS_OF_A_STEP = frozenset(
    {
        "training_step",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_batch_transfer",
        "on_after_batch_transfer",
        "on_before_backward",
        "backward",
        "on_after_backward",
        "on_before_zero_grad",
        "optimizer_zero_grad",
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "optimizer_step",
        "lr_scheduler_step",
    }
)


class HADPSGDStrategy(DDPStrategy):
    """Hierarchical asynchronous decentralized parallel SGD, and its whole family.

    The learning rate is the one for the global batch (learners x local batch):
    gradients are means, and nothing is divided by the number of learners.

    Args:
        topology: Name of a topology (`lightning_adpsgd.topology.named.TOPOLOGIES`), or one of
            your own: a mixing matrix, several matrices or matchings that take turns, or
            a function (`find_topology`).
        communication: "sync": the average is taken at the step boundary and everyone
            waits. "delay_by_one": it is hidden behind one gradient. "async": nobody
            waits for anybody.
        super_learner_size: Learners that allreduce gradients; "node" for those of one
            machine. Must divide the number of learners.
        order: Whether the average comes after the optimizer step or between gradient
            and step; by default after. "delay_by_one" is the latter by construction.
        mixing_gain: gamma, 0 < gamma <= 1: how much of each average is taken.
        gossip_every: Optimizer steps per round of averaging.
        wire_dtype: What travels in "async": a floating-point type, or `torch.int8` for
            one byte a number on a lattice; averages are taken in float32.
        link_budget: In "async", bytes per second that a learner sends on average.
        cpu_share: In "async", what exchanges may take of a learner's processor time,
            if that is more than what a hundredth of the training's time pays for, as
            on idle cores or a GPU; 1: there is no bound.
        transport: In "async", what carries exchanges: "gloo", or "links", TCP
            connections of its own that take less of the cores. Islands use links.
        max_staleness: In "async", steps after which a learner without a completed
            exchange waits for one; none: it never waits.
        max_reloads: How often a super-learner whose weights turn infinite, not a number
            or, in "async", far too large goes on from those of its peers, with a fresh
            optimizer, before it ends with an error; none: it goes on as it is, and its
            peers leave it out.
        after_evaluation: "restore" puts the local weights back after an evaluation of
            the mean, "adopt" goes on from the mean.
        save_learners: Whether a checkpoint also holds what each learner is made of, so
            that a resume with as many goes on exactly: weights, optimizer state,
            schedules, generators, place in the epoch, round of gossip.
        save_in_background: Whether training goes on while learner 0 writes a
            checkpoint, at the cost of one more copy of it in the host's memory; for
            callbacks the file is there when the next save begins, or the training ends.
        seed: For topologies drawn at random; the same in all learners.
        timeout: For how long a peer may say nothing before it counts as lost, and of
            every collective; by default 5 minutes, and 30 for those of Lightning.
        work_sharing: In "async", whether an epoch is a pool from which every learner
            takes batches as fast as it can, each sample once, with `islands` over all
            islands; otherwise all learners get equal shares, and each island draws on
            its own.
        islands: Where islands find one another, ``tcp://host:port`` or
            ``tcp://host:port/job``: this job is then one super-learner, which others
            join and leave as they come and go (docs/islands.md). By default what the
            environment's LIGHTNING_ADPSGD_ISLANDS says; none: all super-learners are in
            one job.
        start_method: How Lightning launches the learners of a machine.
        **ddp: What Lightning's `DDPStrategy` takes; options of DDP itself apply inside
            a super-learner.

    Raises:
        ValueError: A value is out of its bounds.
    """

    def __init__(
        self,
        topology: TopologyLike = "ring",
        communication: CommunicationName = "async",
        super_learner_size: int | Literal["node"] = "node",
        *,
        order: Order | None = None,
        mixing_gain: float = 1.0,
        gossip_every: int = 1,
        wire_dtype: torch.dtype | None = None,
        link_budget: float | None = None,
        cpu_share: float = 0.05,
        transport: TransportName = "gloo",
        max_staleness: int | None = None,
        max_reloads: int | None = 3,
        after_evaluation: Literal["restore", "adopt"] = "restore",
        save_learners: bool = False,
        save_in_background: bool = True,
        seed: int = 0,
        timeout: timedelta | None = None,
        work_sharing: bool = False,
        islands: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp: Any,
    ) -> None:
        patience = default_pg_timeout if timeout is None else timeout
        super().__init__(timeout=patience, start_method=start_method, **ddp)
        self._dials = Dials(
            topology=find_topology(topology),
            communication=communication,
            super_learner_size=super_learner_size,
            order=order,
            mixing_gain=mixing_gain,
            gossip_every=gossip_every,
            wire_dtype=wire_dtype,
            link_budget=link_budget,
            cpu_share=cpu_share,
            transport=transport,
            max_staleness=max_staleness,
            max_reloads=max_reloads,
            after_evaluation=after_evaluation,
            save_learners=save_learners,
            seed=seed,
            timeout=DEFAULT_TIMEOUT if timeout is None else timeout,
            work_sharing=work_sharing,
            islands=islands or os.environ.get(ENVIRONMENT_VARIABLE) or None,
        )
        check_ddp_arguments(self._ddp_kwargs)
        self._job: Job | None = None
        self._work_sharing: WorkSharing | None = None
        self._saved_epoch: Mapping[str, Any] | None = None
        self._decides = False
        self._saved_learner: Mapping[str, Any] | None = None
        self._saved_samples = 0
        self._place: PlaceInEpoch | None = None
        self._statistics: Statistics | None = None
        self._saves_in_background = save_in_background
        self._save_thread = SaveThread()
        self._fresh: list[FreshState] = []
        self.last_consensus: Consensus | None = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Names are registered by `lightning_adpsgd.registration`."""

    # --- the shape of the job

    @property
    def super_learner_size(self) -> int:
        """N, the learners of each super-learner."""
        size = self._dials.super_learner_size
        if not isinstance(size, str):
            return size
        return self.num_processes if self._dials.islands is None else self.world_size

    @property
    def num_super_learners(self) -> int:
        """S."""
        return self.world_size // self.super_learner_size

    @property
    def dials(self) -> Dials:
        """The settings that it was made with, checked."""
        return self._dials

    @property
    def work_sharing(self) -> WorkSharing | None:
        """How the epochs are shared; none without `work_sharing` or outside `fit`."""
        return self._work_sharing

    def gossip_statistics(self) -> Statistics | None:
        """What this learner's communication has done; none if nothing communicates."""
        return self._job.statistics() if self._job is not None else self._statistics

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoints; by default `WholeCheckpointIO`."""
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            # Kept if the user has given it one.
            self._checkpoint_io.checkpoint_io = WholeCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    # --- set-up and end

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        last_good.choose_when_launched(self._launcher)

    @override
    def setup_environment(self) -> None:
        self.set_world_ranks()
        # Kept until torch has its own connection, which then shares the listener.
        store = self._check_start() if self.world_size > 1 else None
        super().setup_environment()
        del store

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        gossips = self._has_peers()
        alone = self.world_size == 1
        if trainer.state.fn == TrainerFn.FITTING and self._dials.save_learners:
            # Before optimizers, which may ask for the number of batches.
            self._keep_place(trainer)
        if trainer.state.fn != TrainerFn.FITTING or not (gossips or alone):
            super().setup(trainer)
            return
        if gossips:
            refuse_unsupported(trainer, self, self.super_learner_size, self._given())
        if gossips and self._shares_work(trainer):
            refuse_with_work_sharing(trainer)
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        # Within a super-learner of one, batch-norm is synchronised as it is.
        if self._layer_sync is not None and self.super_learner_size > 1:
            self.model = self._layer_sync.apply(self.model)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if gossips:
            self._join_job(trainer, self.model)
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)
        self._fresh = [FreshState(optimizer) for optimizer in self.optimizers]
        if self._job is not None:
            self._job.on_reload = self._begin_optimizers_anew

    def _begin_optimizers_anew(self) -> None:
        for state in self._fresh:
            state.restore()

    def _has_peers(self) -> bool:
        if self._dials.islands is None:
            return has_peers(self.world_size, self.super_learner_size)
        check_island(self.super_learner_size, self.world_size)
        return True

    def _join_job(self, trainer: pl.Trainer, model: torch.nn.Module) -> None:
        self._job = set_up_job(model, self._dials, self.super_learner_size)
        if self._shares_work(trainer):
            # Before optimizers, which may ask for the number of batches.
            self._work_sharing = self._share_work(trainer, self._job)
        for layer in model.modules():
            if isinstance(layer, torch.nn.SyncBatchNorm):
                layer.process_group = self._job.groups.gradients
        if self.super_learner_size > 1:
            self.configure_ddp()
        if self._dials.islands is not None and self.super_learner_size > 1:
            signals.handle_together(trainer, self._job)
        else:
            signals.handle_locally(trainer)
        if self._job.asynchronous:
            clocks.follow(trainer, self._job)
        else:
            clocks.follow_together(trainer)
        weight_averaging.transfer_in_consensus(
            trainer, self._enter_consensus, self._job.leave_consensus
        )
        pruning.prune_together(trainer, self._job)
        vars(trainer.fit_loop)["on_run_end"] = partial(self._end_run, trainer)

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        if self._job is None:
            return super()._setup_model(model)
        return self._job.wrap(model, self.determine_ddp_device_ids(), self._ddp_kwargs)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._place is not None:
            self._place.begin()
        saved, self._saved_learner = self._saved_learner, None
        if self._job is None:
            return
        if saved is not None:
            self._job.restore_learner(saved)
        if self._work_sharing is not None:
            self._work_sharing.check_loaders()
        trainer = self._trainer_or_none()
        assert trainer is not None
        begun = Position(trainer.global_step, 0, trainer.current_epoch)
        if (position := self._job.start(begun)) is not None:
            catch_up(trainer, position)
        if self._work_sharing is not None:
            self._work_sharing.begin()

    def _end_run(self, trainer: pl.Trainer) -> None:
        """Ends in the consensus model before any hook sees the end of training."""
        self._save_thread.wait()
        if self._job is not None and self._job.running:
            if self._work_sharing is not None:
                self._work_sharing.leave()
            self.last_consensus = self._job.finish()
            weight_averaging.average_copies(trainer)
        type(trainer.fit_loop).on_run_end(trainer.fit_loop)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._job is None:
            return
        if self._dials.islands is not None and isinstance(exception, SIGTERMException):
            self._leave_in_order(self._job)
        self._job.fail(exception)

    def _leave_in_order(self, job: Job) -> None:
        """Keeps what others have given, and saves what would otherwise be lost."""
        if self._work_sharing is not None:
            self._work_sharing.leave()
        trainer, name = self._trainer_or_none(), job.depart()
        if trainer is not None and name is not None:
            path = signals.save(trainer, f"preempted-{name}")
            rank_zero_info(f"This island has left the others and saved {path}.")

    @override
    def teardown(self) -> None:
        try:
            self._stop_saving()
        finally:
            self._tear_down()

    def _tear_down(self) -> None:
        if self._job is not None:
            self._job.close()
            self._statistics = self._job.statistics()
            self._job = None
        for installed in (self._place, self._work_sharing):
            if installed is not None:
                installed.remove()
        self._work_sharing = self._place = None
        trainer = self._trainer_or_none()
        if trainer is not None:
            signals.restore(trainer)
            clocks.restore(trainer)
            weight_averaging.restore(trainer)
            pruning.restore(trainer)
            vars(trainer.fit_loop).pop("on_run_end", None)
        self._fresh.clear()
        super().teardown()

    def _stop_saving(self) -> None:
        """Waits until all is on the disk; an error of it hides none of the training."""
        try:
            self._save_thread.stop()
        except Exception as error:
            if not self._interrupted():
                raise
            rank_zero_warn(str(error))

    # --- the step

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._job is not None:
            self._job.raise_if_failed()
            if self._dials.islands is not None:
                self._note(batch)
        if self._work_sharing is not None:
            self._work_sharing.begin_batch()
        if self._place is not None:
            self._place.count(batch)
        super().on_train_batch_start(batch, batch_idx)

    @override
    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return step(closure) if self._job is None else self._job.update(step, closure)

    # --- evaluation and checkpoints: the consensus model

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._enter_consensus("validation")

    @override
    def on_validation_end(self) -> None:
        if self._job is not None:
            self._job.leave_consensus(self._dials.after_evaluation == "adopt")
        super().on_validation_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The consensus model; called by all learners, as Lightning does.

        After a failure, when the others can no longer be asked, the local weights.
        """
        job = self._job
        if job is None or not job.running or self._interrupted():
            return super().lightning_module_state_dict()
        if job.in_consensus:
            return self._cloned_state_dict()
        self._enter_consensus("checkpoint")
        state = self._cloned_state_dict()
        job.leave_consensus(adopt=False)
        return state

    def _enter_consensus(self, occasion: str) -> None:
        if self._job is None or not self._job.running:
            return
        self.last_consensus = self._job.enter_consensus(occasion)
        if self.lightning_module is not None:
            weight_averaging.average_copies(self.lightning_module.trainer)

    def _cloned_state_dict(self) -> dict[str, Any]:
        # What is written later, by a plugin that saves in the background, must not
        # change when the local weights come back.
        return {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in super().lightning_module_state_dict().items()
        }

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        # Without optimizer states it is a file of weights, and nobody resumes from it.
        whole = "optimizer_states" in checkpoint and not self._interrupted()
        if self._place is not None and whole:
            learners = self._all_learners(checkpoint, self._place)
            checkpoint[NAMESPACE] = learners
            own = (one for group in learners for one in group["learners"])
            checkpoint[_SAMPLES] = sum(one["place"]["num_samples"] for one in own)
        # Islands need not ask one another what is left.
        may_ask = not self._interrupted() or self._dials.islands is not None
        if self._work_sharing is not None and may_ask:
            checkpoint[_EPOCH] = self._work_sharing.state()
        if not self._writes_beside(filepath):
            self._drain()
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            save = self.checkpoint_io.save_checkpoint
            write = partial(save, path=filepath, storage_options=storage_options)
            self._save_thread.save(checkpoint, filepath, write)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._drain()
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        # Not before what takes its place is on the disk.
        if self.is_global_zero:
            remove = self.checkpoint_io.remove_checkpoint
            self._save_thread.afterwards(partial(remove, filepath))

    def _writes_beside(self, filepath: Any) -> bool:
        trainer = self._trainer_or_none()
        running = TrainerFn.FITTING, TrainerStatus.RUNNING
        # Who saves after the training reads the file at once.
        if trainer is None or (trainer.state.fn, trainer.state.status) != running:
            return False
        if self._interrupted() or not self._saves_in_background:
            return False
        # Of SLURM's checkpoint the job's end is next, and some loggers read the file.
        at_signal = os.path.basename(filepath).startswith("hpc_ckpt_")
        return not (at_signal or uploads_checkpoints(trainer.loggers))

    def _drain(self) -> None:
        if self._interrupted():
            self._stop_saving()
        else:
            self._save_thread.wait()

    @override
    def load_model_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True
    ) -> None:
        super().load_model_state_dict(checkpoint, strict)
        self._saved_epoch = checkpoint.get(_EPOCH)
        self._saved_samples = checkpoint.get(_SAMPLES, 0)
        self._saved_learner = self._learner_of(checkpoint)
        if self._saved_learner is not None:
            # What Lightning restores next.
            assert isinstance(checkpoint, dict)
            checkpoint["optimizer_states"] = self._saved_learner["states"]
            checkpoint.update(self._saved_learner["own"].get("lightning", {}))

    def _learner_of(self, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
        module, saved = self.lightning_module, checkpoint.get(NAMESPACE)
        if not saved or module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return None
        size = self.super_learner_size
        return learner_of(saved, self.global_rank, self.world_size, size)

    def _all_learners(
        self, checkpoint: Mapping[str, Any], place: PlaceInEpoch
    ) -> list[Any]:
        # Learners may have made different numbers of steps.
        names = ("loops", "lr_schedulers", type(self.precision_plugin).__qualname__)
        lightning = {name: checkpoint[name] for name in names if name in checkpoint}
        own = {"lightning": lightning, "place": place.state()}
        states = checkpoint["optimizer_states"]
        if self._job is not None:
            return self._job.gather_learners(states, own)
        mine = {"states": states, "own": own}
        return by_super_learner(
            gather_plain(mine, self.root_device) or [], self.world_size
        )

    # --- collectives and their scope

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._interrupted():
            return
        if self._job is None or not self._job.running:
            super().barrier(*args, **kwargs)
            return
        self._job.meet(str(args[0]) if args else str(kwargs.get("name") or "barrier"))

    @override
    def reduce(
        self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean"
    ) -> Tensor:
        group = self._scope(group)
        if group is _ALONE:
            return tensor
        if group is None and isinstance(tensor, Tensor):
            self._meet("reduce")
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False
    ) -> Tensor:
        group = self._scope(group)
        if group is _ALONE:
            return tensor.unsqueeze(0)
        if group is None:
            self._meet("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Callbacks decide for all learners, in hooks of a step to which all come.
        self._decides = True
        try:
            return super().reduce_boolean_decision(decision, all)
        finally:
            self._decides = False

    @override
    def broadcast(self, obj: _Broadcast, src: int = 0) -> _Broadcast:
        self._meet("broadcast")
        return super().broadcast(obj, src)

    def _meet(self, name: str) -> None:
        if self._job is not None:
            self._job.meet_if_asynchronous(name)

    def _scope(self, group: Any) -> Any:
        """Who takes part in a collective: the group asked for, or none for all.

        Within a step of an asynchronous learner nobody but its super-learner is known
        to come, whatever was asked for all.
        """
        if group is not None and group is not dist.group.WORLD:
            return group
        if self._job is None or not self._apart():
            return None
        return self._job.groups.gradients or _ALONE

    def _apart(self) -> bool:
        job, module = self._job, self.lightning_module
        if job is None or not (job.running and job.asynchronous) or self._decides:
            return False
        return module is not None and module._current_fx_name in _HOOKS_OF_A_STEP

    # --- private

    def _note(self, batch: Any) -> None:
        trainer = self._trainer_or_none()
        assert self._job is not None
        assert trainer is not None
        samples = batch_size(batch) * self.world_size
        position = self._job.note(samples, trainer.current_epoch)
        if position is not None:
            catch_up(trainer, position)

    def _shares_work(self, trainer: pl.Trainer) -> bool:
        # A `fast_dev_run` is a fixed number of batches for each learner.
        return self._dials.work_sharing and not getattr(trainer, "fast_dev_run", False)

    def _keep_place(self, trainer: pl.Trainer) -> None:
        saved = self._saved_learner["own"] if self._saved_learner else {}
        self._place = PlaceInEpoch(trainer, self.root_device, saved.get("place"))
        if self._saved_learner is None and self.is_global_zero:
            # With other learners no count is anybody's own; their sum stays.
            self._place.num_samples = self._saved_samples
        self._place.install()

    def _share_work(self, trainer: pl.Trainer, job: Job) -> WorkSharing:
        super_learner, learner = divmod(self.global_rank, self.super_learner_size)
        place = Place(
            super_learner, self.num_super_learners, learner, self.super_learner_size
        )
        islands = self._dials.islands
        sharing = WorkSharing(trainer, job, place, self._saved_epoch, islands)
        self._saved_epoch = None
        sharing.install()
        return sharing

    def _check_start(self) -> Store:
        assert self.cluster_environment is not None
        rank, size = self.global_rank, self.world_size
        seats = Seats(self.num_processes, self.local_rank)
        patience = self._dials.start_patience
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        else:
            environment = self.cluster_environment
            address, port = environment.main_address, environment.main_port
            store = open_store(address, port, rank, size, patience)
        check_start(store, rank, size, self._dials, seats, patience)
        return store

    def _given(self) -> dict[str, Any]:
        return {
            **self._ddp_kwargs,
            "ddp_comm_hook": self._ddp_comm_hook,
            "ddp_comm_wrapper": self._ddp_comm_wrapper,
            "model_averaging_period": self._model_averaging_period,
        }

    def _interrupted(self) -> bool:
        trainer = self._trainer_or_none()
        return trainer is not None and trainer.interrupted

    def _trainer_or_none(self) -> pl.Trainer | None:
        return getattr(self.lightning_module, "_trainer", None)
