"""Support for callbacks that write weights: SWA, EMA, `ModelPruning`.

An average of weights is linear in them. So the mean of the averages that learners keep
is the average of their mean. It replaces the averages whenever the consensus model is
taken. The weights that such a callback writes into the module stay in the averaged
vectors.

If each learner pruned by its own weights, the mean of the pruned models would not be
pruned. So learners prune the consensus model, which all of them hold. A random mask is
that of learner 0.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

from lightning_adpsgd.mixing.averages import all_finite
from lightning_adpsgd.strategy.compatibility import callbacks_of
from lightning_adpsgd.strategy.job import Job
from lightning_adpsgd.strategy.overrides import Overrides
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.weights.flat import pruning_masks


@torch.no_grad()
def average_copies(trainer: pl.Trainer, partition: Partition) -> None:
    """Replaces callbacks' averages by their mean over super-learners; a collective.

    A tensor that is infinite or NaN in a learner stays out of the mean, which replaces
    it. Otherwise an average that took in NaN weights would spread to all learners.
    """
    weight = partition.weight(trainer.global_rank)
    # SWA keeps its average on the CPU, where NCCL cannot reach it.
    device = trainer.strategy.root_device
    for model in _kept_models(trainer):
        tensors = (*model.parameters(), *model.buffers())
        averaged = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        shares = [weight * all_finite([tensor]) for tensor in averaged]
        totals = torch.tensor(shares, dtype=torch.float64, device=device)
        dist.all_reduce(totals)
        for one in zip(averaged, shares, totals.tolist(), strict=True):
            _average_copy(*one, device)


def _average_copy(
    tensor: Tensor, share: float, total: float, device: torch.device
) -> None:
    here = tensor.to(device)
    dist.all_reduce(mean := here * share if share else torch.zeros_like(here))
    if total:  # an attention mask of -inf has no mean, and is the same in all
        tensor.copy_(mean.div_(total))


def transfer_in_consensus(
    trainer: pl.Trainer,
    enter: Callable[[str], Any],
    adopt: Callable[[str], Any],
    overrides: Overrides,
) -> None:
    """Makes SWA write its average into the consensus model, between exchanges."""
    for swa in callbacks_of(trainer, StochasticWeightAveraging):
        transfer = partial(_transfer, enter, adopt, swa.transfer_weights)
        overrides.replace(swa, "transfer_weights", transfer)
        overrides.wrap(swa, "reset_batch_norm_and_save_state", _reset_in_place)


def prune_together(trainer: pl.Trainer, job: Job, overrides: Overrides) -> None:
    """Makes `ModelPruning` prune while the module holds the consensus model."""
    for callback in callbacks_of(trainer, ModelPruning):
        overrides.wrap(callback, "_run_pruning", partial(_prune, trainer, job))


def _transfer(
    enter: Callable[[str], Any],
    adopt: Callable[[str], Any],
    transfer: Callable[..., None],
    average: pl.LightningModule,
    module: pl.LightningModule,
) -> None:
    enter("weight averaging")
    transfer(average, module)
    adopt("end of weight averaging")


@torch.no_grad()
def _reset_in_place(reset: Callable[..., None], module: pl.LightningModule) -> None:
    """Resets batch-norm statistics, and keeps their tensors."""
    kept = dict(module.named_buffers())
    reset(module)
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        layer = module.get_submodule(owner)
        if (fresh := getattr(layer, leaf)) is not buffer:
            buffer.copy_(fresh)
            setattr(layer, leaf, buffer)


def _kept_models(trainer: pl.Trainer) -> Iterator[nn.Module]:
    for callback in callbacks_of(trainer, Callback):
        model = getattr(callback, "_average_model", None)
        if isinstance(model, nn.Module):
            yield model


def _prune(
    trainer: pl.Trainer, job: Job, prune: Callable[[int], None], epoch: int
) -> None:
    validating = job.in_consensus
    if not validating:
        job.enter_consensus("pruning")
    weights = [p.data for p in trainer.lightning_module.parameters()]
    prune(epoch)
    for _, mask in pruning_masks(trainer.lightning_module):
        dist.broadcast(mask, 0)
    # With lottery tickets the weights go back to their start, in all learners.
    before = {weight.data_ptr() for weight in weights}
    after = (p.data_ptr() for p in trainer.lightning_module.parameters())
    reset = any(pointer not in before for pointer in after)
    job.flat.rebind()
    if reset:
        job.adopt("end of pruning")
    elif not validating:
        job.leave_consensus(adopt=False)
