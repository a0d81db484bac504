"""How the super-learners differ, and what their differences do to the learning rate.

arXiv 2112.01433 writes a step of the mean weights w_a of decentralized SGD, with g_a
the mean of the learners' gradients at their own weights and g the gradient of the loss
at w_a, as one along g and a noise across it:

    w_a(t+1) = w_a(t) - alpha_e g + eta
    alpha_e  = alpha (g_a . g) / |g|^2          the effective learning rate
    eta      = alpha_e g - alpha g_a            the noise; its strength is |eta|^2

Where the landscape is rough, gradients at different weights point apart, alpha_e is
smaller than alpha, and grows towards it as training goes on: a warm-up of its own. With
equal weights (allreduce), alpha_e differs from alpha by the batches' noise alone.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.callbacks.clock import Monitor, stop_clocks
from lightning_adpsgd.callbacks.contraction import (
    balance_of,
    contraction_of_balance,
    spectral_contraction,
)
from lightning_adpsgd.callbacks.probe import (
    Loss,
    held_out_batches,
    mean_gradient,
    mean_loss,
    training_loss,
)
from lightning_adpsgd.callbacks.reporting import (
    consensus_distances,
    gather,
    log,
    within_training,
)
from lightning_adpsgd.mixing import Order
from lightning_adpsgd.strategy import HADPSGDStrategy


class EffectiveRate(NamedTuple):
    """The two figures of arXiv 2112.01433.

    Attributes:
        share: alpha_e / alpha; not a number where the gradient vanishes.
        noise: |eta|^2, in squared units of the weights.
    """

    share: float
    noise: float


def effective_rate(lr: float, mean_gradient: Tensor, gradient: Tensor) -> EffectiveRate:
    """How much of a step of the mean weights goes along the gradient.

    Args:
        lr: alpha.
        mean_gradient: g_a, the mean of the learners' gradients at their own weights.
        gradient: g, that of the loss at the mean weights.
    """
    squared = torch.dot(gradient, gradient).item()
    share = torch.dot(mean_gradient, gradient).item() / squared if squared else math.nan
    across = share * gradient - mean_gradient
    return EffectiveRate(share, lr**2 * torch.dot(across, across).item())


class ConsensusMonitor(Monitor):
    """Logs how far the super-learners are apart, and what follows from it.

    At each validation in `fit`, `gossip/consensus_distance` and its relative, as
    `GossipMonitor` does. What takes time is measured only if batches are given to it:

    With `held_out`, under `consensus/`: `local_loss_min`, `local_loss_mean` and
    `local_loss_max`, of the learners with their own weights, and `loss_of_mean`, of the
    consensus model on the same batches, each learner on those of its own.

    With `gradients`: `effective_lr`, `effective_lr_share` (of the learning rate) and
    `noise_strength` of arXiv 2112.01433; g is taken over the `gradients` last training
    batches but one of every learner, and g_a at the very last. Where super-learners
    of one learner gossip, also `contraction`, by how much the disagreement shrinks in
    a step, as it follows from distance and gradients (`callbacks.contraction`);
    `contraction_of_topology`, the same if rounds were synchronous; and
    `spectral_contraction`, what a round leaves of the slowest disagreement.

    These are figures of plain SGD. Momentum and clipping are not seen, and the rate is
    that of the first parameter group.

    Args:
        held_out: Batches of the first validation loader that each learner evaluates
            with its own weights. They are read once and kept.
        gradients: Training batches that each learner keeps to take gradients on.
        loss: From module and batch to the mean loss. By default `training_step`, whose
            logging is silenced; give one if that step changes anything, such as a
            metric, or optimizes by itself.

    Attributes:
        effective_rate: As of the last validation; none before, or without gradients.

    Raises:
        ValueError: A number of batches is negative.
    """

    def __init__(
        self, held_out: int = 0, gradients: int = 0, loss: Loss = training_loss
    ) -> None:
        super().__init__()
        for name, value in (("held_out", held_out), ("gradients", gradients)):
            if value < 0:
                raise ValueError(f"`{name}` must not be negative, got {value}")
        self._num_held_out, self._num_gradients, self._loss = held_out, gradients, loss
        self._forget()

    def _forget(self) -> None:
        self._held_out: list[Any] | None = None
        # The last one for the learner's own gradient, the others for the mean's.
        self._recent: deque[Any] = deque(maxlen=self._num_gradients + 1)
        self._local_loss, self._local_gradient = math.nan, torch.empty(0)
        self.effective_rate: EffectiveRate | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._forget()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._num_gradients:
            self._recent.append(batch)

    # Callbacks come before the strategy: the weights are still this learner's own.
    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stop_clocks(trainer)
        if not within_training(trainer):
            return
        if self._held_out is None:
            self._held_out = held_out_batches(trainer, self._num_held_out)
        self._local_loss = self._mean_loss(trainer, pl_module)
        if len(self._recent) > 1:
            self._local_gradient = mean_gradient(
                trainer, pl_module, [self._recent[-1]], self._loss
            )

    # The consensus model is in place, and no clock goes on yet.
    @override
    def on_validation_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        if not within_training(trainer):
            return
        figures = consensus_distances(trainer) | self._losses(trainer, pl_module)
        if self._all_have_gradients(trainer):
            figures |= self._rates(trainer, pl_module)
        if trainer.is_global_zero and figures:
            log(trainer, figures)

    def _mean_loss(self, trainer: Trainer, module: LightningModule) -> float:
        return mean_loss(trainer, module, self._held_out or [], self._loss)

    def _losses(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        if not self._num_held_out:
            return {}
        row = [self._local_loss, self._mean_loss(trainer, module)]
        local, of_mean = zip(*gather(trainer, row), strict=True)
        return {
            "consensus/local_loss_min": min(local),
            "consensus/local_loss_mean": sum(local) / len(local),
            "consensus/local_loss_max": max(local),
            "consensus/loss_of_mean": sum(of_mean) / len(of_mean),
        }

    def _all_have_gradients(self, trainer: Trainer) -> bool:
        if not self._num_gradients:
            return False
        return all(number > 1 for [number] in gather(trainer, [len(self._recent)]))

    def _rates(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        batches = list(self._recent)[:-1]
        gradient = _mean(trainer, mean_gradient(trainer, module, batches, self._loss))
        mean = _mean(trainer, self._local_gradient.clone())
        lr = float(trainer.optimizers[0].param_groups[0]["lr"])
        self.effective_rate = effective_rate(lr, mean, gradient)
        return {
            "consensus/effective_lr": lr * self.effective_rate.share,
            "consensus/effective_lr_share": self.effective_rate.share,
            "consensus/noise_strength": self.effective_rate.noise,
            **self._contractions(trainer, lr, mean),
        }

    def _contractions(
        self, trainer: Trainer, lr: float, mean: Tensor
    ) -> dict[str, float]:
        strategy = trainer.strategy
        gossips = isinstance(strategy, HADPSGDStrategy) and strategy.last_consensus
        if not gossips or strategy.super_learner_size > 1:
            return {}
        apart = self._local_gradient - mean
        spread = _mean(trainer, torch.dot(apart, apart)).item()
        if not lr or not spread:
            return {}
        balance = strategy.last_consensus.distance**2 / (lr**2 * spread)
        return _contractions(strategy, balance)


def _contractions(strategy: HADPSGDStrategy, balance: float) -> dict[str, float]:
    dials, size = strategy.dials, strategy.num_super_learners
    topology, gain = dials.topology, dials.mixing_gain
    # An asynchronous exchange reads weights of before the step that it is merged after.
    order: Order = dials.effective_order
    if dials.communication == "async":
        order = "average_then_step"
    promised = balance_of(topology, size, gain, dials.gossip_every, order, dials.seed)
    return {
        "consensus/contraction": contraction_of_balance(balance, order),
        "consensus/contraction_of_topology": contraction_of_balance(promised, order),
        "consensus/spectral_contraction": spectral_contraction(
            topology, size, gain, dials.seed
        ),
    }


def _mean(trainer: Trainer, vector: Tensor) -> Tensor:
    """Over all learners, in place where there are several; all come."""
    return trainer.strategy.reduce(vector, reduce_op="mean")
