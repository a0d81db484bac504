"""How the learners of a Trainer begin: launched by Lightning, checked, resumed.

The Trainer chooses its checkpoint before it sets its strategy up. The launcher runs all
of it, and so is the first of ours to see the Trainer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from torch._C._distributed_c10d import Store
from typing_extensions import override

from lightning_adpsgd.checkpoints.last_good import whole_checkpoint_path
from lightning_adpsgd.dials import Dials
from lightning_adpsgd.startup.checks import LaunchPlacement, check_start, open_store
from lightning_adpsgd.trainer.overrides import Overrides


@final
class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each learner."""

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        with _whole_checkpoints(trainer):
            return super().launch(function, *args, trainer=trainer, **kwargs)


@final
class ProcessLauncher(_MultiProcessingLauncher):
    """Makes a process for each learner."""

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        with _whole_checkpoints(trainer):
            return super().launch(function, *args, trainer=trainer, **kwargs)


def check_launch(strategy: DDPStrategy, dials: Dials) -> Store | None:
    """Brings all learners together before there is any process group.

    Args:
        strategy: strategy that knows its ranks.
        dials: must be equal in all learners.

    Returns:
        The job's store; none for a learner alone.
    """
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
    seats = LaunchPlacement(strategy.num_processes, strategy.local_rank)
    check_start(store, rank, size, dials, seats, patience)
    return store


@contextmanager
def _whole_checkpoints(trainer: pl.Trainer | None) -> Iterator[None]:
    overrides = Overrides()
    if trainer is not None:
        connector = trainer._checkpoint_connector
        choose = partial(whole_checkpoint_path, trainer)
        overrides.replace("launchers", connector, "_parse_ckpt_path", choose)
    try:
        yield
    finally:
        overrides.undo()
