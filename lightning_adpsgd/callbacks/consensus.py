"""How far super-learners differ, and how that changes the effective learning rate.

In decentralized SGD, let w_a be the mean weights, g_a the mean of the learners'
gradients at their own weights, and g the gradient of the loss at w_a. arXiv 2112.01433
splits a step of w_a into a part along g and a noise orthogonal to it:

    w_a(t+1) = w_a(t) - alpha_e g + eta
    alpha_e  = alpha (g_a . g) / |g|^2          the effective learning rate
    eta      = alpha_e g - alpha g_a            the noise; its strength is |eta|^2
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.callbacks.clock import Monitor, Outputs
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
    rates_of,
    within_training,
)
from lightning_adpsgd.weights.shards import is_sharded

_Halves = Sequence[Tensor]  # two estimates of one gradient, from different batches


class EffectiveRate(NamedTuple):
    """The effective learning rate and noise of arXiv 2112.01433.

    Attributes:
        share: alpha_e / alpha; NaN if g is zero or is lost in the noise of its batches.
        noise: |eta|^2, in squared units of the weights.
        agreement: Cosine between two estimates of g. It is near 1 with enough batches;
            if it is near 0, the other figures are meaningless.
    """

    share: float
    noise: float
    agreement: float


def effective_rate(
    lr: float, of_one_step: Tensor, means: _Halves, gradients: _Halves
) -> EffectiveRate:
    """Computes the part of a step of the mean weights that goes along the gradient.

    The two halves are estimates from different batches. So their product lacks the
    noise that two factors from the same batches would share. If all learners have equal
    weights, the share is 1 for any batches.

    Args:
        lr: alpha.
        of_one_step: g_a for one step: the mean of the learners' gradients at their own
            weights, over batches that are in neither half.
        means: g_a over the batches of each half.
        gradients: g, the loss's gradient at the mean weights, over each half's batches.
    """
    first, second = gradients
    squared = torch.dot(first, second).item()
    agreement = torch.cosine_similarity(first, second, 0).item()
    if squared <= 0:
        return EffectiveRate(math.nan, math.nan, agreement)
    along = torch.dot(means[0], second) + torch.dot(means[1], first)
    share = along.item() / 2 / squared
    across = (
        torch.dot(of_one_step, of_one_step).item()
        - share * torch.dot(of_one_step, first + second).item()
        + share**2 * squared
    )
    return EffectiveRate(share, lr**2 * max(0.0, across), agreement)


class ConsensusMonitor(Monitor):
    """Logs the consensus distance of the super-learners, and its effect on training.

    The distance is logged at each validation in `fit`. The other figures take time and
    need batches; docs/monitoring.md has all of them. Those of `gradients` use the first
    `gradients` + 1 training batches. Each validation holds out another one of these for
    the noise, and two halves of the rest estimate g_a and g. (The latest batches are
    unsuitable, because a step has just reduced their losses.) The learning rate is that
    of the first parameter group.

    Args:
        held_out: Number of batches of the first validation loader that each learner
            evaluates with its own weights. They are read once, and kept on the device.
        gradients: Even number of training batches of each learner for g_a and g. These
            and one more are kept on the device.
        loss: Function from module and batch to the mean loss; by default
            `training_step` without its logging. Pass a function if that step changes
            state, such as a metric, or optimizes manually.

    Attributes:
        effective_rate: Figures of `gradients` at the last validation; None before the
            first, or without `gradients`.

    Raises:
        ValueError: A number of batches is negative, or `gradients` is odd. At the start
            of training: `gradients` is given with shards of a model, or with
            super-learners of different sizes.
    """

    def __init__(
        self, held_out: int = 0, gradients: int = 0, loss: Loss = training_loss
    ) -> None:
        super().__init__()
        for name, value in (("held_out", held_out), ("gradients", gradients)):
            if value < 0:
                raise ValueError(f"`{name}` must not be negative, got {value}")
        if gradients % 2:
            raise ValueError(
                f"`gradients` must be even, for two halves, got {gradients}"
            )
        self._num_held_out, self._num_gradients = held_out, gradients
        self._mean_loss = partial(mean_loss, loss=loss)
        self._gradient = partial(mean_gradient, loss=loss)
        self._forget()

    def _forget(self) -> None:
        self._held_out: list[Any] | None = None
        self._kept: list[Any] = []
        self._num_validations = 0
        self._local_loss = math.nan
        # This learner's gradients: of the batch of one step, and of the two halves.
        self._local: list[Tensor] = []
        self.effective_rate: EffectiveRate | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._num_gradients and is_sharded(pl_module):
            raise ValueError(
                f"`gradients` must be 0 with shards of a model, got "
                f"{self._num_gradients}: gradients are compared as whole vectors"
            )
        dials = getattr(trainer.strategy, "dials", None)
        if self._num_gradients and getattr(dials, "has_sizes", False):
            raise ValueError(
                "`gradients` must be 0 with super-learners of different sizes, got "
                f"{self._num_gradients}: the rate is that of equal ones"
            )
        self._forget()

    @override
    def count(self, trainer: Trainer, outputs: Outputs, batch: Any) -> None:
        if self._num_gradients and not self._has_kept_all():
            self._kept.append(batch)

    @override
    def on_consensus_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_consensus_start(trainer, pl_module)
        if not within_training(trainer):
            return
        if self._held_out is None:
            self._held_out = held_out_batches(trainer, self._num_held_out)
        self._local_loss = self._mean_loss(trainer, pl_module, self._held_out)
        if self._num_gradients and self._has_kept_all():
            turns = self._in_turn()
            self._local = [self._gradient(trainer, pl_module, one) for one in turns]

    # The module holds the consensus model, and the clock is still paused.
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

    def _losses(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        if not self._num_held_out:
            return {}
        mine = self._mean_loss(trainer, module, self._held_out or [])
        rows = gather(trainer, [self._local_loss, mine])
        local, of_mean = zip(*rows, strict=True)
        return {
            "consensus/local_loss_min": min(local),
            "consensus/local_loss_mean": sum(local) / len(local),
            "consensus/local_loss_max": max(local),
            "consensus/loss_of_mean": sum(of_mean) / len(of_mean),
        }

    def _has_kept_all(self) -> bool:
        return len(self._kept) > self._num_gradients

    def _in_turn(self) -> tuple[list[Any], list[Any], list[Any]]:
        """The batch of one step, different at each validation, and the two halves."""
        at, half = self._num_validations % len(self._kept), self._num_gradients // 2
        step, *others = self._kept[at:] + self._kept[:at]
        return [step], others[:half], others[half:]

    def _all_have_gradients(self, trainer: Trainer) -> bool:
        if not self._num_gradients:
            return False
        mine = [float(bool(self._local))]
        return all(measured for [measured] in gather(trainer, mine))

    def _rates(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        local, self._local = self._local, []
        _, *halves = self._in_turn()
        self._num_validations += 1
        mean = partial(trainer.strategy.reduce, reduce_op="mean")
        of_one_step, *means = (mean(each.clone()) for each in local)
        found = (self._gradient(trainer, module, half) for half in halves)
        gradients = [mean(gradient) for gradient in found]
        lr = next(iter(rates_of(trainer.optimizers[0])), math.nan)
        rate = effective_rate(lr, of_one_step, means, gradients)
        self.effective_rate = rate
        return {
            "consensus/effective_lr": lr * rate.share,
            "consensus/effective_lr_share": rate.share,
            "consensus/noise_strength": rate.noise,
            "consensus/gradient_agreement": rate.agreement,
        }
