"""The strategy that Lightning sees: one class, three dials.

`topology` says who averages with whom, `communication` when (at the step boundary,
hidden behind the next gradient, or asynchronously), `super_learner_size` how many
learners allreduce their gradients and count as one. The registered names are settings
of these. Inside a super-learner this is Lightning's DDP on the process group of its
learners; between super-learners the engines of `mixing` and `gossip` do the work.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_adpsgd.coordination import Coordinator, LearnerFailed
from lightning_adpsgd.gossip import Gossip, GossipOptions
from lightning_adpsgd.mixing import (
    Communication,
    DelayByOne,
    Order,
    RoundMixer,
    Schedule,
    Statistics,
    Synchronous,
)
from lightning_adpsgd.parameters import FlatParameters
from lightning_adpsgd.topology import Topology, find_topology
from lightning_adpsgd.transport import DistributedTransport, Node, PeerLost

COMMUNICATIONS = ("sync", "delay_by_one", "async")
_WIRE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)


class Consensus(NamedTuple):
    """How far the super-learners were from their mean when it was last taken.

    Attributes:
        distance: ``sqrt(mean_i |w_i - mean w|^2)`` over all weights.
        relative_distance: The same over ``|mean w|``.
    """

    distance: float
    relative_distance: float


class _Groups(NamedTuple):
    counterparts: dist.ProcessGroup
    gradients: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None


class HADPSGDStrategy(DDPStrategy):
    """Hierarchical asynchronous decentralized parallel SGD, and its whole family.

    The learning rate is the one for the global batch (learners x local batch):
    gradients are means, and nothing is divided by the number of learners.

    Args:
        topology: Name of a topology (`lightning_adpsgd.topology.TOPOLOGIES`), or one of
            your own.
        communication: "sync": the average is taken at the step boundary and everyone
            waits. "delay_by_one": it is hidden behind one gradient. "async": nobody
            waits for anybody.
        super_learner_size: Learners that allreduce gradients; "node" for those of one
            machine. Must divide the number of learners.
        order: Whether the average comes after the optimizer step or between gradient
            and step; by default after. "delay_by_one" is the latter by construction.
        mixing_gain: gamma, 0 < gamma <= 1: how much of each average is taken.
        gossip_every: Optimizer steps per round of averaging.
        wire_dtype: What travels in "async"; averages are taken in float32.
        max_staleness: In "async", steps after which a learner without a completed
            exchange waits for one; none: it never waits.
        after_evaluation: "restore" puts the local weights back after an evaluation of
            the mean, "adopt" goes on from the mean.
        seed: For topologies drawn at random; the same in all learners.
        timeout: For how long a peer may say nothing before it counts as lost.
        start_method: How Lightning launches the learners of a machine.
        **ddp: What Lightning's `DDPStrategy` takes; options of DDP itself apply inside
            a super-learner.

    Raises:
        ValueError: A value is out of its bounds.
    """

    def __init__(
        self,
        topology: str | Topology = "ring",
        communication: Literal["sync", "delay_by_one", "async"] = "async",
        super_learner_size: int | Literal["node"] = "node",
        *,
        order: Order | None = None,
        mixing_gain: float = 1.0,
        gossip_every: int = 1,
        wire_dtype: torch.dtype | None = None,
        max_staleness: int | None = None,
        after_evaluation: Literal["restore", "adopt"] = "restore",
        seed: int = 0,
        timeout: timedelta = timedelta(minutes=2),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp: Any,
    ) -> None:
        # Lightning's own collectives, in `setup` hooks say, keep their patience.
        group_timeout = max(timeout, default_pg_timeout)
        super().__init__(timeout=group_timeout, start_method=start_method, **ddp)
        self._topology = find_topology(topology)
        self._communication_name = communication
        self._super_learner_size = super_learner_size
        self._order: Order = order or _default_order(communication)
        self._gain, self._every, self._seed = mixing_gain, gossip_every, seed
        self._wire_dtype, self._max_staleness = wire_dtype, max_staleness
        self._after_evaluation, self._peer_timeout = after_evaluation, timeout
        self._check_dials()
        self._coordinator: Coordinator | None = None
        self._communication: Communication | None = None
        self._flat: FlatParameters | None = None
        self._groups: _Groups | None = None
        self._local_weights: list[Tensor] | None = None
        self._in_step = self._running = False
        self._statistics: Statistics | None = None
        self.last_consensus: Consensus | None = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Names are registered by `lightning_adpsgd.registration`."""

    # --- the shape of the job

    @property
    def super_learner_size(self) -> int:
        """N, the learners of each super-learner."""
        size = self._super_learner_size
        return self.num_processes if isinstance(size, str) else size

    @property
    def num_super_learners(self) -> int:
        """S."""
        return self.world_size // self.super_learner_size

    def gossip_statistics(self) -> Statistics | None:
        """What this learner's communication has done; none if nothing communicates."""
        if self._communication is not None:
            return self._communication.statistics()
        return self._statistics

    # --- set-up and end

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING or not self._has_peers():
            super().setup(trainer)
            return
        self._refuse_unsupported(trainer)
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self._groups = self._make_groups()
        # All learners start from the weights of learner 0, as in DDP.
        _sync_module_states(self.model)
        self._flat = FlatParameters(self.model, shards=self.super_learner_size)
        self._check_same_layout()
        if self.super_learner_size > 1:
            self.configure_ddp()
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)
        self._start_coordinator(trainer)

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        if self._groups is None:
            return super()._setup_model(model)
        return DistributedDataParallel(
            model,
            device_ids=self.determine_ddp_device_ids(),
            process_group=self._groups.gradients,
            **self._ddp_kwargs,
        )

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._flat is None:
            return
        self._flat.check_views()
        self._communication = self._make_communication()
        self._communication.start()
        self._running = True

    @override
    def on_train_end(self) -> None:
        if self._running:
            with self._failures_named():
                self._enter_consensus("end of training")
                self._local_weights = None
                self._stop_communication()
        super().on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._coordinator is not None:
            if not isinstance(exception, LearnerFailed | SystemExit):
                self._coordinator.announce_failure(self._describe(exception))
            if self.is_global_zero:
                self._coordinator.linger(timedelta(seconds=2))
        self._abort_communication()

    @override
    def teardown(self) -> None:
        self._abort_communication()
        if self._coordinator is not None:
            self._coordinator.stop()
            self._coordinator = None
        self._forget_local_signals()
        self._flat = self._groups = self._local_weights = None
        super().teardown()

    # --- the step

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._coordinator is not None:
            with self._failures_named():
                self._coordinator.raise_if_failed()
        super().on_train_batch_start(batch, batch_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._in_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._in_step = False

    @override
    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        communication = self._communication if self._running else None
        if communication is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        step = _Step(closure, communication)
        with self._failures_named():
            output = super().optimizer_step(optimizer, step, model, **kwargs)
            communication.after_update()
        return output

    # --- evaluation and checkpoints: the consensus model

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._running:
            with self._failures_named():
                self._enter_consensus("validation")

    @override
    def on_validation_end(self) -> None:
        if self._running:
            self._leave_consensus(adopt=self._after_evaluation == "adopt")
        super().on_validation_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The consensus model; called by all learners, as Lightning does.

        After a failure, when the others can no longer be asked, the local weights.
        """
        trainer = self._trainer_or_none()
        interrupted = trainer is not None and trainer.interrupted
        if not self._running or self._local_weights is not None or interrupted:
            return super().lightning_module_state_dict()
        with self._failures_named():
            self._enter_consensus("checkpoint")
        state = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in super().lightning_module_state_dict().items()
        }
        self._leave_consensus(adopt=False)
        return state

    # --- collectives and their scope

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        name = str(args[0]) if args else str(kwargs.get("name") or "barrier")
        trainer = self._trainer_or_none()
        if trainer is not None and trainer.interrupted:
            return
        if self._coordinator is None or not self._running:
            super().barrier(*args, **kwargs)
            return
        with self._failures_named():
            self._coordinator.meet(name)

    @override
    def reduce(
        self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean"
    ) -> Tensor:
        if not self._scoped() or group is not None:
            return super().reduce(tensor, group, reduce_op)
        assert self._groups is not None
        if self._groups.gradients is None:
            return tensor
        return super().reduce(tensor, self._groups.gradients, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False
    ) -> Tensor:
        if not self._scoped() or group is not None:
            return super().all_gather(tensor, group, sync_grads)
        assert self._groups is not None
        if self._groups.gradients is None:
            return tensor.unsqueeze(0)
        return super().all_gather(tensor, self._groups.gradients, sync_grads)

    def _scoped(self) -> bool:
        # Within a step of an asynchronous learner nobody else is known to come.
        return self._running and self._in_step and self._communication_name == "async"

    # --- private

    def _has_peers(self) -> bool:
        size = self.super_learner_size
        if size < 1 or self.world_size % size:
            raise ValueError(
                f"`super_learner_size` must divide the number of learners "
                f"{self.world_size}, got {size}"
            )
        if self.num_super_learners == 1 and self.world_size > 1:
            rank_zero_info(
                f"All {self.world_size} learners form one super-learner, which is "
                "plain synchronous allreduce (ddp). To gossip, set `super_learner_size` "
                f"to a proper divisor of {self.world_size}, or use several machines."
            )
        return self.num_super_learners > 1

    def _check_dials(self) -> None:
        if self._communication_name not in COMMUNICATIONS:
            raise ValueError(
                f"`communication` must be one of {COMMUNICATIONS}, got "
                f"{self._communication_name!r}"
            )
        if not 0 < self._gain <= 1:
            raise ValueError(f"`mixing_gain` must be in (0, 1], got {self._gain}")
        for name, value in (
            ("gossip_every", self._every),
            ("max_staleness", self._max_staleness),
        ):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")
        self._check_options_of_async()

    def _check_options_of_async(self) -> None:
        if self._wire_dtype not in _WIRE_DTYPES:
            raise ValueError(
                f"`wire_dtype` must be one of {_WIRE_DTYPES}, got {self._wire_dtype}"
            )
        if self._communication_name == "async":
            return
        for name, value in (
            ("wire_dtype", self._wire_dtype),
            ("max_staleness", self._max_staleness),
        ):
            if value is not None:
                raise ValueError(
                    f'`{name}` applies to `communication="async"`, got {value} with '
                    f"{self._communication_name!r}"
                )
        if self._communication_name == "delay_by_one" and (
            self._order == "step_then_average"
        ):
            raise ValueError(
                '`order="step_then_average"` cannot be had with '
                '`communication="delay_by_one"`, whose average comes before the step'
            )

    def _refuse_unsupported(self, trainer: pl.Trainer) -> None:
        if self.root_device.type != "cpu":
            raise ValueError(
                f"`accelerator` must be 'cpu' for gossip in this release, got "
                f"{self.root_device.type!r}"
            )
        if self._layer_sync is not None:
            raise ValueError(
                "`sync_batchnorm` must be False: it would make all learners wait for "
                "one another in each forward; batch-norm statistics are averaged with "
                "the parameters"
            )
        if self._communication_name == "async":
            _refuse_world_clocks(trainer)

    def _make_groups(self) -> _Groups:
        size, count = self.super_learner_size, self.num_super_learners
        across = [[s * size + n for s in range(count)] for n in range(size)]
        within = [[s * size + n for n in range(size)] for s in range(count)]
        # Everybody makes every group, in the same order: torch requires it.
        counterparts = _own_group(across, self.global_rank, self._timeout)
        if size == 1:
            return _Groups(counterparts, None, None)
        gradients = _own_group(within, self.global_rank, self._timeout)
        shards = _own_group(within, self.global_rank, self._timeout)
        return _Groups(counterparts, gradients, shards)

    def _make_communication(self) -> Communication:
        assert self._flat is not None
        assert self._groups is not None
        assert self._coordinator is not None
        transport = DistributedTransport(self._groups.counterparts)
        node, vectors = Node(self._groups.shards), self._flat.vectors
        schedule = Schedule(
            self._topology, self.num_super_learners, self._gain, self._seed
        )
        if self._communication_name == "async":
            options = GossipOptions(
                self._order,
                self._every,
                self._wire_dtype,
                self._max_staleness,
                self._peer_timeout,
            )
            report = self._coordinator.announce_failure
            return Gossip(vectors, transport, node, schedule, options, report)
        mixer = RoundMixer(vectors, transport, node, schedule, self._peer_timeout)
        if self._communication_name == "sync":
            return Synchronous(mixer, self._order, self._every)
        return DelayByOne(mixer, self._every)

    def _start_coordinator(self, trainer: pl.Trainer) -> None:
        store = PrefixStore(
            "lightning_adpsgd", dist.distributed_c10d._get_default_store()
        )
        run = self.broadcast(_next_run(store) if self.is_global_zero else None)
        store = PrefixStore(str(run), store)
        self._coordinator = Coordinator(
            store, self.global_rank, self.world_size, self._peer_timeout
        )
        self._coordinator.start()
        _localise_signals(trainer)

    def _check_same_layout(self) -> None:
        assert self._flat is not None
        layout = self._flat.layout()
        if self.broadcast(layout) != layout:
            raise ValueError(
                f"the model of learner {self.global_rank} differs from that of learner "
                "0 in the name, shape or dtype of a weight: all learners must build "
                "the same model"
            )

    def _enter_consensus(self, name: str) -> None:
        assert self._communication is not None
        assert self._coordinator is not None
        assert self._flat is not None
        self._communication.pause()
        self._coordinator.meet(name)
        self._communication.settle()
        self._flat.check_views()
        self._local_weights = [vector.clone() for vector in self._flat.vectors]
        self.last_consensus = self._average_all(self._local_weights)

    @torch.no_grad()
    def _average_all(self, local_weights: list[Tensor]) -> Consensus:
        assert self._flat is not None
        sums = torch.zeros(2, dtype=torch.float64)
        for vector, local in zip(self._flat.vectors, local_weights, strict=True):
            half = vector.dtype in (torch.float16, torch.bfloat16)
            mean = vector.to(torch.float32 if half else vector.dtype, copy=True)
            dist.all_reduce(mean)
            mean.div_(self.world_size)
            vector.copy_(mean)
            sums[0] += (local - mean).abs().double().square().sum().cpu()
            sums[1] += mean.abs().double().square().sum().cpu()
        dist.all_reduce(sums)
        distance, norm = sums.div_(self.world_size).sqrt().tolist()
        return Consensus(distance, distance / norm if norm else 0.0)

    @torch.no_grad()
    def _leave_consensus(self, adopt: bool) -> None:
        assert self._flat is not None
        assert self._communication is not None
        if self._local_weights is None:
            return
        if not adopt:
            for vector, local in zip(
                self._flat.vectors, self._local_weights, strict=True
            ):
                vector.copy_(local)
        self._local_weights = None
        self._communication.resume()

    def _stop_communication(self) -> None:
        assert self._communication is not None
        self._communication.stop()
        self._statistics = self._communication.statistics()
        self._communication, self._running = None, False

    def _abort_communication(self) -> None:
        if self._communication is not None:
            self._statistics = self._communication.statistics()
            self._communication.abort()
        self._communication, self._running = None, False

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        """Turns the loss of a peer into the failure that caused it.

        Raises:
            LearnerFailed: In learner 0, with the one message of the job.
            SystemExit: In the others, whose traces would only repeat it.
        """
        try:
            yield
        except (PeerLost, LearnerFailed) as error:
            assert self._coordinator is not None
            message = self._coordinator.failure or str(error)
            if self.is_global_zero:
                raise LearnerFailed(message) from error
            raise SystemExit(1) from error

    def _describe(self, exception: BaseException) -> str:
        text = " ".join(str(exception).split())[:500]
        return (
            f"learner {self.global_rank} raised {type(exception).__name__}: {text}"
            if text
            else f"learner {self.global_rank} ended by {type(exception).__name__}"
        )

    def _trainer_or_none(self) -> pl.Trainer | None:
        module = self.lightning_module
        return getattr(module, "_trainer", None)

    def _forget_local_signals(self) -> None:
        trainer = self._trainer_or_none()
        if trainer is not None:
            loop = trainer.fit_loop.epoch_loop
            vars(loop).pop("_broadcast_sigterm_tensor", None)
            vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)

    @override
    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        dead = dict.fromkeys(("_coordinator", "_communication", "_flat", "_groups"))
        return {**state, **dead, "_running": False, "_local_weights": None}


class _Step:
    """An optimizer's closure after which the average may be taken.

    LBFGS calls it several times a step; the average belongs to the first.
    """

    def __init__(
        self, closure: Callable[[], Any], communication: Communication
    ) -> None:
        self._closure, self._communication = closure, communication
        self._first = True

    def __call__(self) -> Any:
        output = self._closure()
        if self._first:
            self._first = False
            self._communication.before_update()
        return output


def _default_order(communication: str) -> Order:
    return (
        "average_then_step" if communication == "delay_by_one" else "step_then_average"
    )


def _own_group(
    lists: list[list[int]], rank: int, timeout: timedelta | None
) -> dist.ProcessGroup:
    groups = {
        tuple(ranks): dist.new_group(ranks, timeout=timeout, backend="gloo")
        for ranks in lists
    }
    group = next(group for ranks, group in groups.items() if rank in ranks)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _next_run(store: Store) -> int:
    """Each `fit` of a process group has its own keys."""
    return store.add("runs", 1)


def _refuse_world_clocks(trainer: pl.Trainer) -> None:
    """Refuses what reads one clock for all learners in each step."""
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise ValueError(
            "`val_check_interval` must be a number of steps or a part of an epoch with "
            '`communication="async"`, got a time: learners would validate at different '
            "steps of their own clocks"
        )
    for callback in getattr(trainer, "callbacks", ()):
        timed = isinstance(callback, ModelCheckpoint) and callback._train_time_interval
        if timed or isinstance(callback, Timer):
            argument = "train_time_interval" if timed else "max_time"
            raise ValueError(
                f'`{argument}` must not be set with `communication="async"`: it makes '
                "all learners wait for learner 0 in each step; use `max_steps` or "
                "`every_n_train_steps`"
            )


def _localise_signals(trainer: pl.Trainer) -> None:
    """Replaces two collectives of Lightning's signal handling by local looks.

    Lightning broadcasts from learner 0 in each training step whether a SIGTERM came,
    and once more inside the signal handler. The first would tie all learners together,
    the second hangs when one learner alone gets the signal. Here the learner that gets
    it stops, and the coordinator tells the others.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        vars(loop)["_broadcast_sigterm_tensor"] = partial(_stop_if_signalled, trainer)
    vars(connector)["_sigterm_notifier_fn"] = partial(_note_signal, trainer)


def _stop_if_signalled(trainer: pl.Trainer) -> None:
    if trainer.received_sigterm:
        raise SIGTERMException


def _note_signal(trainer: pl.Trainer, signum: int, frame: object) -> None:
    connector, launcher = trainer._signal_connector, trainer.strategy.launcher
    if not connector.received_sigterm and launcher is not None:
        launcher.kill(signum)  # type: ignore[arg-type]
    connector.received_sigterm = True
