"""The figures of all learners, gathered, and written to loggers and for users."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.mixing.statistics import Statistics


def log(trainer: Trainer, figures: Mapping[str, float]) -> None:
    """Writes figures to all loggers of the Trainer, at the last finished step."""
    step = trainer.global_step - 1  # as Lightning numbers the figures of `self.log`
    for logger in trainer.loggers:
        logger.log_metrics(dict(figures), step=step)


def within_training(trainer: Trainer) -> bool:
    """Whether an evaluation is part of `fit`, but not its sanity check."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def gather(trainer: Trainer, row: Sequence[float]) -> list[list[float]]:
    """Gathers rows of equal length from all learners; a collective."""
    device = trainer.strategy.root_device
    widest = torch.float32 if device.type == "mps" else torch.float64
    mine = torch.tensor(row, dtype=widest, device=device)
    return trainer.strategy.all_gather(mine).reshape(-1, len(row)).tolist()


def loss_of(
    trainer: Trainer, outputs: Tensor | Mapping[str, Any] | None
) -> Tensor | None:
    """The loss in what a training step returned, detached; None without a loss."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor):
        return None
    # Lightning has divided it by the number of accumulated batches.
    return loss.detach() * trainer.accumulate_grad_batches


def rates_of(optimizer: Optimizer) -> list[float]:
    """The learning rates of an optimizer's groups; one that finds its own has none."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [float(rate) for rate in rates if rate is not None]


def epochs_so_far(trainer: Trainer) -> float:
    """Epochs of this learner so far, with a fraction for the current one."""
    num_batches = trainer.num_training_batches
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.is_last_batch or not 0 < num_batches < math.inf:
        return trainer.current_epoch + float(progress.is_last_batch)
    return trainer.current_epoch + progress.current.completed / num_batches


def consensus_of(trainer: Trainer) -> Consensus | None:
    """The consensus figures of the last mean; None if nothing gossips."""
    return getattr(trainer.strategy, "last_consensus", None)


def gossip_of(trainer: Trainer) -> Statistics | None:
    """The counters of this learner's communication; None if nothing communicates."""
    return getattr(trainer.strategy, "gossip_statistics", lambda: None)()


def consensus_distances(trainer: Trainer) -> dict[str, float]:
    """The distances of the super-learners from their mean; empty if nothing gossips."""
    if (consensus := consensus_of(trainer)) is None:
        return {}
    return {
        "gossip/consensus_distance": consensus.distance,
        "gossip/relative_consensus_distance": consensus.relative_distance,
    }


def summary(trainer: Trainer) -> str:
    """One line on what this learner has done, without communication.

    Use it as `trainer.print(summary(trainer))` after `fit`, under any strategy. If the
    main process has forked or spawned the learners, it does not know their figures; in
    that case call it in `on_train_end`.
    """
    done = f"{trainer.global_step} steps"
    if (statistics := gossip_of(trainer)) is not None:
        rate = statistics.exchanges / max(trainer.global_step, 1)
        sent = statistics.bytes_sent / 1e6
        done += f", {rate:.2f} exchanges per step, {sent:.3g} MB sent"
    if (consensus := consensus_of(trainer)) is not None:
        done += f", relative consensus distance {consensus.relative_distance:.2g}"
    return done
