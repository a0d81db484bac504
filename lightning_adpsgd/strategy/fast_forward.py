"""Moves a new Trainer forward to the position of the weights that it has taken.

It then counts the same optimizer steps and epochs as the other islands, so that its
learning-rate schedules agree with theirs and it ends when they end. It starts their
current epoch at the first batch.
"""

import warnings
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_adpsgd.gossip.protocol import Position


def catch_up(trainer: pl.Trainer, position: Position) -> None:
    """Moves a Trainer forward to a position; does nothing if it is already past it."""
    steps = position.steps - trainer.global_step
    epochs = max(0, position.epochs - trainer.current_epoch)
    if steps <= 0:
        return
    loop = trainer.fit_loop.epoch_loop
    loop._batches_that_stepped += steps
    automatic = loop.automatic_optimization.optim_progress.optimizer.step.total
    manual = loop.manual_optimization.optim_step_progress.total
    is_automatic = trainer.lightning_module.automatic_optimization
    progress: Any = automatic if is_automatic else manual
    progress.ready += steps
    progress.completed += steps
    current: Any = trainer.fit_loop.epoch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + epochs)
    for config in trainer.lr_scheduler_configs:
        _step(config, steps if config.interval == "step" else epochs)


def batch_size(batch: Any) -> int:
    """The number of samples of a batch, as Lightning counts them; 0 if unknown."""
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:
        return 0


def _step(config: LRSchedulerConfig, num: int) -> None:
    if isinstance(config.scheduler, ReduceLROnPlateau):
        return  # it follows the losses that it sees
    with warnings.catch_warnings():
        # The optimizer's steps, which torch would miss, were made elsewhere.
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        for _ in range(num // config.frequency):
            config.scheduler.step()  # pyright: ignore[reportCallIssue]
