"""The strategy for `lightning.fabric`, whose users write their own loops.

`HADPSGDFabricStrategy` has the options of `HADPSGDStrategy` and drives one `Job` for
each module that is trained. Fabric has no hook for the end of training or for an
evaluation, so there are two additional methods: `finish` and `consensus`.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, TypeVar, final

import torch.distributed as dist
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_adpsgd.gossip.protocol import Position
from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.strategy.checkpoints.contents import (
    gather_learners,
    learner_of,
    plain,
)
from lightning_adpsgd.strategy.checkpoints.rng_state import (
    generator_states,
    set_generator_states,
)
from lightning_adpsgd.strategy.checkpoints.saving import snapshot_of
from lightning_adpsgd.strategy.compatibility import refuse_unsupported_in_fabric
from lightning_adpsgd.strategy.evaluation_watch import EvaluationWatch
from lightning_adpsgd.strategy.job import NAMESPACE, Job
from lightning_adpsgd.strategy.launchers import connect_learners
from lightning_adpsgd.strategy.module_jobs import ModuleJobs
from lightning_adpsgd.strategy.options import HADPSGDOptions
from lightning_adpsgd.strategy.overrides import Overrides
from lightning_adpsgd.strategy.set_up import set_up_job

_Broadcast = TypeVar("_Broadcast")


@final
class HADPSGDFabricStrategy(HADPSGDOptions, DDPStrategy):
    """Hierarchical asynchronous decentralized parallel SGD (H-ADPSGD) for Fabric.

    The learning rate is the one for the global batch (learners x local batch), because
    gradients are means; nothing is divided by the number of learners.

    The constructor documents the arguments. Four of them differ from the Trainer's.
    `work_sharing=True` and `inside="model_parallel"` are refused. `save_learners` keeps
    neither schedules nor the place in the epoch, which belong to your program. And
    `after_evaluation` applies at the end of `consensus`.
    """

    _has_trainer = False

    @cached_property
    def jobs(self) -> ModuleJobs:
        """The jobs of the modules in training."""
        return ModuleJobs()

    # --- what it has done

    def gossip_statistics(self) -> list[Statistics]:
        """Counters of this learner's communication, for each module in training."""
        parts = [job.statistics() for job in self.jobs]
        return [statistics for statistics in parts if statistics is not None]

    @property
    def position(self) -> Position | None:
        """The progress of this island, including that of the weights it started from.

        A loop that starts at `position.steps` ends where the loops of the others end.
        None without `islands`, and before the optimizer is set up.
        """
        island = next((job.island for job in self.jobs.running), None)
        return None if island is None else island.position

    # --- evaluation and end, which Fabric has no hooks for

    @contextmanager
    def consensus(self) -> Iterator[list[Consensus]]:
        """Puts the consensus model into all modules; all learners must call it.

        At the end of the context the local weights come back, unless
        `after_evaluation="adopt"`. It yields the consensus distance of each module.

        Raises:
            LearnerFailed: In learner 0, if another one fails; the others end.
        """
        with ExitStack() as jobs:
            each = (
                _in_consensus(job, "consensus", self.dials.adopts)
                for job in self.jobs.running
            )
            measured = [jobs.enter_context(one) for one in each]
            yield [consensus for consensus in measured if consensus is not None]

    def finish(self) -> list[Consensus]:
        """Ends training and keeps the consensus model; all learners must call it.

        A function given to `fabric.launch` need not: training ends when it returns.
        The result has the consensus distance of each module that was in training.

        Raises:
            LearnerFailed: In learner 0, if another one fails; the others end.
        """
        return self.jobs.finish()

    @override
    def teardown(self) -> None:
        """Ends without waiting for any learner."""
        self.jobs.close()
        super().teardown()

    # --- set-up

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        # Not undone: a launcher belongs to its strategy.
        Overrides().wrap(self._launcher, "launch", self.jobs.launch)

    @override
    def setup_environment(self) -> None:
        connect = super().setup_environment
        if self.jobs.outside is not None and dist.is_initialized():
            connect()  # a launch once more, perhaps of some learners alone
            return
        self._set_world_ranks()
        self.jobs.outside = connect_learners(self, self.dials, connect)

    @override
    def setup_module(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, module: nn.Module
    ) -> nn.Module:
        self._backward_sync_control = _SuperLearnerSyncControl()
        is_trained = any(weight.requires_grad for weight in module.parameters())
        is_alone = self.world_size == 1 and self.dials.islands is None
        self._unfreezing.note(module, is_trained or is_alone)
        if not is_trained:
            return module
        with self.jobs.together("setup"):
            if self.check_peers():
                return self._set_up(module)
            return self._unfreezing.make(module, partial(super().setup_module, module))

    def _set_up(self, module: nn.Module) -> nn.Module:
        """Makes the job of a module, with DDP only inside a super-learner."""
        if self.dials.islands is not None and not all(j.closed for j in self.jobs):
            raise ValueError(
                "`fabric.setup` takes only one trained module with `islands`, got 2: "
                "islands average one model; make both parts of a single module"
            )
        given = self.root_device, self._ddp_kwargs, max(self.partition.sizes)
        refuse_unsupported_in_fabric(module, *given)
        reset = partial(self.jobs.reset_optimizers, module)
        arguments = module, self.dials, self.partition, reset
        job = self.jobs.set_up(module, partial(set_up_job, *arguments))
        if job.asynchronous:
            self.jobs.watches.append(EvaluationWatch(module, job))
        if self.super_learner_size == 1:
            return module
        return self._wrap(module, job, self._determine_ddp_device_ids())

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.jobs.add_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    # --- the step

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        closure = kwargs.pop("closure", None)
        take = partial(super().optimizer_step, optimizer, **kwargs)

        def take_averaging(averaging: Callable[[], Any]) -> Any:
            if closure is not None:
                return take(closure=averaging)
            averaging()  # the gradients are ready
            return take()

        step: Callable[..., Any] = take_averaging
        for job in self.jobs.of_optimizer(optimizer):
            _check_trains(job)
            # The program alone knows how many samples and epochs.
            if job.island is not None:
                job.island.note(samples=0, epochs=0)
            step = partial(job.update, step)
        return step(self._unfreezing.checked(optimizer, closure or (lambda: None)))

    # --- checkpoints: the consensus model

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The state of the consensus model; all learners must call it."""
        job = self.jobs.of_module(module)
        if job is None or not job.running:
            return super().get_module_state_dict(module)
        with _in_consensus(job, unmerged=not self.dials.save_learners):
            # The local weights come back into the same memory.
            state = super().get_module_state_dict(module)
            return snapshot_of(state, on_host=False)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The state of an optimizer with Python's numbers, which a load takes."""
        return plain(super().get_optimizer_state(optimizer))

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Loads the same weights into all learners; all learners must call it.

        Weights that are loaded within `consensus` are discarded at its end.
        """
        job = self.jobs.of_module(module)
        if job is None or not job.running or job.in_consensus:
            super().load_module_state_dict(module, state_dict, strict)
            return
        with _replacing_weights(job, "load"):
            super().load_module_state_dict(module, state_dict, strict)

    @override
    def save_checkpoint(
        self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        with ExitStack() as consensus:
            if self.dials.save_learners and self.jobs.running:
                # The file's mean is that of its learners: with the same exchanges.
                for job in self.jobs.running:
                    consensus.enter_context(_in_consensus(job))
                state = {**state, NAMESPACE: self._gather_learners()}
            super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def load_checkpoint(
        self, path: Any, state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        if state and isinstance(state, dict):
            saved = remainder.pop(NAMESPACE, None)
            modules = [one for one in state.values() if isinstance(one, nn.Module)]
            if saved and modules:
                self._restore_learners(saved, modules)
        return remainder

    def _gather_learners(self) -> list[list[Any]]:
        _let_go()
        with self.jobs.together("checkpoint of learners"):
            return [self._gather(job) for job in self.jobs.running]

    def _gather(self, job: Job) -> list[Any]:
        states = [one.state_dict() for one in self.jobs.optimizers_of(job)]
        generators = generator_states(self.root_device)
        return gather_learners(job, plain(states), {"generators": generators})

    def _restore_learners(self, saved: list[Any], modules: list[nn.Module]) -> None:
        _let_go()
        running = self.jobs.running
        if not running:
            rank_zero_info(
                "The checkpoint's learners (`save_learners`) are not restored, because "
                "no module gossips here: call `fabric.setup(module, optimizer)` before"
            )
            return
        if len(saved) != len(running):
            raise ValueError(
                f"the checkpoint holds the learners of {len(saved)} modules "
                f"(`save_learners`) and {len(running)} are in training: set up as many "
                "with their optimizers, in the same order, before `fabric.load`"
            )
        loaded = {self.jobs.of_module(module) for module in modules}
        for job, learners in zip(running, saved, strict=True):
            if job in loaded and not job.in_consensus:  # there a load is discarded
                self._restore_learner(job, learners)

    def _restore_learner(self, job: Job, learners: list[Any]) -> None:
        learner = learner_of(learners, self.global_rank, self.partition)
        if learner is None:
            return
        optimizers, states = self.jobs.optimizers_of(job), learner["states"]
        if len(optimizers) != len(states):
            raise ValueError(
                f"the checkpoint holds the states of {len(states)} optimizers of a "
                f"module (`save_learners`) and {len(optimizers)} are set up: set up as "
                "many, in the same order, before `fabric.load`"
            )
        with _replacing_weights(job, "load of learners"):
            job.restore_learner(learner)
        for optimizer, saved in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(saved)
        if "generators" in learner["own"]:
            set_generator_states(learner["own"]["generators"], self.root_device)

    # --- collectives: all learners come, however far apart they are

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not (jobs := self.jobs.running):
            with self.jobs.together("barrier"):
                super().barrier(*args, **kwargs)
            return
        name = args[0] if args else kwargs.get("name")
        jobs[0].meet(str(name or "barrier"))

    @override
    def all_reduce(
        self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean"
    ) -> Tensor:
        with self.jobs.together("all_reduce", _is_world(group)):
            return super().all_reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False
    ) -> Tensor:
        with self.jobs.together("all_gather", _is_world(group)):
            return super().all_gather(tensor, group, sync_grads)

    @override
    def broadcast(self, obj: _Broadcast, src: int = 0) -> _Broadcast:
        with self.jobs.together("broadcast"):
            return super().broadcast(obj, src)


@final
class _SuperLearnerSyncControl(_BackwardSyncControl):
    """Skips DDP's allreduce; a super-learner of one learner has none to skip."""

    @override
    def no_backward_sync(
        self, module: nn.Module, enabled: bool
    ) -> AbstractContextManager[None]:
        if enabled and isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return nullcontext()


def _let_go() -> None:
    """Lets go of the optimizers that a program has replaced.

    One with a scheduler may be in a cycle: whether it counts would depend on when
    Python's garbage collector ran last.
    """
    gc.collect()


def _check_trains(job: Job) -> None:
    """Refuses a step that would be lost; raises if another learner has failed."""
    if not job.running:
        raise RuntimeError(
            "`optimizer.step()` needs a module in training: set it up with its "
            "optimizer (`fabric.setup(module, optimizer)`), again to continue after "
            "`fabric.strategy.finish()`"
        )
    if job.in_consensus:
        raise RuntimeError(
            "`optimizer.step()` within `fabric.strategy.consensus()` would be lost: "
            "the local weights come back at its end; take the step outside"
        )
    job.raise_if_failed()


@contextmanager
def _in_consensus(
    job: Job, occasion: str = "checkpoint", adopts: bool = False, unmerged: bool = False
) -> Iterator[Consensus | None]:
    """A context of the consensus model; None if the module holds it already."""
    holds = job.in_consensus
    consensus = None if holds else job.enter_consensus(occasion, adopts, unmerged)
    try:
        yield consensus
    finally:
        if not holds:
            job.leave_consensus(adopts)


@contextmanager
def _replacing_weights(job: Job, occasion: str) -> Iterator[None]:
    """A context that changes the state of all learners, or of none if it raises."""
    job.enter_consensus(occasion)
    before = [buffer.clone() for buffer in _buffers(job)]
    replaced = False
    try:
        yield
        job.adopt(f"end of the {occasion}")
        replaced = True
    finally:
        if not replaced:
            # What a failed load has copied would be taken for changes of a module.
            for buffer, value in zip(_buffers(job), before, strict=True):
                buffer.copy_(value)
            job.leave_consensus(adopt=False)


def _buffers(job: Job) -> list[Tensor]:
    flat = job.flat
    return [*flat.buffers_in(flat.vectors), *flat.own_tensors().values()]


def _is_world(group: Any) -> bool:
    return group is None or group is dist.group.WORLD
