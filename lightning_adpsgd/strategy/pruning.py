"""Makes `ModelPruning` choose the same weights in all learners.

Each learner would prune by its own weights, and the consensus of differently pruned
models is not pruned. So the choice is made on the consensus model, which all hold, and
a mask that is drawn at random is that of learner 0.
"""

from collections.abc import Callable, Iterator
from functools import partial

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor

from lightning_adpsgd.strategy.job import Job
from lightning_adpsgd.weights.flat import pruning_masks


def prune_together(trainer: pl.Trainer, job: Job) -> None:
    """Lets pruning happen in the consensus of a job, until `restore`."""
    for callback in _prunings(trainer):
        prune = partial(_prune, trainer, job, callback._run_pruning)
        vars(callback)["_run_pruning"] = prune


def restore(trainer: pl.Trainer) -> None:
    """Brings Lightning's own handling back."""
    for callback in _prunings(trainer):
        vars(callback).pop("_run_pruning", None)


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
    # A lottery ticket takes the weights back to their start, in all learners.
    reset = _have_moved(trainer.lightning_module, weights)
    job.renew_ties()
    if reset or not validating:
        job.leave_consensus(adopt=reset)


def _have_moved(module: pl.LightningModule, weights: list[Tensor]) -> bool:
    before = {weight.data_ptr() for weight in weights}
    return any(p.data_ptr() not in before for p in module.parameters())


def _prunings(trainer: pl.Trainer) -> Iterator[ModelPruning]:
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, ModelPruning):
            yield callback
