"""The same family for `lightning.fabric`, whose users write their own loops.

`HADPSGDFabricStrategy` has the dials of `strategy.HADPSGDStrategy` and drives the same
`job`, one for each module that is trained. Fabric has no hook for the end of training
and none for an evaluation, so there are two methods more: `finish` and `consensus`.
"""

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, final

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher,
)
from lightning.fabric.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher,
)
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_adpsgd.dials import (
    DEFAULT_TIMEOUT,
    CommunicationName,
    Dials,
    TransportName,
)
from lightning_adpsgd.gossip.exchange import Position
from lightning_adpsgd.islands.rendezvous import ENVIRONMENT_VARIABLE
from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO
from lightning_adpsgd.strategy.checkpoints.rng_state import (
    generator_states,
    set_generator_states,
)
from lightning_adpsgd.strategy.compatibility import check_device, check_island
from lightning_adpsgd.strategy.job import (
    NAMESPACE,
    Job,
    has_peers,
    learner_of,
    set_up_job,
)
from lightning_adpsgd.strategy.optimizer_reset import FreshState
from lightning_adpsgd.topology.named import TopologyLike, find_topology

_Broadcast = TypeVar("_Broadcast")
_Step = Callable[[Callable[[], Any]], Any]


class TrainingUnfinished(RuntimeError):
    """A learner's program ended while its modules were still being trained."""


@final
class HADPSGDFabricStrategy(DDPStrategy):
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
        after_evaluation: "restore" puts the local weights back at the end of
            `consensus`, "adopt" goes on from the mean.
        save_learners: Whether a checkpoint also holds what each learner is made of, so
            that a resume with as many goes on from there: weights, optimizer state,
            generators, round of gossip. The place in the epoch is the program's.
        seed: For topologies drawn at random; the same in all learners.
        timeout: For how long a peer may say nothing before it counts as lost, and of
            every collective; by default 5 minutes, and 30 for those of Lightning.
        islands: Where islands find one another, ``tcp://host:port`` or
            ``tcp://host:port/job``: this job is then one super-learner, which others
            join and leave as they come and go (docs/islands.md). By default what the
            environment's LIGHTNING_ADPSGD_ISLANDS says; none: all super-learners are in
            one job.
        start_method: How Fabric launches the learners of a machine.
        **ddp: What Fabric's `DDPStrategy` takes; options of DDP itself apply inside a
            super-learner.

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
        seed: int = 0,
        timeout: timedelta | None = None,
        islands: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp: Any,
    ) -> None:
        patience = default_pg_timeout if timeout is None else timeout
        super().__init__(timeout=patience, start_method=start_method, **ddp)
        self._backward_sync_control = _SuperLearnerSyncControl()
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
            islands=islands or os.environ.get(ENVIRONMENT_VARIABLE) or None,
        )
        self._jobs: dict[nn.Module, Job] = {}
        self._optimizers: list[Optimizer] = []

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Names are registered by `lightning_adpsgd.registration`."""

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoints; by default `WholeCheckpointIO`."""
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

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

    def gossip_statistics(self) -> list[Statistics]:
        """What this learner's communication has done, for each module in training."""
        parts = [job.statistics() for job in self._jobs.values()]
        return [statistics for statistics in parts if statistics is not None]

    @property
    def position(self) -> Position | None:
        """How far this island has come, from where those were whose weights it took.

        A loop that begins at `position.steps` ends where those of the others end. None
        without `islands`, and before the optimizer is set up.
        """
        return next((job.position for job in self._running()), None)

    # --- evaluation and end, which Fabric has no hooks for

    @contextmanager
    def consensus(self) -> Iterator[list[Consensus]]:
        """Holds the consensus model in all modules; all learners come.

        At its end the local weights come back, unless `after_evaluation="adopt"`.

        Yields:
            How far apart the super-learners are, for each module in training.
        """
        jobs = [job for job in self._running() if not job.in_consensus]
        measured = [job.enter_consensus("consensus") for job in jobs]
        try:
            yield [consensus for consensus in measured if consensus is not None]
        finally:
            for job in jobs:
                job.leave_consensus(self._dials.after_evaluation == "adopt")

    def finish(self) -> list[Consensus]:
        """Ends training in the consensus model, which stays; all learners come.

        A function given to `fabric.launch` need not call it: its end is the end of
        training. Nothing happens if nothing is being trained.

        Returns:
            How far apart the super-learners were, for each module in training.
        """
        measured = [job.finish() for job in self._running()]
        self._close()
        return [consensus for consensus in measured if consensus is not None]

    @override
    def teardown(self) -> None:
        """Ends without waiting for anybody."""
        self._close()
        super().teardown()

    # --- set-up

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = _ScriptLauncher(self)
        else:
            self._launcher = _ProcessLauncher(
                self,
                self._start_method,  # pyright: ignore[reportArgumentType]
            )

    @override
    def setup_module(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, module: nn.Module
    ) -> nn.Module:
        """Makes a module one of a job; DDP wraps it if a super-learner has several."""
        if not any(weight.requires_grad for weight in module.parameters()):
            return module
        if not self._has_peers():
            return super().setup_module(module)
        check_device(self.root_device)
        self._meet("setup")
        job = set_up_job(module, self._dials, self.super_learner_size)
        self._add_job(module, job)
        if self.super_learner_size == 1:
            return module
        return job.wrap(module, self._determine_ddp_device_ids(), self._ddp_kwargs)

    def _has_peers(self) -> bool:
        if self._dials.islands is None:
            return has_peers(self.world_size, self.super_learner_size)
        check_island(self.super_learner_size, self.world_size)
        if self._jobs:
            raise ValueError(
                "`fabric.setup` must be given one trained module with `islands`, got "
                f"{len(self._jobs) + 1}: islands meet over one model; make the modules "
                "parts of one"
            )
        return True

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Begins to communicate for the modules whose weights it changes."""
        fresh = FreshState(optimizer)
        for job in self._jobs_of(optimizer):
            job.on_reload = partial(_both, job.on_reload, fresh.restore)
            if not job.running:
                job.start()
        self._optimizers.append(optimizer)
        return super().setup_optimizer(optimizer)

    # --- the step

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        closure = kwargs.pop("closure", None)
        take = partial(super().optimizer_step, optimizer, **kwargs)
        step = _without_closure(take) if closure is None else _with_closure(take)
        for job in self._jobs_of(optimizer):
            _check_trains(job)
            # How many samples and epochs, the program alone knows.
            job.note(samples=0, epochs=0)
            step = partial(job.update, step)
        return step(closure or _nothing)

    # --- checkpoints: the consensus model

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The consensus model; called by all learners, as `fabric.save` does."""
        job = self._jobs.get(_unwrapped(module))
        if job is None or not job.running or job.in_consensus:
            return super().get_module_state_dict(module)
        job.enter_consensus("checkpoint")
        state = super().get_module_state_dict(module)
        # The local weights come back into the same memory.
        state = {name: _cloned(value) for name, value in state.items()}
        job.leave_consensus(adopt=False)
        return state

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Loads the weights into all learners alike; called by all learners.

        Within `consensus` what is loaded goes away at its end.
        """
        job = self._jobs.get(_unwrapped(module))
        if job is None or not job.running or job.in_consensus:
            super().load_module_state_dict(module, state_dict, strict)
            return
        job.enter_consensus("load")
        super().load_module_state_dict(module, state_dict, strict)
        job.leave_consensus(adopt=True)

    @override
    def save_checkpoint(
        self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if self._dials.save_learners and self._running():
            state = {**state, NAMESPACE: self._gather_learners()}
        super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def load_checkpoint(
        self, path: Any, state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        saved = remainder.pop(NAMESPACE, None) if isinstance(state, dict) else None
        if saved:
            for job, learners in zip(self._running(), saved, strict=True):
                self._restore_learner(job, learners)
        return remainder

    def _gather_learners(self) -> list[list[Any]]:
        """The super-learners of each job, in learner 0."""
        self._meet("checkpoint of learners")
        return [
            job.gather_learners(
                [o.state_dict() for o in self._optimizers_of(job)],
                {"generators": generator_states(self.root_device)},
            )
            for job in self._running()
        ]

    def _restore_learner(self, job: Job, learners: list[Any]) -> None:
        size = self.super_learner_size
        learner = learner_of(learners, self.global_rank, self.world_size, size)
        if learner is None:
            return
        job.enter_consensus("load of learners")
        job.restore_learner(learner)
        job.leave_consensus(adopt=True)
        for optimizer, saved in zip(
            self._optimizers_of(job), learner["states"], strict=True
        ):
            optimizer.load_state_dict(saved)
        if "generators" in learner["own"]:
            set_generator_states(learner["own"]["generators"], self.root_device)

    # --- collectives: all learners come, however far apart they are

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        jobs = self._running()
        if jobs:
            name = args[0] if args else kwargs.get("name")
            jobs[0].meet(str(name or "barrier"))
        else:
            super().barrier(*args, **kwargs)

    @override
    def all_reduce(
        self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean"
    ) -> Tensor:
        if _is_world(group):
            self._meet("all_reduce")
        return super().all_reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False
    ) -> Tensor:
        if _is_world(group):
            self._meet("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @override
    def broadcast(self, obj: _Broadcast, src: int = 0) -> _Broadcast:
        self._meet("broadcast")
        return super().broadcast(obj, src)

    def _meet(self, name: str) -> None:
        for job in self._running()[:1]:
            job.meet_if_asynchronous(name)

    # --- the jobs and their end

    def _running(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.running]

    def _optimizers_of(self, job: Job) -> list[Optimizer]:
        return [o for o in self._optimizers if job in self._jobs_of(o)]

    def _jobs_of(self, optimizer: Optimizer) -> list[Job]:
        weights = {id(w) for group in optimizer.param_groups for w in group["params"]}
        return [
            job
            for module, job in self._jobs.items()
            if any(id(weight) in weights for weight in module.parameters())
        ]

    def _add_job(self, module: nn.Module, job: Job) -> None:
        # Runs before the handler of torch, which was registered before it and takes
        # the connections away.
        atexit.register(self._end_unfinished)
        self._jobs[module] = job

    def _run(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a program of all learners; its end is the end of training."""
        if self._running():  # a launch within a launch
            return program(*args, **kwargs)
        try:
            with self._named():
                output = program(*args, **kwargs)
            self.finish()
        except BaseException as exception:
            self._fail(exception)
            raise
        return output

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Names the failure that broke DDP inside a super-learner."""
        try:
            yield
        except RuntimeError:
            with ExitStack() as stack:
                if self.super_learner_size > 1:
                    for job in self._running()[:1]:
                        stack.enter_context(job.failures.named())
                raise

    def _fail(self, exception: BaseException) -> None:
        for job in self._jobs.values():
            job.fail(exception)
        self._close()

    def _close(self) -> None:
        atexit.unregister(self._end_unfinished)
        self._optimizers.clear()
        for job in self._jobs.values():
            job.close()

    def _end_unfinished(self) -> None:
        """Tells the others why this learner leaves; at the exit of its process."""
        if self._running():
            # Set by the interpreter when an exception has ended the program.
            cause = getattr(sys, "last_value", None)
            self._fail(cause or TrainingUnfinished(_UNFINISHED))
        self._close()


_UNFINISHED = (
    "the program ended without `fabric.strategy.finish()`, so that its weights are not "
    "those of the other learners; call it after the last step, or give your program to "
    "`fabric.launch` as a function"
)


@final
class _SuperLearnerSyncControl(_BackwardSyncControl):
    """Skips the allreduce of DDP where there is one: a learner alone has none."""

    @override
    def no_backward_sync(
        self, module: nn.Module, enabled: bool
    ) -> AbstractContextManager[None]:
        if enabled and isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return nullcontext()


@final
class _ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each learner, and programs to their end."""

    def __init__(self, strategy: HADPSGDFabricStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(
            strategy.cluster_environment, strategy.num_processes, strategy.num_nodes
        )
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        program = partial(self._strategy._run, function)
        return super().launch(program, *args, **kwargs)


@final
class _ProcessLauncher(_MultiProcessingLauncher):
    """Makes a process for each learner, and runs programs to their end."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self._strategy, HADPSGDFabricStrategy)
        program = partial(self._strategy._run, function)
        return super().launch(program, *args, **kwargs)


def _with_closure(take: Callable[..., Any]) -> _Step:
    return lambda closure: take(closure=closure)


def _without_closure(take: Callable[..., Any]) -> _Step:
    def step(averaging: Callable[[], Any]) -> Any:
        averaging()  # the gradients are ready
        return take()

    return step


def _check_trains(job: Job) -> None:
    """Refuses a step that nobody would learn of, and ends if another has failed."""
    if not job.running:
        raise RuntimeError(
            "`optimizer.step()` needs a module in training: set it up before or with "
            "its optimizer (`fabric.setup(module, optimizer)`), and once more to train "
            "on after `fabric.strategy.finish()`"
        )
    if job.in_consensus:
        raise RuntimeError(
            "`optimizer.step()` within `fabric.strategy.consensus()` would be lost: "
            "the local weights come back at its end; take the step outside"
        )
    job.raise_if_failed()


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _is_world(group: Any) -> bool:
    return group is None or group is dist.group.WORLD


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _nothing() -> None:
    """The closure of a step whose gradients are ready."""
