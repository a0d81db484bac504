"""Callbacks of programs: those of Lightning, of this package, and what users write."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from typing_extensions import override

from lightning_adpsgd import callbacks as own_callbacks


class Gathers(Callback):
    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ones = trainer.strategy.all_gather(torch.ones(1))
        assert len(ones) == trainer.world_size


class Meets(Callback):
    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.barrier()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.barrier()


class CountsBatches(Callback):
    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number = trainer.estimated_stepping_batches
        assert 0 < number < 10_000, number


class StopsLater(Callback):
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        trainer.should_stop = trainer.current_epoch == 1


class SavesBeforeEpochs(Callback):
    @override
    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        trainer.save_checkpoint(f"before-{trainer.current_epoch}.ckpt")


def _average() -> Callback:
    # Lightning has it from 2.6 on.
    average = getattr(lightning_callbacks, "EMAWeightAveraging", None)
    return average(decay=0.9) if average is not None else Callback()


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "none": Callback,
    "early stopping": partial(EarlyStopping, "val_loss", patience=0, strict=False),
    "moving average": _average,
    "swa": partial(lightning_callbacks.StochasticWeightAveraging, 0.01, 1),
    "timer": partial(lightning_callbacks.Timer, "00:01:00:00"),
    "accumulation": partial(
        lightning_callbacks.GradientAccumulationScheduler, {0: 1, 1: 2}
    ),
    "gossip": own_callbacks.GossipMonitor,
    "consensus": own_callbacks.ConsensusMonitor,
    "gathers": Gathers,
    "meets": Meets,
    "counts batches": CountsBatches,
    "stops later": StopsLater,
    "saves before epochs": SavesBeforeEpochs,
}
# None: the Trainer writes no checkpoints.
CHECKPOINTS: dict[str, Callable[[], Callback] | None] = {
    "none": None,
    "default": Callback,
    "best": partial(ModelCheckpoint, monitor="val_loss", filename="best"),
    "last": partial(ModelCheckpoint, save_last=True),
    "third steps": partial(ModelCheckpoint, every_n_train_steps=3, save_top_k=-1),
    "best two": partial(ModelCheckpoint, monitor="val_loss", save_top_k=2),
    "end of training epochs": partial(
        ModelCheckpoint, save_on_train_epoch_end=True, save_top_k=-1
    ),
    "weights": partial(ModelCheckpoint, save_weights_only=True),
    "by time": partial(
        ModelCheckpoint, train_time_interval=timedelta(milliseconds=200)
    ),
}
