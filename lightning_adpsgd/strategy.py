"""The strategy that Lightning sees: one class, three dials.

`topology` says who averages with whom, `communication` when (at the step boundary,
hidden behind the next gradient, or asynchronously), `super_learner_size` how many
learners allreduce their gradients and count as one. The registered names are settings
of these. Inside a super-learner this is Lightning's DDP on the process group of its
learners; between super-learners the engines of `mixing` and `gossip` do the work.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_adpsgd import signals
from lightning_adpsgd.compatibility import refuse_unsupported
from lightning_adpsgd.consensus import Consensus, ConsensusModel
from lightning_adpsgd.coordination import Coordinator
from lightning_adpsgd.dials import CommunicationName, Dials
from lightning_adpsgd.failures import FailureReport
from lightning_adpsgd.gossip import Gossip, GossipOptions
from lightning_adpsgd.groups import Groups, make_groups
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
from lightning_adpsgd.transport import DistributedTransport, Node

_NAMESPACE = "lightning_adpsgd"
_Broadcast = TypeVar("_Broadcast")


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
        save_learners: Whether a checkpoint also holds each super-learner's weights and
            optimizer state, so that a resume with as many goes on from there.
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
        communication: CommunicationName = "async",
        super_learner_size: int | Literal["node"] = "node",
        *,
        order: Order | None = None,
        mixing_gain: float = 1.0,
        gossip_every: int = 1,
        wire_dtype: torch.dtype | None = None,
        max_staleness: int | None = None,
        after_evaluation: Literal["restore", "adopt"] = "restore",
        save_learners: bool = False,
        seed: int = 0,
        timeout: timedelta = timedelta(minutes=5),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp: Any,
    ) -> None:
        # Lightning's own collectives, in `setup` hooks say, keep their patience.
        patience = max(timeout, default_pg_timeout)
        super().__init__(timeout=patience, start_method=start_method, **ddp)
        self._dials = Dials(
            find_topology(topology),
            communication,
            super_learner_size,
            order,
            mixing_gain,
            gossip_every,
            wire_dtype,
            max_staleness,
            after_evaluation,
            save_learners,
            seed,
            timeout,
        )
        self._forget_run()
        self._in_step = False
        self._saved_learner: Mapping[str, Any] | None = None
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
        size = self._dials.super_learner_size
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
        asynchronous = self._dials.communication == "async"
        refuse_unsupported(trainer, self, asynchronous)
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self._groups = make_groups(self.super_learner_size, self._dials.timeout)
        self._flat = FlatParameters(self.model, shards=self.super_learner_size)
        self._check_same_layout(self._flat)
        # All learners start from the weights of learner 0, as in DDP.
        _sync_module_states(self.model)
        if self.super_learner_size > 1:
            self.configure_ddp()
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)
        self._coordinator = self._start_coordinator()
        self._failures = self._report_failures_to(self._coordinator)
        signals.handle_locally(trainer)

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
        assert self._groups is not None
        assert self._coordinator is not None
        self._flat.check_views()
        self._restore_learner(self._flat)
        communication = self._make_communication(self._flat, self._groups)
        self._consensus = ConsensusModel(self._flat, communication, self._coordinator)
        self._communication = communication
        self._coordinator.when_failed(communication.release)
        communication.start()

    @override
    def on_train_end(self) -> None:
        if self._consensus is not None and self._communication is not None:
            with self._failures.named():
                self.last_consensus = self._consensus.enter("end of training")
                self._communication.stop()
            self._statistics = self._communication.statistics()
            self._communication = self._consensus = None
        super().on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._coordinator is not None:
            self._failures.announce(exception)
            if self.is_global_zero:
                self._coordinator.linger(timedelta(seconds=1))
        self._abort_communication()

    @override
    def teardown(self) -> None:
        self._abort_communication()
        if self._coordinator is not None:
            self._coordinator.stop()
        trainer = self._trainer_or_none()
        if trainer is not None:
            signals.restore(trainer)
        self._forget_run()
        super().teardown()

    # --- the step

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._coordinator is not None:
            with self._failures.named():
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
        communication = self._communication
        if communication is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        step = _Step(closure, communication)
        with self._failures.named():
            output = super().optimizer_step(optimizer, step, model, **kwargs)
            communication.after_update()
        return output

    # --- evaluation and checkpoints: the consensus model

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._consensus is not None:
            with self._failures.named():
                self.last_consensus = self._consensus.enter("validation")

    @override
    def on_validation_end(self) -> None:
        if self._consensus is not None:
            self._consensus.leave(adopt=self._dials.after_evaluation == "adopt")
        super().on_validation_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The consensus model; called by all learners, as Lightning does.

        After a failure, when the others can no longer be asked, the local weights.
        """
        consensus = self._consensus
        if consensus is None or self._interrupted():
            return super().lightning_module_state_dict()
        if consensus.entered:
            return self._cloned_state_dict()
        with self._failures.named():
            self.last_consensus = consensus.enter("checkpoint")
        state = self._cloned_state_dict()
        consensus.leave(adopt=False)
        return state

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
        if self._dials.save_learners and self._flat and not self._interrupted():
            learners: list[Any] = [None] * self.world_size
            mine = self._learner_state(self._flat)
            dist.gather_object(mine, learners if self.is_global_zero else None)
            checkpoint[_NAMESPACE] = learners[:: self.super_learner_size]
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_model_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True
    ) -> None:
        super().load_model_state_dict(checkpoint, strict)
        learners = checkpoint.get(_NAMESPACE) or ()
        if len(learners) == self.num_super_learners:
            index = self.global_rank // self.super_learner_size
            self._saved_learner = learners[index]
        elif learners:
            rank_zero_info(
                f"The checkpoint holds {len(learners)} super-learners and this job has "
                f"{self.num_super_learners}: all start from their mean."
            )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        saved = self._saved_learner
        states = checkpoint if saved is None else {"optimizer_states": saved["states"]}
        super().load_optimizer_state_dict(states)

    def _learner_state(self, flat: FlatParameters) -> dict[str, Any] | None:
        if self.global_rank % self.super_learner_size:
            return None
        consensus = self._consensus
        local = consensus.local_weights if consensus is not None else None
        states = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
        return {"weights": local or flat.vectors, "states": states}

    @torch.no_grad()
    def _restore_learner(self, flat: FlatParameters) -> None:
        if self._saved_learner is not None:
            saved = self._saved_learner["weights"]
            for vector, weights in zip(flat.vectors, saved, strict=True):
                vector.copy_(weights)
        self._saved_learner = None

    # --- collectives and their scope

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._interrupted():
            return
        if self._coordinator is None or self._communication is None:
            super().barrier(*args, **kwargs)
            return
        self._meet(str(args[0]) if args else str(kwargs.get("name") or "barrier"))

    @override
    def reduce(
        self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean"
    ) -> Tensor:
        if group is None and self._alone_in_step():
            return tensor
        group = group or self._group_of_step()
        if group is None and isinstance(tensor, Tensor):
            self._meet("reduce")
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False
    ) -> Tensor:
        if group is None and self._alone_in_step():
            return tensor.unsqueeze(0)
        group = group or self._group_of_step()
        if group is None:
            self._meet("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @override
    def broadcast(self, obj: _Broadcast, src: int = 0) -> _Broadcast:
        self._meet("broadcast")
        return super().broadcast(obj, src)

    def _meet(self, name: str) -> None:
        """Comes to a collective of all learners only when all have come.

        Learners that gossip asynchronously may be far apart, or on the way to another
        collective; here one can wait for long, and be told.
        """
        asynchronous = self._dials.communication == "async"
        if self._coordinator is None or self._communication is None:
            return
        if asynchronous or name not in ("reduce", "all_gather", "broadcast"):
            with self._failures.named():
                self._coordinator.meet(name)

    def _group_of_step(self) -> dist.ProcessGroup | None:
        """The super-learner inside a step of an asynchronous learner, else the world.

        Within a step nobody but the own super-learner is known to come.
        """
        waits = self._dials.communication != "async" or not self._in_step
        if self._communication is None or self._groups is None or waits:
            return None
        return self._groups.gradients

    def _alone_in_step(self) -> bool:
        asynchronous = self._dials.communication == "async"
        running = self._communication is not None
        return (
            running
            and asynchronous
            and self._in_step
            and (self.super_learner_size == 1)
        )

    # --- private: what set-up makes and refuses

    def _has_peers(self) -> bool:
        size = self.super_learner_size
        if self.world_size % size:
            raise ValueError(
                f"`super_learner_size` must divide the number of learners "
                f"{self.world_size}, got {size}"
            )
        if self.num_super_learners == 1 and self.world_size > 1:
            rank_zero_info(
                f"All {self.world_size} learners form one super-learner, which is "
                "plain synchronous allreduce (ddp). To gossip, set "
                "`super_learner_size` to a proper divisor of "
                f"{self.world_size}, or use several machines."
            )
        return self.num_super_learners > 1

    def _make_communication(
        self, flat: FlatParameters, groups: Groups
    ) -> Communication:
        dials, vectors = self._dials, flat.vectors
        transport = DistributedTransport(groups.counterparts)
        node = Node(groups.shards)
        schedule = Schedule(
            dials.topology, self.num_super_learners, dials.mixing_gain, dials.seed
        )
        if dials.communication == "async":
            options = GossipOptions(
                dials.effective_order,
                dials.gossip_every,
                dials.wire_dtype,
                dials.max_staleness,
                dials.timeout,
            )
            lost_peer = self._failures.lost_peer
            return Gossip(vectors, transport, node, schedule, options, lost_peer)
        mixer = RoundMixer(vectors, transport, node, schedule, dials.timeout)
        if dials.communication == "sync":
            return Synchronous(mixer, dials.effective_order, dials.gossip_every)
        return DelayByOne(mixer, dials.gossip_every)

    def _start_coordinator(self) -> Coordinator:
        root = dist.distributed_c10d._get_default_store()
        store = PrefixStore(_NAMESPACE, root)
        # Each `fit` of a process group has keys of its own.
        run = self.broadcast(store.add("runs", 1) if self.is_global_zero else None)
        coordinator = Coordinator(
            PrefixStore(f"{_NAMESPACE}/{run}", root),
            self.global_rank,
            self.world_size,
            self._dials.timeout,
        )
        coordinator.start()
        return coordinator

    def _report_failures_to(self, coordinator: Coordinator) -> FailureReport:
        first = self.global_rank - self.global_rank % self.super_learner_size
        ranks = [first + n for n in range(self.super_learner_size)]
        return FailureReport(coordinator, self.global_rank, ranks)

    def _check_same_layout(self, flat: FlatParameters) -> None:
        layout = flat.layout()
        if self.broadcast(layout) != layout:
            raise ValueError(
                f"the model of learner {self.global_rank} differs from that of learner "
                "0 in the name, shape or dtype of a weight: all learners must build "
                "the same model"
            )

    def _abort_communication(self) -> None:
        if self._communication is not None:
            self._statistics = self._communication.statistics()
            self._communication.abort()
        self._communication = self._consensus = None

    def _interrupted(self) -> bool:
        trainer = self._trainer_or_none()
        return trainer is not None and trainer.interrupted

    def _trainer_or_none(self) -> pl.Trainer | None:
        return getattr(self.lightning_module, "_trainer", None)

    def _forget_run(self) -> None:
        self._coordinator: Coordinator | None = None
        self._communication: Communication | None = None
        self._consensus: ConsensusModel | None = None
        self._flat: FlatParameters | None = None
        self._groups: Groups | None = None


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
