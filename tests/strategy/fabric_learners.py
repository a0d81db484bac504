"""Learners for the tests of Fabric: small modules, and the loop of Fabric's guide."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from typing_extensions import override

from lightning_adpsgd import HADPSGDFabricStrategy
from tests.helpers import PATIENCE
from tests.learners import LR


class Slope(nn.Module):
    """Its gradient is the batch's mean row, whatever the weights: a fixed sequence."""

    def __init__(self, start: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), start, dtype=dtype))

    @override
    def forward(self, batch: Tensor) -> Tensor:
        return (batch.to(self.weight.dtype) @ self.weight).mean()


class Bowl(Slope):
    """Pulls its weights to the batch: the gradient is 2 (w - mean row) / 3."""

    @override
    def forward(self, batch: Tensor) -> Tensor:
        return (batch - self.weight).square().mean()


def sgd(module: nn.Module, lr: float = LR) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr)


def gossip(topology: Any = "ring", communication: Any = "async", **dials: Any) -> Any:
    """The strategy with one learner to a super-learner and a test's patience."""
    return HADPSGDFabricStrategy(
        topology,
        communication,
        **{"super_learner_size": 1, "timeout": PATIENCE, **dials},
    )


def fabric_of(strategy: Any, num_learners: int, **arguments: Any) -> Fabric:
    return Fabric(
        accelerator="cpu", devices=num_learners, strategy=strategy, **arguments
    )


def launched(strategy: Any, num_learners: int, **arguments: Any) -> Fabric:
    fabric = fabric_of(strategy, num_learners, **arguments)
    fabric.launch()
    return fabric


def strategy_of(fabric: Fabric) -> HADPSGDFabricStrategy:
    assert isinstance(fabric.strategy, HADPSGDFabricStrategy)
    return fabric.strategy


def train(
    fabric: Fabric, model: Any, optimizer: Any, batches: Iterable[Tensor]
) -> list[Tensor]:
    """The loop of Fabric's guide; this learner's own weights after each step."""
    trajectory = []
    for batch in batches:
        optimizer.zero_grad()
        fabric.backward(model(batch))
        optimizer.step()
        trajectory.append(model.weight.detach().clone())
    return trajectory
