"""Programs that end their process group, and train again: in a notebook, in a sweep.

What is left of the first training must not keep its store, whose keys torch would read
again: its numbers of groups begin anew.
"""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers import PATIENCE_S
from tests.learners import Linear, Rows, gossip, learners, trainer_of, values
from tests.strategy.fabric_learners import Slope, launched, sgd
from tests.strategy.fabric_learners import gossip as fabric_gossip


def ends_of_groups(num: int) -> Callable[[], None]:
    """A function with which so many learners end their process group.

    Under `ddp`, too, nobody may connect anew before learner 0 has ended the old one.
    """
    all_are_here = get_context("fork").Barrier(num, timeout=PATIENCE_S)

    def end() -> None:
        all_are_here.wait()
        dist.destroy_process_group()
        all_are_here.wait()

    return end


def test_trainers_train_again_with_a_group_of_their_own() -> None:
    """The first Trainer lives on, with the loader of a shared epoch."""
    end_group = ends_of_groups(2)

    def program(rank: int) -> list[Tensor]:
        trainers, weights = list[pl.Trainer](), list[Tensor]()
        for _ in range(3):
            module = Linear()
            trainer = trainer_of(gossip(), 2, use_distributed_sampler=True)
            trainer.fit(module, DataLoader(Rows(8)))
            trainers.append(trainer)
            weights.append(module.weight.detach().clone())
            end_group()
        return weights

    one, other = values(learners(2, program))
    for weights, of_other in zip(one, other, strict=True):
        torch.testing.assert_close(weights, of_other)


def test_trainers_train_again_after_an_exception_in_all_learners() -> None:
    end_group = ends_of_groups(2)

    class Fails(Linear):
        def on_train_epoch_start(self) -> None:
            raise ZeroDivisionError

    def program(rank: int) -> int:
        trainers = [trainer_of(gossip(), 2) for _ in range(2)]
        with pytest.raises(ZeroDivisionError):
            trainers[0].fit(Fails(), DataLoader(Rows(4)))
        end_group()
        trainers[1].fit(Linear(), DataLoader(Rows(4)))
        return trainers[1].global_step

    assert values(learners(2, program)) == [4, 4]


def test_fabric_launches_again_with_a_group_of_its_own() -> None:
    """In super-learners of two, whose modules are in DDP."""
    end_group = ends_of_groups(4)

    def train(fabric: Any) -> Tensor:
        module = Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        for _ in range(3):
            optimizer.zero_grad()
            fabric.backward(model(torch.ones(1, 3, dtype=torch.float64)))
            optimizer.step()
        fabric.strategy.finish()
        return module.weight.detach().clone()

    def program(rank: int) -> list[Tensor]:
        strategy = fabric_gossip("complete", "sync", super_learner_size=2)
        fabric = launched(strategy, 4)
        weights = list[Tensor]()
        for is_last in (False, True):
            weights.append(train(fabric))
            end_group()
            if not is_last:
                fabric.launch()
        return weights

    for one in values(learners(4, program)):
        for weights in one:
            torch.testing.assert_close(weights, one[0])
