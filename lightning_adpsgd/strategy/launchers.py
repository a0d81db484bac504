"""The start of the learners: the launch, its checks, and a Trainer's checkpoint.

The Trainer chooses its checkpoint before it sets up its strategy. Both happen in the
launcher, which is therefore the first of our objects to see the Trainer.
"""

import itertools
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_adpsgd.coordination.failures import FailureReport
from lightning_adpsgd.coordination.startup.checks import (
    LaunchPlacement,
    check_start,
    open_store,
)
from lightning_adpsgd.coordination.store import Coordinator
from lightning_adpsgd.dials import Dials
from lightning_adpsgd.strategy.checkpoints.last_good import whole_checkpoint_path
from lightning_adpsgd.strategy.compatibility import one_gpu_per_learner
from lightning_adpsgd.strategy.job import NAMESPACE
from lightning_adpsgd.strategy.overrides import Overrides

_PROGRAMS = itertools.count()


def connect_learners(
    strategy: DDPStrategy | FabricDDPStrategy,
    dials: Dials,
    connect: Callable[[], None],
) -> FailureReport | None:
    """Lets Lightning `connect` the learners, once all are there and fit.

    Returns:
        The report of failures outside of training; None for a single learner.

    Raises:
        StartUpError: A learner did not come, or a check failed.
    """
    # Held until torch has its own connection, which then shares the listener.
    store = _check_launch(strategy, dials)
    with one_gpu_per_learner():
        connect()
    del store
    place = strategy.global_rank, strategy.world_size
    return failures_outside_training(*place, dials.timeout)


def _check_launch(
    strategy: DDPStrategy | FabricDDPStrategy, dials: Dials
) -> Store | None:
    """Waits for all learners; returns the job's store, or None for a single learner."""
    environment = strategy.cluster_environment
    rank, size = strategy.global_rank, strategy.world_size
    if environment is None or size == 1:
        return None
    patience = dials.start_patience
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    else:
        address, port = environment.main_address, environment.main_port
        store = open_store(address, port, rank, size, patience)
    placement = LaunchPlacement(strategy.num_processes, strategy.local_rank)
    check_start(store, rank, size, vars(dials), placement, patience)
    return store


def failures_outside_training(
    rank: int, size: int, timeout: timedelta
) -> FailureReport | None:
    """Makes the report of failures outside of training; all learners must call it.

    A single learner has none.
    """
    if size == 1:
        return None
    # All learners run the same program, and so come here equally often.
    store: Any = _DefaultStore(f"{NAMESPACE}/outside/{next(_PROGRAMS)}")
    return FailureReport(Coordinator(store, rank, size, timeout), rank, [])


class _DefaultStore:
    """A part of the store of torch's default group, which it does not keep alive."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, method: str, *words: Any) -> Any:
        if not dist.is_initialized():  # as if its host had gone
            raise RuntimeError("the program has ended the process group")
        root = dist.distributed_c10d._get_default_store()
        return getattr(PrefixStore(self._prefix, root), method)(*words)


def launch_from_whole(
    launch: Callable[..., Any],
    *args: Any,
    trainer: pl.Trainer | None = None,
    **kwargs: Any,
) -> Any:
    """Launches a Trainer's learners, which resume from intact checkpoints only."""
    overrides = Overrides()
    if trainer is not None:
        choose = partial(whole_checkpoint_path, trainer)
        overrides.wrap(trainer._checkpoint_connector, "_parse_ckpt_path", choose)
    try:
        return launch(*args, trainer=trainer, **kwargs)
    finally:
        overrides.undo()
