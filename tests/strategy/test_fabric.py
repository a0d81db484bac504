"""What Fabric's strategy takes and refuses, without peers."""

import inspect
import logging
import pickle
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ddp
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_adpsgd import HADPSGDFabricStrategy, HADPSGDStrategy
from lightning_adpsgd.registration import NAMES
from tests.learners import consensus_after, learners, loader, values
from tests.strategy.fabric_learners import (
    Slope,
    fabric_of,
    gossip,
    launched,
    sgd,
    strategy_of,
    train,
)


def arguments_of(strategy: type) -> dict[str, tuple[Any, Any]]:
    """Type and default of what a constructor takes."""
    parameters = inspect.signature(strategy).parameters.values()
    return {p.name: (p.annotation, p.default) for p in parameters}


def test_fabric_and_trainer_have_the_same_dials() -> None:
    trainer = arguments_of(HADPSGDStrategy)
    assert arguments_of(HADPSGDFabricStrategy) == trainer
    # Eighteen, and what shards (`inside`) and ready pairs (`max_wait`) need.
    assert len(trainer) <= 20


def test_epochs_are_the_programs_own() -> None:
    with pytest.raises(ValueError, match="`work_sharing` must be False in Fabric"):
        HADPSGDFabricStrategy(work_sharing=True)


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"topology": "star"}, r"`topology` must be one of 'ring'.*got 'star'"),
        ({"communication": "later"}, r"`communication`.*'sync'.*got 'later'"),
        ({"mixing_gain": 1.5}, r"`mixing_gain` must be in \(0, 1\], got 1.5"),
        ({"inside": "model_parallel"}, r"`inside` must be \"ddp\" in Fabric, got"),
    ],
)
def test_a_dial_out_of_its_bounds_is_refused_with_bound_and_value(
    dials: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        HADPSGDFabricStrategy(**dials)


def test_the_strategy_is_one_of_fabrics_own_kind() -> None:
    """Which is what Fabric asks before it shares batches among the learners."""
    assert isinstance(HADPSGDFabricStrategy(), ddp.DDPStrategy)


def test_a_strategy_travels_to_a_spawned_process() -> None:
    strategy = HADPSGDFabricStrategy("random_ring", super_learner_size=2)
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy._dials == strategy._dials


def test_nothing_communicates_before_training() -> None:
    strategy = HADPSGDFabricStrategy()
    assert strategy.gossip_statistics() == []
    assert strategy.finish() == []
    with strategy.consensus() as distances:
        assert distances == []


@pytest.mark.parametrize("name", NAMES)
def test_one_learner_alone_trains_as_plain_sgd(name: str) -> None:
    def program(rank: int) -> Tensor:
        fabric, module = launched(name, 1), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        with fabric.no_backward_sync(model):
            pass
        train(fabric, model, optimizer, loader(8))
        assert strategy_of(fabric).finish() == []
        return module.weight.detach()

    (final,) = values(learners(1, program))
    torch.testing.assert_close(final, consensus_after(8, 1))


def test_one_node_alone_is_ddp_and_says_so() -> None:
    def program(rank: int) -> tuple[bool, list[str]]:
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        rank_zero.log.addHandler(handler)
        fabric, module = launched("hadpsgd", 2), Slope()
        model, _ = fabric.setup(module, sgd(module))
        return isinstance(model._forward_module, DistributedDataParallel), told

    results = values(learners(2, program))
    assert [wrapped for wrapped, _ in results] == [True, True]
    told = [message for _, messages in results for message in messages]
    (message,) = [m for m in told if "All 2 learners form one super-learner" in m]
    assert "`super_learner_size`" in message


def test_a_size_that_does_not_divide_the_learners_is_refused() -> None:
    def program(rank: int) -> None:
        launched(gossip(super_learner_size=3), 2).setup_module(Slope())

    for outcome in learners(2, program):
        assert "must divide the number of learners 2, got 3" in outcome.error


def test_a_program_within_a_program_ends_with_the_outer_one() -> None:
    def inner(fabric: Fabric, model: nn.Module, optimizer: Any) -> None:
        train(fabric, model, optimizer, loader(4, fabric.global_rank, 2))

    def outer(fabric: Fabric) -> Slope:
        module = Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        for _ in range(2):
            inner(fabric, model, optimizer)
            fabric.launch()
        return module

    def program(rank: int) -> Tensor:
        return fabric_of(gossip(), 2).launch(outer).weight.detach()

    for final in values(learners(2, program)):
        torch.testing.assert_close(final, 2 * consensus_after(4, 2))


def test_statistics_are_those_of_each_module_and_outlive_the_training() -> None:
    def program(rank: int) -> Any:
        strategy = gossip("complete", "sync")
        fabric, module = launched(strategy, 2), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, loader(8, rank, 2))
        (apart,) = strategy.finish()
        (statistics,) = strategy.gossip_statistics()
        return statistics.exchanges, statistics.bytes_sent, apart.distance

    # Four steps of three float64 weights; after a complete average all are equal.
    for exchanges, bytes_sent, distance in values(learners(2, program)):
        assert (exchanges, bytes_sent) == (4, 4 * 3 * 8)
        assert distance == pytest.approx(0, abs=1e-12)
