"""What Fabric's strategy takes and refuses, without peers."""

import copy
import gc
import inspect
import logging
import pickle
import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ddp
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_adpsgd import HADPSGDFabricStrategy, HADPSGDStrategy
from lightning_adpsgd.coordination.failures import FailureReport
from lightning_adpsgd.registration import NAMES
from lightning_adpsgd.strategy import fabric as fabric_strategy
from lightning_adpsgd.strategy.evaluation_watch import EvaluationWatch
from lightning_adpsgd.strategy.job import Job
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
    assert len(trainer) <= 18


def replaced_optimizer(strategy: Any, module: nn.Module) -> Any:
    """Adds two optimizers, and lets go of the first, which is in a cycle."""
    first, second = sgd(module), sgd(module)
    vars(first)["scheduler"] = SimpleNamespace(optimizer=first)
    for optimizer in (first, second):
        strategy.jobs.add_optimizer(optimizer)
    return second


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
    travelled = pickle.loads(pickle.dumps(strategy))
    assert travelled.dials == strategy.dials


def test_the_rate_of_an_optimizer_is_saved_as_a_number_of_pythons() -> None:
    """One of NumPy's would be refused by a load, which takes plain data alone."""
    numpy = pytest.importorskip("numpy")
    optimizer = sgd(Slope(), numpy.float64(0.25))
    state: Any = gossip().get_optimizer_state(optimizer)
    assert type(state["param_groups"][0]["lr"]) is float
    assert state == optimizer.state_dict()


def test_a_checkpoint_of_learners_with_other_optimizers_is_refused() -> None:
    """Such as those of an earlier phase of the training."""
    strategy, module, job = gossip(), Slope(), create_autospec(Job, instance=True)
    strategy.jobs.set_up(module, lambda: job)
    saved = [{"learners": [{}], "states": [{}, {}]}]
    with pytest.raises(ValueError, match=r"of 2 optimizers .* and 0 are set up"):
        strategy._restore_learner(job, saved)
    job.enter_consensus.assert_not_called()


def test_an_optimizer_that_a_program_has_replaced_is_in_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One with a scheduler may be in a cycle, and the collector has not run since."""
    strategy, module = gossip(), Slope()
    job = create_autospec(Job, instance=True, running=True, in_consensus=False)
    job.failures = create_autospec(FailureReport, instance=True)
    strategy.jobs.set_up(module, lambda: job)
    monkeypatch.setattr(
        fabric_strategy, "gather_learners", lambda _, states, *__: states
    )
    monkeypatch.setattr(fabric_strategy, "generator_states", lambda device: {})
    monkeypatch.setattr(type(strategy), "root_device", torch.device("cpu"))
    gc.disable()
    try:
        kept = [replaced_optimizer(strategy, module)]
        (states,) = strategy._gather_learners()
        assert len(states) == 1
        kept.append(replaced_optimizer(strategy, module))
        with pytest.raises(ValueError, match=r"of 3 optimizers .* and 2 are set up"):
            strategy._restore_learners(
                [[{"learners": [{}], "states": [{}] * 3}]], [module]
            )
    finally:
        gc.enable()


def test_where_one_module_has_no_mean_all_modules_are_as_before() -> None:
    """Else the steps of the others would be refused from then on."""
    strategy, jobs, modules = gossip(), list[Any](), (Slope(), Slope())
    for module, error in zip(modules, (None, FloatingPointError()), strict=True):
        state = {"running": True, "in_consensus": False}
        jobs.append(create_autospec(Job, instance=True, **state))
        jobs[-1].enter_consensus.side_effect = error
        strategy.jobs.set_up(module, lambda: jobs[-1])
    with pytest.raises(FloatingPointError), strategy.consensus():
        pass
    jobs[0].leave_consensus.assert_called_once_with(False)


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


def test_one_super_learner_alone_is_ddp_and_says_so() -> None:
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
        fabric = launched(gossip(super_learner_size=3), 2)
        fabric.barrier()  # one that still connects would hear that the other left
        fabric.setup_module(Slope())

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


# --- an evaluation of local weights


def said_of(strategy: Any, evaluate: Any) -> list[str]:
    """What learner 0 is told about an evaluation, in a program of two learners."""

    def program(rank: int) -> list[str]:
        fabric, module = launched(strategy, 2), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(fabric, model, optimizer, loader(4, rank, 2))
            evaluate(fabric, model)
        strategy_of(fabric).finish()
        said = [str(warning.message) for warning in caught]
        return [words for words in said if "own weights" in words]

    first, second = values(learners(2, program))
    assert second == []
    return first


@torch.no_grad()
def evaluate_twice(fabric: Fabric, model: nn.Module) -> None:
    model.eval()
    for batch in loader(2):
        model(batch)
    model.train()


def evaluate_in_consensus(fabric: Fabric, model: nn.Module) -> None:
    with strategy_of(fabric).consensus():
        evaluate_twice(fabric, model)


def test_an_evaluation_of_local_weights_is_told_once() -> None:
    (words,) = said_of(gossip(), evaluate_twice)
    assert "`Slope` is evaluated with this learner's own weights" in words
    assert "`with fabric.strategy.consensus():`" in words


@pytest.mark.parametrize(
    ("communication", "evaluate"),
    [("async", evaluate_in_consensus), ("sync", evaluate_twice)],
)
def test_an_evaluation_of_the_consensus_or_in_lockstep_is_told_nothing(
    communication: str, evaluate: Any
) -> None:
    assert said_of(gossip("complete", communication), evaluate) == []


class Running:
    """What the watch asks of a job."""

    running, in_consensus = True, False


def test_a_copy_of_a_watched_module_has_no_watch(tmp_path: Any) -> None:
    module: Any = Slope()
    job: Any = Running()
    EvaluationWatch(module, job)
    torch.save(module, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for copied in (loaded, copy.deepcopy(module)):
            copied.eval()(torch.zeros(1, 3))
        module(torch.zeros(1, 3))  # in training
    with torch.no_grad(), pytest.warns(UserWarning, match="own weights"):
        module.eval()(torch.zeros(1, 3))
