"""Callbacks that keep an average of the weights: SWA, EMA.

Such an average is linear in the weights, so that the mean of what the learners keep is
the average of their mean: it is taken wherever the consensus model is. And what such a
callback writes into the module stays in the vectors that are averaged.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn


@torch.no_grad()
def average_copies(trainer: pl.Trainer) -> None:
    """Replaces all kept averages by their mean over the learners; a collective."""
    # SWA keeps its average on the CPU, where NCCL cannot reach it.
    device = trainer.strategy.root_device
    for model in _kept_models(trainer):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                dist.all_reduce(total := tensor.to(device))
                tensor.copy_(total.div_(dist.get_world_size()))


def transfer_in_consensus(
    trainer: pl.Trainer, enter: Callable[[str], Any], leave: Callable[[bool], Any]
) -> None:
    """Makes SWA write its average when nothing is on its way, until `restore`.

    Args:
        trainer: Its callbacks are looked through.
        enter: Puts the consensus model in place; all learners come.
        leave: Goes on from what is in place then if its argument is true.
    """
    for swa in _stochastic_averages(trainer):
        transfer = partial(_transfer, enter, leave, swa.transfer_weights)
        reset = partial(_reset_in_place, swa.reset_batch_norm_and_save_state)
        vars(swa)["transfer_weights"] = transfer
        vars(swa)["reset_batch_norm_and_save_state"] = reset


def restore(trainer: pl.Trainer) -> None:
    """Brings Lightning's own handling back."""
    for swa in _stochastic_averages(trainer):
        vars(swa).pop("transfer_weights", None)
        vars(swa).pop("reset_batch_norm_and_save_state", None)


def _transfer(
    enter: Callable[[str], Any],
    leave: Callable[[bool], Any],
    transfer: Callable[..., None],
    average: pl.LightningModule,
    module: pl.LightningModule,
) -> None:
    enter("weight averaging")
    transfer(average, module)
    leave(True)


@torch.no_grad()
def _reset_in_place(reset: Callable[..., None], module: pl.LightningModule) -> None:
    """Batch-norm statistics start again in the tensors that they were in."""
    kept = dict(module.named_buffers())
    reset(module)
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        layer = module.get_submodule(owner)
        if (fresh := getattr(layer, leaf)) is not buffer:
            buffer.copy_(fresh)
            setattr(layer, leaf, buffer)


def _kept_models(trainer: pl.Trainer) -> Iterator[nn.Module]:
    for callback in getattr(trainer, "callbacks", ()):
        model = getattr(callback, "_average_model", None)
        if isinstance(model, nn.Module):
            yield model


def _stochastic_averages(trainer: pl.Trainer) -> Iterator[StochasticWeightAveraging]:
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, StochasticWeightAveraging):
            yield callback
