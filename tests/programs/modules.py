"""The modules of programs: optimizers, schedules, what is logged, and hooks."""

import os
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from tests.programs.faults import say_that_fit_begins, with_fault
from tests.programs.loaders import unpack
from tests.programs.models import MODELS
from tests.programs.program import Arguments, Program

Weights = list[nn.Parameter]
# LBFGS ends by its own loss otherwise, and so at another step than others under DDP.
_TO_THE_END: Arguments = {"tolerance_grad": 0.0, "tolerance_change": 0.0}
OPTIMIZERS: dict[str, Callable[[Weights], list[optim.Optimizer]]] = {
    "sgd": lambda w: [optim.SGD(w, 0.05)],
    "momentum": lambda w: [optim.SGD(w, 0.05, momentum=0.9, nesterov=True)],
    "adam": lambda w: [optim.Adam(w, 0.01, amsgrad=True)],
    "adamw": lambda w: [optim.AdamW(w, 0.01)],
    "lbfgs": lambda w: [optim.LBFGS(w, 0.1, max_iter=3, **_TO_THE_END)],
    "adagrad": lambda w: [optim.Adagrad(w, 0.01)],
    "groups": lambda w: [optim.SGD([{"params": w[:1]}, {"params": w[1:]}], 0.05)],
    "by hand": lambda w: [optim.SGD(w, 0.05)],
    "two by hand": lambda w: [optim.SGD(w[:1], 0.05), optim.Adam(w[1:], 0.01)],
}
BY_HAND = ("by hand", "two by hand")


def _one_cycle(module: pl.LightningModule, optimizer: optim.Optimizer) -> Arguments:
    steps = int(module.trainer.estimated_stepping_batches) + 1
    cycle = OneCycleLR(optimizer, 0.1, max(2, steps), cycle_momentum=False)
    return {"scheduler": cycle, "interval": "step"}


def _warm_up(_: pl.LightningModule, optimizer: optim.Optimizer) -> Arguments:
    parts = LinearLR(optimizer, 0.1, total_iters=1), ExponentialLR(optimizer, 0.9)
    return {"scheduler": SequentialLR(optimizer, [*parts], [1])}


def _plateau(_: pl.LightningModule, optimizer: optim.Optimizer) -> Arguments:
    plateau = ReduceLROnPlateau(optimizer, patience=0)
    return {"scheduler": plateau, "monitor": "val_loss", "strict": False}


Schedule = Callable[[pl.LightningModule, optim.Optimizer], Arguments]
SCHEDULES: dict[str, Schedule] = {
    "none": lambda _, one: {},
    "each epoch": lambda _, one: {"scheduler": StepLR(one, 1)},
    "each step": lambda _, one: {"scheduler": StepLR(one, 2), "interval": "step"},
    "plateau": _plateau,
    "one cycle": _one_cycle,
    "function": lambda _, one: {"scheduler": LambdaLR(one, lambda e: 0.9**e)},
    "warm-up": _warm_up,
}
LOGGED: dict[str, Arguments | None] = {
    "nothing": None,
    "epoch": {"on_step": False, "on_epoch": True},
    "mean of all": {"on_step": False, "on_epoch": True, "sync_dist": True},
    "step and epoch": {"on_step": True, "on_epoch": True},
    "all of both": {"on_step": True, "on_epoch": True, "sync_dist": True},
    "progress bar": {"prog_bar": True},
}
METRICS: dict[str, tuple[str, ...]] = {"none": (), "accuracy": ("fit", "validate")}
RETURNED: dict[str, Callable[[Tensor, int], Any]] = {
    "loss": lambda loss, _: loss,
    "dictionary": lambda loss, _: {"loss": loss, "more": loss.detach()},
    "none at times": lambda loss, batch_idx: loss if batch_idx % 3 < 2 else None,
}
SLOW: dict[str, int | None] = {"none": None, "learner 0": 0, "learner 1": 1}
# What learners wait in a step: long enough for exchanges, and for one to fall behind.
_STEP_S, _SLOW_STEP_S = 0.003, 0.03


class Net(pl.LightningModule):
    """Trains a model as a program says, and keeps which rows it has seen.

    Attributes:
        seen: for each batch, its epoch and the places of its rows.
        has_stepped: whether `training_step` was called.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.program, self.seen = program, list[tuple[int, list[int]]]()
        self.has_stepped = False
        self.model = program.pick("model", MODELS)()
        metrics = program.pick("metrics", METRICS)
        self.metrics = nn.ModuleDict({name: MulticlassAccuracy(3) for name in metrics})
        self.automatic_optimization = program.choices.get("optimizer") not in BY_HAND

    @override
    def configure_optimizers(self) -> Any:
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        optimizers = self.program.pick("optimizer", OPTIMIZERS)(weights)
        schedule = self.program.pick("schedule", SCHEDULES)(self, optimizers[0])
        return (optimizers, [schedule]) if schedule else optimizers

    # --- steps

    @override
    def forward(self, rows: Tensor) -> Tensor:
        return self.model(rows.to(next(self.parameters()).dtype))

    def loss(self, batch: Any, metric: str = "") -> Tensor:
        """The batch's loss; also counts for a metric, if there is one of the name."""
        rows, classes, _ = unpack(batch)
        out = self(rows).float()
        if metric in self.metrics:
            accuracy: Any = self.metrics[metric]
            accuracy(out, classes)
            self.log(f"{metric}_accuracy", accuracy, on_epoch=True)
        return nn.functional.cross_entropy(out, classes)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.has_stepped = True
        is_slow = self.global_rank == self.program.pick("slow", SLOW)
        time.sleep(_SLOW_STEP_S if is_slow else _STEP_S)
        loss = self._loss_of_training(batch)
        if (options := self.program.pick("logged", LOGGED)) is not None:
            self.log("train_loss", loss, **options)
        return self.program.pick("returned", RETURNED)(loss, batch_idx)

    def _loss_of_training(self, batch: Any) -> Tensor:
        if self.automatic_optimization:
            return self.loss(batch, "fit")
        found = self.optimizers()
        optimizers = found if isinstance(found, list) else [found]
        losses = [self._step_by_hand(one, batch) for one in optimizers]
        self._schedule_by_hand()
        return losses[-1]

    def _step_by_hand(self, optimizer: LightningOptimizer, batch: Any) -> Tensor:
        loss = self.loss(batch, "fit")
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def _schedule_by_hand(self) -> None:
        schedule: Any = self.lr_schedulers()
        if schedule is not None and not isinstance(schedule, ReduceLROnPlateau):
            schedule.step()

    @override
    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        loss = self.loss(batch, "" if dataloader_idx else "validate")
        name = f"val_loss{dataloader_idx or ''}"
        self.log(name, loss, sync_dist=True, add_dataloader_idx=False)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(unpack(batch)[0])

    # --- what the judge learns

    @override
    def on_fit_start(self) -> None:
        say_that_fit_begins(self.global_rank)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.current_epoch, unpack(batch)[2].tolist()))


class LogsGradients(Net):
    @override
    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        grads = (weight.grad for weight in self.parameters())
        norms = [grad.norm() for grad in grads if grad is not None]
        self.log("grad_norm", torch.stack(norms).sum())


class GathersInValidation(Net):
    @override
    def on_validation_epoch_end(self) -> None:
        self.all_gather(torch.tensor(float(self.global_rank)))


class SavesAfterEpochs(Net):
    @override
    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint("own.ckpt")


class AddsToCheckpoints(Net):
    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"one": 1}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["own"] == {"one": 1}


NETS: dict[str, type[Net]] = {
    "none": Net,
    "logs gradients": LogsGradients,
    "gathers in validation": GathersInValidation,
    "saves after epochs": SavesAfterEpochs,
    "adds to checkpoints": AddsToCheckpoints,
}


def net_of(program: Program) -> Net:
    """The program's module, in which a hook may raise."""
    kind = program.pick("hook", NETS)
    return with_fault(kind, program, int(os.environ["RANK"]))(program)
