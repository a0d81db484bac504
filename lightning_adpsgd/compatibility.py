"""What cannot work with gossip is refused at set-up, with the reason and a way out."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.strategies import ParallelStrategy


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
