"""The options of the strategies: their documentation, defaults and types, in one place.

`HADPSGDOptions` is a mix-in that precedes one of Lightning's strategies among the bases
of a class. The Trainer's strategy and Fabric's share its constructor.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from lightning_adpsgd.coordination.groups import wrap_in_ddp
from lightning_adpsgd.coordination.unfreezing import Unfreezing
from lightning_adpsgd.dials import (
    DEFAULT_CPU_SHARE,
    DEFAULT_TIMEOUT,
    Communication,
    Dials,
    InsideName,
    ModelParallel,
    WireDtype,
    as_dtype,
    as_duration,
    as_inside,
    as_mode,
    as_plain,
)
from lightning_adpsgd.islands.rendezvous import ENVIRONMENT_VARIABLE
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO
from lightning_adpsgd.strategy.checkpoints.saving import BackgroundCheckpointIO
from lightning_adpsgd.strategy.compatibility import (
    check_arguments_of_shards,
    check_ddp_arguments,
    check_island,
)
from lightning_adpsgd.strategy.job import Job
from lightning_adpsgd.topology.named import TopologyLike, find_topology
from lightning_adpsgd.topology.partition import Partition

if TYPE_CHECKING:

    class _DDPStrategy:
        """The attributes that the `DDPStrategy` of the Trainer and of Fabric share."""

        _ddp_kwargs: dict[str, Any]
        _checkpoint_io: CheckpointIO | None

        def __init__(self, *, timeout: timedelta, **ddp: Any) -> None: ...

        @property
        def num_processes(self) -> int: ...

        @property
        def world_size(self) -> int: ...

        @property
        def global_rank(self) -> int: ...

else:
    _DDPStrategy = object


class HADPSGDOptions(_DDPStrategy):
    """The arguments of a strategy, and how they divide a job into super-learners."""

    _has_trainer: ClassVar[bool] = True

    def __init__(
        self,
        topology: TopologyLike = "ring",
        communication: Communication = "async",
        super_learner_size: int | Literal["node"] | Sequence[int] = "node",
        *,
        inside: InsideName | ModelParallel = "ddp",
        order: Order | None = None,
        mixing_gain: float = 1.0,
        gossip_every: int = 1,
        wire_dtype: WireDtype | Literal["auto"] | None = "auto",
        exchange_frozen: bool = True,
        cpu_share: float = DEFAULT_CPU_SHARE,
        work_sharing: bool | None = None,
        after_evaluation: Literal["restore", "adopt"] = "restore",
        save_learners: bool = False,
        islands: str | None = None,
        seed: int = 0,
        timeout: timedelta | float | None = None,
        max_staleness: int | None = None,
        **ddp: Any,
    ) -> None:
        """Stores and checks the options; nothing communicates before training.

        The options up to `inside` are the ones to choose first. Those after it say who
        trains on which samples, who takes part and what is saved, or serve tuning, and
        those from `timeout` on help when something breaks.

        Args:
            topology: name of a topology (`lightning_adpsgd.topology.TOPOLOGIES`),
                or your own: a mixing matrix, several matrices or matchings that take
                turns, or a function (`find_topology`).
            communication: when averages are taken. "sync": at the step boundary, where
                all learners wait. "delay_by_one": during the next gradient. "async": in
                the background, without waiting for any learner. "ready_pairs": at the
                step boundary, with a learner that has also reached its own, if one
                arrives in time. `lightning_adpsgd.Async` says whether exchanges look
                ahead, and `lightning_adpsgd.ReadyPairs` bounds the wait.
            super_learner_size: number of learners that allreduce their gradients; it
                must divide the number of learners. "node": all learners of one machine.
                (2, 4): the first two learners form one super-learner and the next four
                another; the mean weighs both equally (docs/concepts.md). With
                `islands`, a sequence lists the sizes that islands may have; it must be
                the same in all of them.
            inside: how the learners of a super-learner share the work. "ddp": each
                holds the whole model, and they allreduce gradients. "model_parallel"
                (with a Trainer only): they hold one model together, which its
                `configure_model` shards with `fully_shard` over
                ``self.device_mesh["data_parallel"]`` (docs/large-models.md).
                `lightning_adpsgd.ModelParallel` adds tensor parallelism.
            order: whether the average is taken after the optimizer step
                ("step_then_average", the default) or between gradient and step
                ("average_then_step", which "delay_by_one" always uses).
            mixing_gain: gamma, 0 < gamma <= 1, the fraction of each average that is
                applied: T_gamma = (1 - gamma) I + gamma T.
            gossip_every: number of optimizer steps per round of averaging.
            wire_dtype: dtype in which "async" and "ready_pairs" send weights, or its
                name: a floating-point type such as "bfloat16", or `torch.int8` or
                "int4" for that many bits per weight on a lattice. None: the dtype
                of the weights. "auto": as None, but 8 or 4 bits per weight to any peer
                with which an uncompressed exchange would last more than half an
                optimizer step. Averages are always computed in float32 or better.
            exchange_frozen: whether weights that are frozen at the start are averaged
                too. With `find_unused_parameters=True`, weights that are unfrozen later
                then have their gradients reduced inside a super-learner. False: they do
                not travel, and must stay frozen, as in fine-tuning with adapters.
            cpu_share: largest share of the training time that exchanges may take in
                "async", in (0, 1] (docs/concepts.md); 1: no bound.
            work_sharing: whether an epoch is a pool from which each learner takes
                batches as fast as it can; for "async" and "ready_pairs" with a Trainer.
                True: each sample is used once per epoch, with `islands` once among all
                islands. False: all learners get equal shares, and each island samples
                independently. None: learners share the epoch where Lightning would
                otherwise insert a DistributedSampler. They do not with `islands`, or
                where something counts the batches of one learner, such as `max_steps`
                (docs/work-sharing.md).
            after_evaluation: "restore" puts the local weights back after an evaluation
                of the mean, "adopt" continues from the mean.
            save_learners: whether a checkpoint also holds the state of every learner:
                weights, optimizer state, schedules, random generators, place in the
                epoch and round of gossip. A resume with the same number of learners
                then continues exactly. Schedules and the place in the epoch need a
                Trainer.
            islands: URL of the rendezvous, ``tcp://host:port`` or
                ``tcp://host:port/job``. This job is then a single super-learner, an
                island, and other islands may join and leave while it trains
                (docs/islands.md). None: the environment variable
                LIGHTNING_ADPSGD_ISLANDS; if that is unset too, all super-learners
                belong to one job.
            seed: seed of random topologies; must be the same in all learners.
            timeout: longest silence of a peer before it counts as lost, and the time
                limit of each collective: a timedelta, or a number of seconds. By
                default 5 minutes, and 30 minutes for Lightning's own collectives.
                Islands notice a loss within 2.25 to 3 s, whatever its value.
            max_staleness: longest number of optimizer steps without an exchange, after
                which a learner in "async" waits for one; None: it never waits. An
                exchange whose parts were refused counts too. It does not bound the age
                of the averages that are merged.
            **ddp: further arguments of Lightning's `DDPStrategy`, such as
                `start_method`. Options of DDP itself apply inside a super-learner.

        Raises:
            TypeError: An argument has a wrong type, or is unknown.
            ValueError: An argument is out of its bounds.
        """
        duration, mode = as_duration(timeout), as_mode(communication)
        kind, shared_by = as_inside(inside)
        super().__init__(timeout=duration or default_pg_timeout, **ddp)
        check_ddp_arguments(self._ddp_kwargs, type(self).__name__)
        if not self._has_trainer:
            _refuse_in_fabric(work_sharing, kind)
        if kind == "model_parallel":
            check_arguments_of_shards(ddp)
        self.dials = Dials(
            topology=find_topology(topology),
            **mode,
            super_learner_size=_as_sizes(super_learner_size),
            inside=kind,
            order=order,
            mixing_gain=mixing_gain,
            gossip_every=gossip_every,
            wire_dtype=as_dtype(wire_dtype),
            exchange_frozen=exchange_frozen,
            cpu_share=cpu_share,
            work_sharing=work_sharing,
            after_evaluation=after_evaluation,
            save_learners=save_learners,
            islands=os.environ.get(ENVIRONMENT_VARIABLE) or None
            if islands in (None, "")
            else islands,
            seed=seed,
            timeout=DEFAULT_TIMEOUT if duration is None else duration,
            max_staleness=max_staleness,
            tensor_parallel_size=shared_by,
        )

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The `CheckpointIO` in use; by default it writes files whole or not at all.

        With a Trainer, the default can also write in the background. One from the user
        is used as it is; a wrapper around none gets a `WholeCheckpointIO`.
        """
        # Not in the constructor: afterwards Lightning checks whether the user gave one.
        if self._checkpoint_io is None:
            whole = WholeCheckpointIO()
            beside = BackgroundCheckpointIO(whole)
            self._checkpoint_io = beside if self._has_trainer else whole
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            # No effect if the user's wrapper already has one.
            self._checkpoint_io.checkpoint_io = WholeCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def super_learner_size(self) -> int:
        """N, the learners in a super-learner; those of this one if sizes differ."""
        size = self.dials.super_learner_size
        if isinstance(size, int):
            return size
        if self.dials.islands is not None:
            return self.world_size
        is_node = isinstance(size, str)
        return self.num_processes if is_node else self.partition.size(self.global_rank)

    @property
    def partition(self) -> Partition:
        """Which learners form which super-learner.

        Raises:
            ValueError: The learners do not form whole super-learners.
        """
        sizes, shared_by = self._sizes(), self.dials.tensor_parallel_size
        for size in sizes:
            if size % shared_by:
                raise ValueError(
                    "`tensor_parallel_size` must divide the number of learners of a "
                    f"super-learner, {size}, got {shared_by}"
                )
        return Partition(sizes, shared_by)

    def _sizes(self) -> tuple[int, ...]:
        num_learners, sizes = self.world_size, self.dials.super_learner_size
        if isinstance(sizes, tuple) and self.dials.islands is None:
            if sum(sizes) != num_learners:
                raise ValueError(
                    "the sum of `super_learner_size` must be the number of learners "
                    f"{num_learners}, got {sizes}, which is {sum(sizes)}"
                )
            return sizes
        size = self.super_learner_size
        if num_learners % size:
            raise ValueError(
                f"`super_learner_size` must divide the number of learners "
                f"{num_learners}, got {size}"
            )
        return (size,) * (num_learners // size)

    @property
    def num_super_learners(self) -> int:
        """S, the number of super-learners."""
        return self.partition.num_super_learners

    def check_peers(self) -> bool:
        """Whether super-learners gossip; if there is only one, says so."""
        if self.dials.islands is None:
            return has_peers(self.partition)
        check_island(self.dials.super_learner_size, self.world_size)
        return True

    @cached_property
    def _unfreezing(self) -> Unfreezing:
        return Unfreezing(self.dials.exchange_frozen, self._ddp_kwargs)

    def _wrap(
        self, module: nn.Module, job: Job, device_ids: list[int] | None
    ) -> DistributedDataParallel:
        arguments = {"device_ids": device_ids, **self._ddp_kwargs}
        inside = job.groups, job.flat.device
        wrap = partial(wrap_in_ddp, module, *inside, **arguments)
        job.wrapped = self._unfreezing.make(module, wrap)
        return job.wrapped


def has_peers(partition: Partition) -> bool:
    """Whether there are several super-learners; if not, prints why nothing gossips."""
    if partition.num_super_learners > 1:
        return True
    num_learners = partition.num_learners
    if num_learners == 1:
        rank_zero_info("There is only one learner, so nothing gossips: set `devices`")
    else:
        rank_zero_info(
            f"All {num_learners} learners form one super-learner, which is plain "
            "synchronous allreduce (ddp). To gossip, set `super_learner_size` to a "
            f"proper divisor of {num_learners}, or use several machines."
        )
    return False


def _as_sizes(given: Any) -> Any:
    is_text = isinstance(given, str)
    several = isinstance(given, Sequence) and not is_text
    return tuple(map(as_plain, given)) if several else given


def _refuse_in_fabric(work_sharing: bool | None, inside: InsideName) -> None:
    if work_sharing:
        raise ValueError(
            "`work_sharing` must be False in Fabric, got True: your program draws "
            "the batches itself; use a Trainer to share epochs"
        )
    if inside == "model_parallel":
        raise ValueError(
            '`inside` must be "ddp" in Fabric, got "model_parallel": use a Trainer'
        )
