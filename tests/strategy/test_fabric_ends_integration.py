"""How a training with Fabric ends: well, by a failure, or forgotten; real processes."""

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_adpsgd.registration import NAMES
from tests import warm
from tests.expectations import (
    MODES,
    expect_death_named,
    expect_ends,
    expect_error_named,
    kill,
    leave,
    raise_error,
)
from tests.helpers import (
    PROGRAM_S,
    engine_threads,
    free_port,
    in_fresh_process,
    num_gpus,
)
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

ROOT = Path(__file__).parents[2]


# --- steps that would be lost


def test_steps_that_nobody_would_learn_of_are_refused() -> None:
    def program(rank: int) -> list[str]:
        fabric, module = launched(gossip(), 2), Slope()
        # Before its module, so that nobody knows what it changes.
        early: Any = fabric.setup_optimizers(sgd(module))
        model = fabric.setup_module(module)
        messages = []

        def refused(optimizer: Any) -> None:
            with pytest.raises(RuntimeError) as error:
                train(fabric, model, optimizer, loader(1))
            messages.append(str(error.value))

        refused(early)
        optimizer: Any = fabric.setup_optimizers(sgd(module))
        with strategy_of(fabric).consensus():
            refused(optimizer)
        strategy_of(fabric).finish()
        refused(optimizer)
        with pytest.raises(RuntimeError, match="this training has ended"):
            fabric.setup_optimizers(sgd(module))
        return messages

    for early, inside, late in values(learners(2, program)):
        assert "set it up with its optimizer" in early
        assert "within `fabric.strategy.consensus()` would be lost" in inside
        assert "again to continue after `fabric.strategy.finish()`" in late


def test_a_teardown_in_the_middle_waits_for_nobody() -> None:
    def program(rank: int) -> list[str]:
        strategy, module = gossip(), Slope()
        fabric = launched(strategy, 2)
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, loader(8, rank, 2))
        strategy.teardown()
        return engine_threads()

    assert values(learners(2, program)) == [[], []]


# --- failures


def failing(mode: Any, rank: int, action: Callable[[], Any]) -> list[Any]:
    """Four learners train without end, but for one's fourth step."""
    topology, communication, size = mode

    def training(fabric: Fabric) -> None:
        module, own = Slope(), fabric.global_rank
        model, optimizer = fabric.setup(module, sgd(module))
        for epoch in range(1_000_000):
            train(fabric, model, optimizer, loader(12, own, 4))
            time.sleep(0.02)  # who goes on until it is told leaves the cores to others
            if own == rank and epoch == 1:
                action()

    def program(own: int) -> None:
        strategy = gossip(topology, communication, super_learner_size=size)
        fabric_of(strategy, 4).launch(training)

    outcomes = learners(4, program)
    expect_ends(outcomes, rank, action)
    return outcomes


# The Trainer's strategy ends by the same `Job`, and its tests try every mode.
@pytest.mark.parametrize(("mode", "rank"), [(MODES[0], 0), (MODES[2], 1)])
def test_an_exception_ends_all_and_is_named(mode: Any, rank: int) -> None:
    expect_error_named(failing(mode, rank, raise_error), rank)


@pytest.mark.parametrize("mode", [MODES[1], MODES[3]])
def test_a_killed_learner_ends_the_rest_and_is_named(mode: Any) -> None:
    expect_death_named(failing(mode, 2, kill))


@pytest.mark.parametrize("size", [1, 4])
def test_a_death_before_a_collective_is_named_with_the_collective(size: int) -> None:
    def training(fabric: Fabric) -> None:
        module = Slope()
        fabric.setup(module, sgd(module))
        if fabric.global_rank == 2:
            kill()
        fabric.all_reduce(torch.ones(1))

    def program(rank: int) -> None:
        strategy = gossip("ring", "sync", super_learner_size=size)
        fabric_of(strategy, 4).launch(training)

    outcomes = learners(4, program)
    expect_ends(outcomes, 2, kill)
    expected = r"LearnerFailed: learner \d on host \S+ lost another learner in "
    assert re.search(expected + "all_reduce of all learners: ", outcomes[0].error)


def test_who_has_failed_before_there_is_a_job_is_named() -> None:
    def training(fabric: Fabric) -> None:
        if fabric.global_rank == 1:
            raise_error()
        fabric.barrier()

    def program(rank: int) -> None:
        fabric_of(gossip(), 2).launch(training)

    first, second = learners(2, program)
    message = r"learner 1 on host \S+ raised ValueError: the answer is 42"
    assert re.search(message, first.error)
    assert "ValueError: the answer is 42" in second.error


def test_learners_that_were_given_different_options_are_told() -> None:
    def program(rank: int) -> None:
        launched(gossip(mixing_gain=(0.5, 0.25)[rank]), 2)

    for outcome in learners(2, program):
        assert "`mixing_gain` differs: 0.5 in learner 0" in outcome.error


def test_unused_parameters_need_an_option_which_the_error_names() -> None:
    def training(fabric: Fabric) -> None:
        layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        layers.forward = layers[0].forward
        model, optimizer = fabric.setup(layers, sgd(layers))
        for _ in range(2):
            fabric.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()

    def program(rank: int) -> None:
        fabric_of(gossip(super_learner_size=2), 2).launch(training)

    for outcome in learners(2, program):
        assert "`find_unused_parameters=True` to the strategy's class" in outcome.error


def test_the_exit_of_one_learner_ends_all() -> None:
    outcomes = failing(("ring", "async", 1), 1, leave)
    assert re.search(r"learner 1 on host \S+ raised SystemExit: 3", outcomes[0].error)


def test_learners_whose_models_differ_are_told() -> None:
    def program(rank: int) -> None:
        module = Slope()
        if rank == 1:
            module.weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
        launched(gossip(), 2).setup(module, sgd(module))

    outcomes = learners(2, program)
    told = r"the model of learner 1 on host \S+ differs from that of learner 0"
    assert re.search(told, outcomes[1].error)
    assert outcomes[0].exit_code > 0


def test_learners_that_come_to_different_meetings_are_told() -> None:
    def training(fabric: Fabric) -> None:
        module, rank = Slope(), fabric.global_rank
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, loader(8, rank, 2))
        if rank == 1:
            fabric.barrier("alone")

    def program(rank: int) -> None:
        fabric_of(gossip(), 2).launch(training)

    outcomes = learners(2, program)
    assert all(outcome.exit_code > 0 for outcome in outcomes)
    assert "'alone'" in outcomes[0].error
    assert "'end of training'" in outcomes[0].error


# --- scripts and launchers

# What raises is a program handed to `launch`; the others launch first.
SCRIPT = """
import os
import sys
import time
from pathlib import Path

import torch
from tests.strategy.fabric_learners import Slope, fabric_of, sgd, train
from tests.learners import loader

name, mode, folder = sys.argv[1:]


def program(fabric):
    module = Slope()
    model, optimizer = fabric.setup(module, sgd(module))
    batches = loader(16, fabric.global_rank, fabric.world_size)
    if mode in ("raises", "forgets early") and fabric.global_rank == 1:
        train(fabric, model, optimizer, [next(iter(batches))])
        assert mode != "raises", "the answer is 42"
        return module
    while mode in ("raises", "forgets early"):
        train(fabric, model, optimizer, batches)
        time.sleep(0.02)
    train(fabric, model, optimizer, batches)
    return module


if __name__ == "__main__":
    fabric = fabric_of(name, 2)
    if mode == "raises":
        result = fabric.launch(program)
    else:
        if "LT_CLI_USED" not in os.environ:
            fabric.launch()
        result = program(fabric)
    if mode == "finishes":
        fabric.strategy.finish()
    path = Path(folder) / f"{fabric.global_rank}.pt"
    torch.save(result.weight.detach(), path)
"""


def run(
    folder: Path, name: str, mode: str, launcher: str = ""
) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    port = str(free_port())
    options = launcher.format(port=port).split()
    return subprocess.run(
        [warm.python(), *options, str(script), name, mode, str(folder)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MASTER_PORT": port,
        },
        cwd=ROOT,
    )


@pytest.mark.slow
def test_the_launcher_of_fabrics_command_line_trains(tmp_path: Path) -> None:
    launcher = (
        "-m lightning.fabric.cli --strategy=adpsgd --accelerator=cpu "
        "--devices=2 --main-port={port}"
    )
    result = run(tmp_path, "adpsgd", "finishes", launcher)
    assert result.returncode == 0, result.stderr
    finals = [torch.load(path) for path in sorted(tmp_path.glob("*.pt"))]
    assert len(finals) == 2
    for final in finals:
        torch.testing.assert_close(final, consensus_after(16, 2), atol=1e-12, rtol=0)


@pytest.mark.slow
def test_a_program_that_forgets_to_finish_is_told_and_does_not_hang(
    tmp_path: Path,
) -> None:
    result = run(tmp_path, "adpsgd", "forgets")
    told = (
        r"ended without `fabric\.strategy\.finish\(\)`, so that its weights may differ"
    )
    assert re.search(told, result.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("raises", r"raised AssertionError: the answer is 42"),
        ("forgets early", r"raised RuntimeError: the program ended"),
    ],
)
def test_the_end_of_one_script_ends_the_others(
    tmp_path: Path, mode: str, message: str
) -> None:
    result = run(tmp_path, "adpsgd", mode)
    assert result.returncode != 0
    told = rf"Training ends: learner 1 on host \S+ {message}"
    assert re.search(told, result.stderr)


def _training(fabric: Fabric) -> tuple[list[float], int]:
    module = Slope()
    model, optimizer = fabric.setup(module, sgd(module))
    batches = loader(16, fabric.global_rank, fabric.world_size)
    train(fabric, model, optimizer, batches)
    strategy_of(fabric).finish()
    return module.weight.tolist(), len(engine_threads())


def train_by_fork(names: str) -> dict[str, tuple[list[float], int]]:
    """What `_training` returns, in learner 0 of two, for each name."""
    trained = {}
    for name in names.split():
        os.environ["MASTER_PORT"] = str(free_port())
        trained[name] = fabric_of(f"{name}_fork", 2).launch(_training)
    return trained


@pytest.fixture(scope="module")
def trained_by_fork() -> Any:
    """By all names in one process, most of whose time are its imports."""
    return in_fresh_process(train_by_fork, " ".join(NAMES), finalizes=False)


@pytest.mark.skipif(num_gpus() > 0, reason="CUDA forbids to fork")
@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains_by_the_fork_launcher(
    name: str, trained_by_fork: Any
) -> None:
    weight, num_threads = trained_by_fork[name]
    final = torch.tensor(weight, dtype=torch.float64)
    torch.testing.assert_close(final, consensus_after(16, 2), atol=1e-12, rtol=0)
    assert num_threads == 0
