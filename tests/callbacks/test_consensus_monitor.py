"""Effective learning rate, noise and contraction, against arithmetic."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd.callbacks.consensus import (
    ConsensusMonitor,
    Halves,
    effective_rate,
)
from lightning_adpsgd.callbacks.contraction import (
    balance_of,
    contraction_of_balance,
    spectral_contraction,
)
from lightning_adpsgd.callbacks.probe import mean_gradient, mean_loss, training_loss
from lightning_adpsgd.topology.matrices import with_gain
from lightning_adpsgd.topology.named import TOPOLOGIES, find_topology

ORDERS = ("step_then_average", "average_then_step")


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- the effective learning rate


def test_a_step_along_the_gradient_is_as_long_as_the_rate_says() -> None:
    gradient = vector(3, 4)
    both = Halves(gradient, gradient)
    assert effective_rate(0.1, gradient, both, both) == pytest.approx((1, 0, 1))


def test_half_the_gradient_is_half_the_rate_and_what_is_across_is_noise() -> None:
    # g_a = g / 2, and in one step (0, 3) more: the noise is alpha (0, 3).
    means, gradients = Halves(*[vector(2, 0)] * 2), Halves(*[vector(4, 0)] * 2)
    rate = effective_rate(0.1, vector(2, 3), means, gradients)
    assert rate == pytest.approx((0.5, 0.09, 1))


def test_equal_weights_leave_the_rate_as_it_is_whatever_the_batches() -> None:
    gradients = Halves(vector(4, 2, 0), vector(3, 0, 2))
    rate = effective_rate(1, vector(4, 0, 0), gradients, gradients)
    assert rate.share == pytest.approx(1)
    assert rate.agreement == pytest.approx(12 / math.sqrt(20 * 13))


def test_a_gradient_lost_in_noise_gives_no_rate() -> None:
    lost = Halves(vector(1, 0), vector(-1, 0))
    rate = effective_rate(1, vector(1, 0), lost, lost)
    assert math.isnan(rate.share)
    assert rate.agreement == pytest.approx(-1)


def test_on_a_quadratic_differences_of_weights_change_nothing() -> None:
    """The mean of the gradients is the gradient at the mean."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    curvature = vector(1, 2, 3, 4)
    mean, gradient = (curvature * weights).mean(0), curvature * weights.mean(0)
    means, gradients = Halves(mean, mean), Halves(gradient, gradient)
    rate = effective_rate(0.5, mean, means, gradients)
    assert rate == pytest.approx((1, 0, 1))


# --- contraction


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("modulus", [0.0, 0.5, 0.99])
def test_the_contraction_of_a_single_mode_is_its_eigenvalue(order, modulus) -> None:
    """A disagreement e <- c e + noise settles at noise^2 / (1 - c^2)."""
    after_step = 1 / (1 - modulus**2)
    balance = after_step if order == "average_then_step" else after_step - 1
    assert contraction_of_balance(balance, order) == pytest.approx(modulus)


def test_less_disagreement_than_one_step_makes_is_full_contraction() -> None:
    assert contraction_of_balance(0.5, "average_then_step") == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("gain", [1.0, 0.5])
@pytest.mark.parametrize("size", [3, 8, 16])
def test_the_balance_of_a_ring_is_the_sum_over_its_modes(size, gain, order) -> None:
    ring = find_topology("ring")
    values = torch.linalg.eigvalsh(with_gain(ring.matrix(size), gain))[:-1]
    expected = (values**2 / (1 - values**2)).mean().item()
    expected += order == "average_then_step"
    balance = balance_of(ring, size, gain, 1, order, 0)
    assert balance == pytest.approx(expected, rel=0.02)


def test_the_balance_of_rarer_rounds_is_the_mean_over_the_steps_between() -> None:
    """With the mean every third step: 1, 2 and 0, or 1, 2 and 3, squared steps."""
    mean = find_topology("complete")
    assert balance_of(mean, 4, 1.0, 3, "step_then_average", 0) == pytest.approx(1)
    assert balance_of(mean, 4, 1.0, 3, "average_then_step", 0) == pytest.approx(2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", list(TOPOLOGIES))
def test_the_balance_of_every_topology_is_that_of_noise_that_is_drawn(
    name, order
) -> None:
    topology, size = find_topology(name), 8
    generator = torch.Generator().manual_seed(0)
    weights, measured = torch.zeros(4000, size, dtype=torch.float64), []
    for round in range(60):
        noise = torch.randn(weights.shape, dtype=torch.float64, generator=generator)
        mixing = topology.matrix(size, round, 0)
        if order == "step_then_average":
            weights = (weights + noise) @ mixing
        else:
            weights = weights @ mixing + noise
        apart = weights - weights.mean(1, keepdim=True)
        measured.append(apart.square().mean().item() * size / (size - 1))
    settled = sum(measured[20:]) / 40
    balance = balance_of(topology, size, 1.0, 1, order, 0)
    assert balance == pytest.approx(settled, rel=0.1, abs=1e-6)


def test_the_spectral_contraction_is_the_second_eigenvalue() -> None:
    ring = find_topology("ring")
    for size in (4, 8, 64):
        expected = (1 + 2 * math.cos(2 * math.pi / size)) / 3
        assert spectral_contraction(ring, size, 1.0, 0) == pytest.approx(expected)
    half = spectral_contraction(ring, 8, 0.5, 0)
    assert half == pytest.approx((1 + (1 + 2 * math.cos(math.pi / 4)) / 3) / 2)


@pytest.mark.parametrize("size", [4, 8, 16, 64])
def test_the_spectral_contraction_of_drawn_rounds_is_that_of_the_squared_distance(
    size,
) -> None:
    ring = spectral_contraction(find_topology("random_ring"), size, 1.0, 0)
    pairs = spectral_contraction(find_topology("random_pairs"), size, 1.0, 0)
    assert ring**2 == pytest.approx((size - 3) / (3 * (size - 1)))
    assert pairs**2 == pytest.approx((size - 2) / (2 * (size - 1)))


def test_more_super_learners_than_can_be_reckoned_give_no_number() -> None:
    ring = find_topology("ring")
    assert math.isnan(spectral_contraction(ring, 129, 1.0, 0))
    assert math.isnan(balance_of(ring, 129, 1.0, 1, "step_then_average", 0))


# --- what a measurement leaves behind


class Busy(pl.LightningModule):
    """Draws at random, logs, and keeps statistics, as a training step may."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)
        )
        self.unused = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0] + torch.rand(3)).square().mean()
        self.log("train_loss", loss)
        self.log_dict({"same": loss}, on_step=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def train(*callbacks: pl.Callback, **arguments: Any) -> tuple[Trainer, Busy]:
    seed_everything(3)
    data = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=4, shuffle=True)
    module = Busy()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(module, data, data)
    return trainer, module


def test_a_measured_training_is_the_same_to_the_last_bit() -> None:
    plain, module = train()
    monitor = ConsensusMonitor(held_out=2, gradients=2)
    measured, other = train(monitor)
    assert monitor.effective_rate is not None
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert plain.callback_metrics == measured.callback_metrics
    assert "log" not in vars(other)


def test_gradients_can_be_taken_in_half_precision() -> None:
    monitor = ConsensusMonitor(gradients=2)
    train(monitor, precision="bf16-mixed")
    assert monitor.effective_rate is not None
    assert math.isfinite(monitor.effective_rate.agreement)


class Quadratic(pl.LightningModule):
    """Half the squared distance to the batch's mean: the gradient is w - mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight - batch.mean(0)).square().sum() / 2


def test_loss_and_gradient_are_means_over_batches() -> None:
    trainer, module = Trainer(accelerator="cpu", logger=False), Quadratic()
    batches = [torch.zeros(3, 2), torch.full((3, 2), 2.0)]
    gradient = mean_gradient(trainer, module, batches, training_loss)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.0]))
    # (1 + 4) / 2 and (1 + 0) / 2
    assert mean_loss(trainer, module, batches, training_loss) == pytest.approx(1.5)
    assert module.weight.grad is None


def test_a_loss_of_ones_own_is_taken() -> None:
    trainer, module = Trainer(accelerator="cpu", logger=False), Quadratic()

    def total(module: Any, batch: Any) -> Tensor:
        return module.weight.sum()

    loss = mean_loss(trainer, module, [None], total)
    assert loss == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"held_out": -1}, "`held_out` must not be negative, got -1"),
        ({"gradients": -2}, "`gradients` must not be negative, got -2"),
        ({"gradients": 3}, "`gradients` must be even, for two halves, got 3"),
    ],
)
def test_numbers_of_batches_out_of_bounds_are_refused(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        ConsensusMonitor(**wrong)
