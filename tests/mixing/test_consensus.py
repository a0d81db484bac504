"""The mean over all learners, and how far they are from it, against arithmetic."""

import math
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from lightning_adpsgd.mixing.consensus import (
    Consensus,
    ConsensusModel,
)
from lightning_adpsgd.weights.flat import FlatParameters


class Thresholds(nn.Module):
    """A weight, three buffers, and one over the weight's memory."""

    kept: Tensor
    placed: Tensor
    given: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("view", self.weight.detach())
        for name in ("kept", "placed", "given"):
            self.register_buffer(name, torch.tensor(1.0))


def mean_of_fives(vectors: list[Tensor], trained: list[Tensor]) -> Consensus:
    for vector in vectors:
        vector.fill_(5.0)
    return Consensus(0.0, 0.0)


def test_buffers_that_are_changed_beside_the_mean_stay_and_all_else_is_restored() -> (
    None
):
    module = Thresholds()
    flat, settled = FlatParameters(module), Mock()
    model = ConsensusModel(flat, settled, lambda _: None, average=mean_of_fives)
    model.enter("validation")
    with torch.no_grad():
        module.weight.fill_(6.0)  # an average that a callback does not take back
    module.placed.mul_(2.0)
    module.given = module.given + 2
    flat.rebind()
    local_weights = model.local_weights()
    assert local_weights is not None
    assert sorted(local_weights[0].tolist()) == [1, 1, 1, 7, 10]
    model.leave(adopt=False)
    assert model.local_weights() is None
    assert (module.weight.tolist(), module.kept.item()) == ([1, 1], 1)
    assert (module.placed.item(), module.given.item()) == (10, 7)


@pytest.mark.parametrize(("adopts", "shown"), [(False, 1.0), (True, 5.0)])
def test_exchanges_pause_before_the_meeting_and_show_what_training_goes_on_from(
    adopts: bool, shown: float
) -> None:
    told, flat = Mock(), FlatParameters(Thresholds())
    told.average.side_effect = mean_of_fives
    model = ConsensusModel(flat, told.communication, told.meet, told.average)
    model.enter("validation", adopts)
    (vectors, _), _ = told.communication.set_aside.call_args
    assert vectors[0].tolist() == [shown] * 5
    model.leave(adopts)
    assert [name.rpartition(".")[2] for name, *_ in told.mock_calls] == (
        ["pause", "meet", "settle", "set_aside", "average", "resume"]
    )


def test_a_buffer_that_is_held_only_beside_the_mean_is_the_learners_own_again() -> None:
    module = Thresholds()
    flat = FlatParameters(module)
    model = ConsensusModel(flat, Mock(), lambda _: None, average=mean_of_fives)
    model.enter("validation")
    module.placed.fill_(7.0)
    saved = model.local_weights()
    assert saved is not None
    assert sorted(saved[0].tolist()) == [1, 1, 1, 1, 7]
    module.placed.fill_(5.0)  # as a callback that gives it back
    model.leave(adopt=False)
    assert module.placed.item() == 1


def test_a_mean_that_fails_leaves_the_local_weights() -> None:
    module = Thresholds()
    flat, settled = FlatParameters(module), Mock()

    def failing(vectors: list[Tensor], trained: list[Tensor]) -> Consensus:
        vectors[0].fill_(5.0)
        raise FloatingPointError

    model = ConsensusModel(flat, settled, lambda _: None, average=failing)
    with pytest.raises(FloatingPointError):
        model.enter("validation")
    assert (model.entered, flat.vectors[0].tolist()) == (False, [1.0] * 5)
    settled.resume.assert_called_once_with()


def test_a_mean_that_another_learner_has_made_nan_comes_into_no_buffer() -> None:
    module = Thresholds()

    def mean_of_nan(vectors: list[Tensor], trained: list[Tensor]) -> Consensus:
        vectors[0].fill_(math.nan)
        return Consensus(0.0, 0.0)

    flat = FlatParameters(module)
    model = ConsensusModel(flat, Mock(), lambda _: None, average=mean_of_nan)
    model.enter("validation")
    module.placed.fill_(3.0)
    model.leave(adopt=False)
    assert (module.kept.item(), module.placed.item()) == (1, 3)
    assert module.weight.tolist() == [1, 1]
