"""Islands whose programs are loops of their own, on Fabric."""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_adpsgd import HADPSGDFabricStrategy
from lightning_adpsgd.islands import island, joining
from lightning_adpsgd.islands.member_list import Heartbeat
from tests.faults.world import world
from tests.helpers import PATIENCE_S, Outcome, engine_threads, forked
from tests.islands.archipelago import Server
from tests.strategy.fabric_learners import Slope, launched, sgd, strategy_of

ROW = torch.ones(1, 3, dtype=torch.float64)


def train_until(
    fabric: Any, model: Any, optimizer: Any, condition: Callable[[], bool]
) -> None:
    """Steps that change nothing, as the learning rate is 0."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        optimizer.zero_grad()
        fabric.backward(model(ROW))
        optimizer.step()
        time.sleep(0.002)


def test_an_island_of_fabric_joins_another_and_goes_on_from_there(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("fork")
    first_trains, both_have_met = context.Event(), context.Barrier(2)

    def program(rank: int) -> Any:
        object.__setattr__(island._TIMEOUTS, "heartbeat", Heartbeat(empty_s=0.2))
        if rank == 1:
            assert first_trains.wait(PATIENCE_S)
        fabric = launched(HADPSGDFabricStrategy(islands=url), 1)
        strategy, module = strategy_of(fabric), Slope(start=1.0 + rank)
        assert strategy.position is None
        model, optimizer = fabric.setup(module, sgd(module, lr=0.0))
        began, position = module.weight.detach().clone(), strategy.position
        assert position is not None

        def has_made_steps() -> bool:
            now = strategy.position
            return now is not None and now.steps >= position.steps + 5

        def has_met() -> bool:
            statistics = strategy.gossip_statistics()[0]
            return statistics.members == 2 and statistics.exchanges > 2

        train_until(fabric, model, optimizer, has_made_steps)
        first_trains.set()
        train_until(fabric, model, optimizer, has_met)
        both_have_met.wait(PATIENCE_S)
        (consensus,) = strategy.finish()
        return began, position.steps, module.weight.detach(), consensus.members

    with world(tmp_path) as islands:
        url = islands.url
        outcomes = forked(2, program)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    first, second = (outcome.value for outcome in outcomes)
    ones = torch.ones(3, dtype=torch.float64)
    for began, _, weights, _ in (first, second):
        assert torch.equal(began, ones)
        torch.testing.assert_close(weights, ones)
    assert first[1] == 0
    assert second[1] >= 5
    # Who ends first finds the other; who ends last may be alone by then.
    assert {first[3], second[3]} <= {1, 2}
    assert max(first[3], second[3]) == 2


def test_an_island_of_one_learner_trains_no_module_that_it_set_up_frozen() -> None:
    """Which no island would average."""

    def program(rank: int) -> str:
        fabric = launched(HADPSGDFabricStrategy(islands="tcp://127.0.0.1:1"), 1)
        module = Slope().requires_grad_(False)
        model = fabric.setup_module(module)
        optimizer: Any = fabric.setup_optimizers(sgd(module))
        module.requires_grad_(True)
        fabric.backward(model(ROW))
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
        return str(error.value)

    (outcome,) = forked(1, program)
    assert "again with `fabric.setup`" in outcome.value


def test_an_island_whose_start_was_interrupted_is_set_up_again() -> None:
    """Somebody presses Ctrl-C in a notebook, starts the rendezvous, and goes on."""

    def program(rank: int) -> tuple[bool, Any, int]:
        object.__setattr__(island._TIMEOUTS, "heartbeat", Heartbeat(empty_s=0.2))
        server, module = Server(), Slope()
        strategy = HADPSGDFabricStrategy(islands=str(server.address))
        fabric = launched(strategy, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joining.Joining, "await_number", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                fabric.setup(module, sgd(module))
        left = engine_threads(), strategy.position
        server.start()
        fabric.setup(module, sgd(module))
        (job,) = strategy.jobs.running
        assert job.island is not None
        is_in = job.island.membership.is_in
        (consensus,) = strategy.finish()
        server.stop()
        return is_in, left, consensus.members

    assert forked(1, program) == [Outcome((True, ([], None), 1), "", 0)]


def _interrupt(_: joining.Joining) -> None:
    raise KeyboardInterrupt


def test_islands_of_fabric_meet_over_one_module_at_a_time() -> None:
    def program(rank: int) -> None:
        strategy = HADPSGDFabricStrategy(islands="tcp://127.0.0.1:1")
        fabric = launched(strategy, 1)
        fabric.setup_module(Slope())
        with pytest.raises(ValueError, match=r"one trained module .* got 2:"):
            fabric.setup_module(Slope())
        strategy.finish()
        fabric.setup_module(Slope())

    assert forked(1, program) == [Outcome(None, "", 0)]
