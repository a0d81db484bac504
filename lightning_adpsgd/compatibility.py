"""What cannot work with gossip is refused at set-up, with the reason and a way out."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


def refuse_unsupported(
    trainer: pl.Trainer, strategy: ParallelStrategy, asynchronous: bool
) -> None:
    """Refuses settings of a Trainer that the strategy cannot honour.

    Raises:
        ValueError: Names the argument, what it may be, and what it is.
    """
    refuse_device(strategy.root_device)
    if strategy._layer_sync is not None:
        raise ValueError(
            "`sync_batchnorm` must be False, got True: it would make all learners wait "
            "for one another in each forward; batch-norm statistics are averaged with "
            "the parameters"
        )
    if asynchronous:
        _refuse_world_clocks(trainer)


def refuse_device(device: torch.device) -> None:
    """Refuses a device that the engine does not run on.

    Raises:
        ValueError: Names it.
    """
    if device.type != "cpu":
        raise ValueError(
            "`accelerator` must be 'cpu' for gossip in this release, got "
            f"{device.type!r}"
        )


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


def refuse_with_work_sharing(trainer: pl.Trainer) -> None:
    """Refuses what counts batches or steps of one learner, which all have differently.

    Raises:
        ValueError: Names the argument, what it may be, and what it is.
    """
    connector = trainer._accelerator_connector
    limits: list[tuple[str, Any, Any, str]] = [
        (
            "use_distributed_sampler",
            connector.use_distributed_sampler,
            True,
            "the samples of each learner are chosen here; give all learners all data",
        ),
        (
            "limit_train_batches",
            trainer.limit_train_batches,
            1.0,
            "no learner knows its number of batches; use torch.utils.data.Subset "
            "(also instead of `overfit_batches`)",
        ),
        (
            "val_check_interval",
            trainer.val_check_interval,
            1.0,
            "learners come to a number of batches at different times, or never",
        ),
        (
            "max_steps",
            trainer.max_steps,
            -1,
            "learners make different numbers of steps; use `max_epochs`",
        ),
        (
            "min_steps",
            trainer.min_steps,
            None,
            "learners make different numbers of steps; use `min_epochs`",
        ),
    ]
    for name, value, allowed, reason in limits:
        if value != allowed:
            raise ValueError(
                f"`{name}` must be {allowed!r} with `work_sharing=True`, got "
                f"{value!r}: {reason}"
            )
    _refuse_callbacks_with_work_sharing(trainer)


def _refuse_callbacks_with_work_sharing(trainer: pl.Trainer) -> None:
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, ModelCheckpoint) and callback._every_n_train_steps:
            raise ValueError(
                "`every_n_train_steps` must not be set with `work_sharing=True`, got "
                f"{callback._every_n_train_steps}: learners come to a number of steps "
                "at different times, or never; use "
                "`lightning_adpsgd.checkpoints.SaveWithinEpoch`"
            )
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise ValueError(
                f"`{type(callback).__name__}` cannot be used with `work_sharing=True`: "
                "it trains for a number of steps and then begins the epoch anew; find "
                "the value beforehand, without work sharing"
            )
    step = trainer.lightning_module.training_step
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise ValueError(
            "`training_step` must not take `dataloader_iter` with `work_sharing=True`: "
            "which batch is the last would be known too late; take `batch`"
        )
