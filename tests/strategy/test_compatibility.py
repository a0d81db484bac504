"""Errors of Lightning and torch that would hide a cause or name another remedy."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_adpsgd.strategy.compatibility import (
    explain_unused_parameters,
    forget_loader_without_iterator,
    refuse_unsupported_in_fabric,
)


def trainer_with(loader: CombinedLoader) -> Any:
    fetcher = SimpleNamespace(_combined_loader=loader)
    return SimpleNamespace(fit_loop=SimpleNamespace(_data_fetcher=fetcher))


@pytest.mark.parametrize("begun", [True, False])
def test_only_a_loader_without_an_iterator_is_forgotten(begun: bool) -> None:
    """Lightning's teardown asks the loader for its length, which it has not yet."""
    loader = CombinedLoader(DataLoader(torch.zeros(4, 1)))  # pyright: ignore
    trainer = trainer_with(loader)
    if begun:
        iter(loader)
    forget_loader_without_iterator(trainer)
    kept = trainer.fit_loop._data_fetcher._combined_loader
    assert kept is (loader if begun else None)
    forget_loader_without_iterator(trainer)


@pytest.mark.parametrize("fetcher", [None, SimpleNamespace()])
def test_a_trainer_may_have_no_loader(fetcher: Any) -> None:
    forget_loader_without_iterator(None)
    fit_loop: Any = SimpleNamespace(_data_fetcher=fetcher)
    trainer: Any = SimpleNamespace(fit_loop=fit_loop)
    forget_loader_without_iterator(trainer)


def test_an_error_of_ddp_on_unused_weights_names_our_remedy_and_no_other_does() -> None:
    ddps = RuntimeError("Expected to have finished reduction in the prior iteration")
    other = RuntimeError("out of memory", 3)
    for error in (ddps, other):
        explain_unused_parameters(error)
    assert "find_unused_parameters=True" in str(ddps)
    assert other.args == ("out of memory", 3)


FROZEN_NORM = torch.nn.SyncBatchNorm(3).requires_grad_(False)


@pytest.mark.parametrize(
    ("module", "device", "ddp", "size", "message"),
    [
        (torch.nn.SyncBatchNorm(3), "cpu", {}, 1, "must not be a SyncBatchNorm"),
        # Its mode makes it synchronise, whether its weights are trained or not.
        (FROZEN_NORM, "cpu", {}, 1, "must not be a SyncBatchNorm"),
        (torch.nn.Linear(1, 1), "mps", {}, 1, "`accelerator` must be 'cpu' or 'cuda'"),
        (
            torch.nn.Linear(1, 1),
            "cpu",
            {"mixed_precision": "bf16"},
            1,
            "`mixed_precision` must not be set with `super_learner_size=1`, got bf16",
        ),
    ],
)
def test_what_fabric_cannot_honour_is_refused(
    module: torch.nn.Module, device: str, ddp: dict[str, Any], size: int, message: str
) -> None:
    given = torch.device(device), ddp, size
    with pytest.raises(ValueError, match=message):
        refuse_unsupported_in_fabric(torch.nn.Sequential(module), *given)


def test_what_fabric_can_honour_is_not_refused() -> None:
    module, cpu = torch.nn.Linear(1, 1), torch.device("cpu")
    refuse_unsupported_in_fabric(module, cpu, {"gradient_as_bucket_view": True}, 1)
    refuse_unsupported_in_fabric(module, cpu, {"mixed_precision": "bf16"}, 2)
