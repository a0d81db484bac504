"""Callbacks that write weights, with learners that are played one after the other."""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_adpsgd.strategy import weight_callbacks
from lightning_adpsgd.strategy.weight_callbacks import average_copies
from lightning_adpsgd.topology.partition import Partition

NAN = float("nan")
MASK = torch.tensor([0.0, -torch.inf])


class Keeps(Callback):
    """As `WeightAveraging` does."""

    def __init__(self, average: nn.Module) -> None:
        self._average_model = average


def kept(values: Sequence[float]) -> list[nn.Linear]:
    """The average of each learner, with an attention mask."""
    models = [nn.Linear(2, 1, bias=False) for _ in values]
    for model, value in zip(models, values, strict=True):
        nn.init.constant_(model.weight, value)
        model.register_buffer("mask", MASK.clone())
    return models


def average(
    models: list[nn.Linear], sizes: tuple[int, ...], patch: pytest.MonkeyPatch
) -> list[list[float]]:
    """The weights of all learners after their averages have been averaged."""
    reduced: list[Any] = []
    patch.setattr(weight_callbacks.dist, "all_reduce", lambda one: reduced.pop(0)(one))
    patch.setattr(weight_callbacks.dist, "get_world_size", lambda: len(models))

    def learner(rank: int, model: nn.Module) -> None:
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        callbacks, rank_of = [Keeps(model)], {"global_rank": rank}
        trainer: Any = SimpleNamespace(
            strategy=strategy, callbacks=callbacks, **rank_of
        )
        average_copies(trainer, Partition(sizes))

    # What a learner gives depends on nobody else, so first each of them is heard.
    given: list[list[Tensor]] = []
    for rank, model in enumerate(models):
        given.append(told := [])
        reduced[:] = [lambda one, told=told: told.append(one.clone())] * 9
        learner(rank, copy.deepcopy(model))
    totals = [torch.stack(of_all).sum(0) for of_all in zip(*given, strict=True)]
    for rank, model in enumerate(models):
        reduced[:] = [lambda one, total=total: one.copy_(total) for total in totals]
        learner(rank, model)
    return [model.weight[0].tolist() for model in models]


@pytest.mark.parametrize(
    ("values", "sizes", "mean"),
    [
        ((1.0, 4.0, 4.0), (1, 1, 1), 3.0),
        ((1.0, 4.0, 4.0), (1, 2), 2.5),
        ((1.0, NAN, 4.0), (1, 1, 1), 2.5),
        ((torch.inf, 4.0, 4.0), (1, 2), 4.0),
    ],
)
def test_an_average_that_is_no_number_stays_out_of_the_mean_and_takes_it(
    values: Sequence[float],
    sizes: tuple[int, ...],
    mean: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A learner may have averaged its weights while they were NaN."""
    models = kept(values)
    assert average(models, sizes, monkeypatch) == [[mean, mean]] * len(values)
    assert all(torch.equal(model.get_buffer("mask"), MASK) for model in models)


def test_a_reset_of_batch_norm_leaves_the_tensors_that_are_averaged() -> None:
    module: Any = nn.Sequential(nn.BatchNorm1d(2))
    layer = nn.BatchNorm1d(2)
    module[0].running_mean.fill_(7.0)
    before = dict(module.named_buffers())

    def reset(module: Any) -> None:
        module[0]._buffers = layer._buffers  # as SWA gives it new ones

    weight_callbacks._reset_in_place(reset, module)  # pyright: ignore
    after = dict(module.named_buffers())
    assert all(after[name] is buffer for name, buffer in before.items())
    assert module[0].running_mean.tolist() == [0.0, 0.0]


def pruning(in_consensus: bool, moves: bool, patch: pytest.MonkeyPatch) -> list[Any]:
    """What a job is asked for when a callback prunes, and maybe begins anew."""
    patch.setattr(weight_callbacks.dist, "broadcast", lambda *_: None)
    module, job = nn.Linear(2, 2), Mock(in_consensus=in_consensus)
    trainer: Any = SimpleNamespace(lightning_module=module)

    def prune(epoch: int) -> None:
        if moves:
            module.weight.data = torch.ones(2, 2)

    weight_callbacks._prune(trainer, job, prune, 0)
    return job.mock_calls


@pytest.mark.parametrize("moves", [False, True])
def test_learners_prune_the_consensus_and_go_on_from_their_own_weights(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where a lottery ticket puts all of them back to the start."""
    adopts, restores = call.adopt("end of pruning"), call.leave_consensus(adopt=False)
    asked = [call.enter_consensus("pruning"), call.flat.rebind()]
    asked.append(adopts if moves else restores)
    assert pruning(False, moves, monkeypatch) == asked


def test_a_validation_that_prunes_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pruning(True, False, monkeypatch) == [call.flat.rebind()]
    assert pruning(True, True, monkeypatch)[-1] == call.adopt("end of pruning")


def test_an_average_is_written_into_the_consensus_which_stays() -> None:
    told = Mock()
    weight_callbacks._transfer(told.enter, told.adopt, told.transfer, 1, 2)  # pyright: ignore
    expected = [call.enter("weight averaging"), call.transfer(1, 2)]
    assert told.mock_calls == [*expected, call.adopt("end of weight averaging")]
