"""Effective learning rate and noise, against arithmetic."""

import math
from typing import Any
from unittest.mock import create_autospec

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd.callbacks.consensus import (
    ConsensusMonitor,
    effective_rate,
)
from lightning_adpsgd.callbacks.probe import mean_gradient, mean_loss, training_loss


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- the effective learning rate


def test_a_step_along_the_gradient_is_as_long_as_the_rate_says() -> None:
    gradient = vector(3, 4)
    both = (gradient, gradient)
    assert effective_rate(0.1, gradient, both, both) == pytest.approx((1, 0, 1))


def test_half_the_gradient_is_half_the_rate_and_what_is_across_is_noise() -> None:
    # g_a = g / 2, and in one step (0, 3) more: the noise is alpha (0, 3).
    means, gradients = [vector(2, 0)] * 2, [vector(4, 0)] * 2
    rate = effective_rate(0.1, vector(2, 3), means, gradients)
    assert rate == pytest.approx((0.5, 0.09, 1))


def test_equal_weights_leave_the_rate_as_it_is_whatever_the_batches() -> None:
    gradients = (vector(4, 2, 0), vector(3, 0, 2))
    rate = effective_rate(1, vector(4, 0, 0), gradients, gradients)
    assert rate.share == pytest.approx(1)
    assert rate.agreement == pytest.approx(12 / math.sqrt(20 * 13))


def test_a_gradient_lost_in_noise_gives_no_rate() -> None:
    lost = (vector(1, 0), vector(-1, 0))
    rate = effective_rate(1, vector(1, 0), lost, lost)
    assert math.isnan(rate.share)
    assert rate.agreement == pytest.approx(-1)


def test_on_a_quadratic_differences_of_weights_change_nothing() -> None:
    """The mean of the gradients is the gradient at the mean."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    curvature = vector(1, 2, 3, 4)
    mean, gradient = (curvature * weights).mean(0), curvature * weights.mean(0)
    means, gradients = (mean, mean), (gradient, gradient)
    rate = effective_rate(0.5, mean, means, gradients)
    assert rate == pytest.approx((1, 0, 1))


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


def test_a_loader_with_persistent_workers_is_validated_whole() -> None:
    """It has one iterator, which the validation reads."""

    class Counts(pl.Callback):
        def on_validation_start(self, *_: Any, **__: Any) -> None:
            seen.append(0)

        def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
            seen[-1] += 1

    seen = list[int]()
    data = TensorDataset(torch.randn(24, 3))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=[ConsensusMonitor(held_out=2), Counts()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    validates = DataLoader(data, 4, num_workers=1, persistent_workers=True)
    trainer.fit(Busy(), DataLoader(data, 4), validates)
    assert seen == [6, 6]


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


class Unnumbered(pl.LightningModule):
    def training_step(self, batch: Tensor) -> Tensor:
        return batch.mean()


def test_a_step_that_takes_a_batch_alone_gives_its_loss() -> None:
    """As in the Trainer, which looks at the step's parameters."""
    assert training_loss(Unnumbered(), torch.ones(3, 2)) == 1


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


def test_gradients_of_shards_are_refused() -> None:
    """They are compared as whole vectors, which no learner has."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        module = BoringModel()
        fully_shard(module.layer, mesh=init_device_mesh("cpu", (1,)))
        trainer = create_autospec(Trainer, instance=True, world_size=1, global_rank=0)
        with pytest.raises(ValueError, match=r"`gradients` must be 0 .* got 2"):
            ConsensusMonitor(gradients=2).on_train_start(trainer, module)
    finally:
        dist.destroy_process_group()
