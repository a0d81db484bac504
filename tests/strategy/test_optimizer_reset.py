"""Optimizers that begin anew."""

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer
from typing_extensions import override

from lightning_adpsgd.strategy.optimizer_reset import InitialState


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def step(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_momentum_is_forgotten_and_the_rate_stays() -> None:
    parameter = weight()
    optimizer = SGD([parameter], lr=1.0, momentum=0.9)
    initial = InitialState(optimizer)
    for _ in range(2):
        step(optimizer, parameter)
        optimizer.param_groups[0]["lr"] = 0.5
        initial.restore(optimizer)
        assert not optimizer.state
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_state_that_was_there_at_the_beginning_comes_back() -> None:
    """As often as it is asked for: what comes back is a copy."""
    parameter = weight()
    optimizer = Adagrad([parameter], lr=1.0, initial_accumulator_value=0.5)
    initial = InitialState(optimizer)
    for _ in range(2):
        step(optimizer, parameter)
        initial.restore(optimizer)
        assert torch.equal(optimizer.state[parameter]["sum"], torch.full((2,), 0.5))


class Stateless(SGD):
    @override
    def state_dict(self) -> dict[str, object]:
        return {}

    @override
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        assert state_dict == {}


def test_an_optimizer_without_any_state_needs_none() -> None:
    optimizer = Stateless([weight()], lr=1.0)
    InitialState(optimizer).restore(optimizer)
