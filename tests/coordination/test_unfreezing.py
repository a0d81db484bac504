"""Weights that are frozen when DDP is made: who reduces their gradients later."""

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_adpsgd.coordination.unfreezing import Unfreezing

REDUCES = {"find_unused_parameters": True}


class Parts(nn.Module):
    """A trained weight, and frozen ones that DDP may and may not reduce."""

    _ddp_params_and_buffers_to_ignore = ("ignored",)

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.ones(2))
        self.backbone = nn.Parameter(torch.ones(2), requires_grad=False)
        self.ignored = nn.Parameter(torch.ones(2), requires_grad=False)
        self.table = nn.Parameter(torch.arange(2), requires_grad=False)


def of(module: nn.Module) -> SGD:
    return SGD(module.parameters(), 1.0)


def step_of(unfreezing: Unfreezing, module: nn.Module) -> Any:
    """A step of an optimizer of all weights of a module."""
    return unfreezing.checked(of(module), lambda: 3)


def trained(module: nn.Module) -> set[str]:
    return {name for name, one in module.named_parameters() if one.requires_grad}


def made(unfreezing: Unfreezing, module: nn.Module, size: int = 2) -> set[str]:
    """The weights that DDP sees as trained, for a super-learner of a size."""
    seen = set[str]()

    def make() -> Any:
        seen.update(trained(module))
        return SimpleNamespace(process_group=SimpleNamespace(size=lambda: size))

    unfreezing.make(module, make)
    return seen


@pytest.mark.parametrize("reduces", [True, False])
def test_ddp_sees_frozen_weights_as_trained_only_where_it_is_to_reduce_them(
    reduces: bool,
) -> None:
    module = Parts()
    expected = {"head", "backbone"} if reduces else {"head"}
    assert made(Unfreezing(reduces, REDUCES), module) == expected
    assert trained(module) == {"head"}


def test_weights_stay_frozen_where_ddp_cannot_be_made() -> None:
    module = Parts()
    with pytest.raises(ZeroDivisionError):
        Unfreezing(True, REDUCES).make(module, lambda: 1 // 0)  # pyright: ignore
    assert trained(module) == {"head"}


@pytest.mark.parametrize(("reduces", "size"), [(True, 2), (False, 1)])
def test_a_gradient_that_ddp_reduces_or_that_is_alone_is_no_error(
    reduces: bool, size: int
) -> None:
    module, unfreezing = Parts(), Unfreezing(reduces, REDUCES)
    made(unfreezing, module, size)
    module.backbone.requires_grad_(True).grad = torch.ones(2)
    assert step_of(unfreezing, module)() == 3


def test_a_gradient_that_ddp_never_reduces_is_refused_by_name() -> None:
    module, unfreezing = Parts(), Unfreezing(False, REDUCES)
    made(unfreezing, module)
    step = step_of(unfreezing, module)
    assert step() == 3
    module.backbone.requires_grad_(True)
    assert step() == 3
    module.backbone.grad = torch.ones(2)
    with pytest.raises(
        RuntimeError, match=r"`backbone`.*`find_unused_parameters=True`"
    ):
        step()


def trains(module: Parts) -> None:
    module.backbone.requires_grad_(True).grad = torch.ones(2)


def test_weights_of_two_modules_may_have_one_name() -> None:
    modules, unfreezing = (Parts(), Parts()), Unfreezing(False, REDUCES)
    for module in modules:
        made(unfreezing, module)
    trains(modules[0])
    with pytest.raises(RuntimeError, match="`backbone` was frozen at set-up"):
        step_of(unfreezing, modules[0])()


def test_a_module_that_is_set_up_again_may_train_what_was_frozen_before() -> None:
    module, unfreezing = Parts(), Unfreezing(False, REDUCES)
    made(unfreezing, module)
    trains(module)
    made(unfreezing, module)
    assert step_of(unfreezing, module)() == 3


def test_a_module_that_nobody_exchanges_is_to_be_set_up_again_to_be_trained() -> None:
    module, unfreezing = Parts(), Unfreezing(True, REDUCES)
    unfreezing.note(module, may_train=False)
    assert step_of(unfreezing, module)() == 3
    trains(module)
    with pytest.raises(RuntimeError, match=r"`backbone`.*again with `fabric\.setup`"):
        step_of(unfreezing, module)()
    unfreezing.note(module, may_train=True)
    assert step_of(unfreezing, module)() == 3


def test_what_is_watched_travels_with_the_trainer() -> None:
    module, unfreezing = Parts(), Unfreezing(False, REDUCES)
    made(unfreezing, module)
    copied = copy.deepcopy((module, unfreezing))
    module, unfreezing = pickle.loads(pickle.dumps(copied))
    assert unfreezing.checked(of(module), int) is not int


def test_what_has_travelled_lets_modules_go() -> None:
    module, unfreezing = Parts(), Unfreezing(False, REDUCES)
    made(unfreezing, module)
    travelled, found = copy.copy(unfreezing), weakref.ref(module)
    del module
    gc.collect()
    assert found() is None
    assert travelled.checked(of(Parts()), int) is int


def test_gradients_of_weights_that_no_optimizer_changes_are_no_error() -> None:
    """Such as those of a teacher, which a program may ask for."""
    teacher, module, unfreezing = Parts(), Parts(), Unfreezing(False, REDUCES)
    unfreezing.note(teacher, may_train=False)
    trains(teacher)
    assert step_of(unfreezing, module)() == 3


@pytest.mark.parametrize("is_alone_first", [True, False])
def test_a_frozen_part_set_up_alone_may_be_trained_in_its_model(
    is_alone_first: bool,
) -> None:
    part, unfreezing = Parts(), Unfreezing(False, REDUCES)
    model = nn.Sequential(part, nn.Linear(1, 1))
    noted = [(part, False), (model, True)]
    for module, may_train in noted if is_alone_first else reversed(noted):
        unfreezing.note(module, may_train)
    trains(part)
    assert step_of(unfreezing, model)() == 3


def test_a_module_that_a_program_has_let_go_is_let_go() -> None:
    module, unfreezing = Parts(), Unfreezing(False, REDUCES)
    made(unfreezing, module)
    found = weakref.ref(module)
    del module
    gc.collect()
    assert found() is None


@pytest.mark.parametrize(
    ("exchange_frozen", "arguments", "expected"),
    [
        (True, REDUCES, True),
        (False, REDUCES, False),
        (True, {**REDUCES, "static_graph": True}, False),
        (True, {}, False),
    ],
)
def test_frozen_weights_are_reduced_where_ddp_looks_for_unused_ones(
    exchange_frozen: bool, arguments: dict[str, bool], expected: bool
) -> None:
    seen = made(Unfreezing(exchange_frozen, arguments), Parts())
    assert ("backbone" in seen) is expected
