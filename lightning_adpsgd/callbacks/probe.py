"""Losses and gradients of a module, measured without a side effect on training."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import reduce
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.backends import cudnn
from torch.utils.data import DataLoader

from lightning_adpsgd.virtual.objective import (
    loss_in,
    training_step_of,
    without_logging,
)
from lightning_adpsgd.weights.replica import averaging_dtype

Loss = Callable[[LightningModule, Any], Tensor]
"""A function from a module and a batch on its device to the mean loss of the batch."""


def training_loss(module: LightningModule, batch: Any) -> Tensor:
    """The loss from the module's `training_step`, whose logging is dropped."""
    with without_logging(module):
        return loss_in(training_step_of(module)(batch, 0))


def held_out_batches(trainer: Trainer, num_batches: int) -> list[Any]:
    """The first batches of the first validation loader, on the device."""
    if not num_batches:
        return []
    with isolate_rng(), torch.inference_mode(False):
        loader = CombinedLoader(trainer.val_dataloaders, "sequential").flattened[0]
        batches = list(islice(_apart(loader), num_batches))
        return [trainer.strategy.batch_to_device(batch) for batch in batches]


def _apart(loader: Any) -> Any:
    # With persistent workers a loader has one iterator, which the validation reads.
    if isinstance(loader, DataLoader) and loader.persistent_workers:
        loader = copy(loader)
        loader._iterator = None
    return loader


def mean_loss(
    trainer: Trainer, module: LightningModule, batches: Sequence[Any], loss: Loss
) -> float:
    """The mean of the losses of batches; NaN without batches."""
    if not batches:
        return math.nan
    with _unnoticed(trainer, gradients=False):
        losses = [loss(module, batch).float() for batch in batches]
        return torch.stack(losses).mean().item()


def mean_gradient(
    trainer: Trainer, module: LightningModule, batches: Sequence[Any], loss: Loss
) -> Tensor:
    """The mean gradient over batches, as one vector over all trainable parameters.

    In evaluation mode: dropout is off, and batch-norm keeps its statistics.
    """
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    # cuDNN has no backward pass for a recurrent layer in evaluation mode.
    with _unnoticed(trainer, gradients=True), cudnn.flags(enabled=False):
        vectors = (_gradient(loss(module, batch), weights) for batch in batches)
        return reduce(Tensor.add_, vectors).div_(len(batches))


def _gradient(loss: Tensor, weights: Sequence[Tensor]) -> Tensor:
    # After `backward`, DDP would reduce the gradients with those of other learners.
    gradients = torch.autograd.grad(
        loss, weights, allow_unused=True, materialize_grads=True
    )
    flat = torch.cat([each.flatten() for each in gradients])
    return flat.to(averaging_dtype(flat.dtype))


@contextmanager
def _unnoticed(trainer: Trainer, gradients: bool) -> Iterator[None]:
    with (
        isolate_rng(),
        torch.inference_mode(False),  # validation is in inference mode
        torch.set_grad_enabled(gradients),
        trainer.precision_plugin.forward_context(),
    ):
        yield
