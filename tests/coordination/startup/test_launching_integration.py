"""How launchers number learners: the environments of Lightning, with real processes.

The variables are those that each launcher sets; the launchers themselves run where the
name of a test says so.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.kubeflow import KubeflowEnvironment

from benchmarks import launch_hosts
from lightning_adpsgd import HADPSGDStrategy
from tests import warm
from tests.helpers import PATIENCE, PROGRAM_S, Outcome, free_port
from tests.learners import (
    Sampled,
    consensus_after,
    learners,
    trainer_of,
    values,
)

ROOT = Path(__file__).parents[3]
ROWS = 16
SCRIPT = [str(ROOT / "benchmarks" / "launch_hosts.py"), "--learn"]
_OF_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "TORCHELASTIC_RUN_ID",
)


def train(devices: int, num_nodes: int, plugins: Any = None) -> tuple[Any, int, int]:
    """Final weights, number of super-learners, rank of one learner."""
    module = Sampled()
    strategy = HADPSGDStrategy("ring", super_learner_size="node", timeout=PATIENCE)
    trainer = trainer_of(strategy, devices, num_nodes=num_nodes, plugins=plugins)
    trainer.fit(module)
    weights = module.weight.detach()
    return weights, strategy.num_super_learners, trainer.global_rank


def started_by(
    variables: Callable[[int], Mapping[str, str]], *shape: Any
) -> list[Outcome]:
    """Four learners with the variables of a launcher instead of torchrun's."""

    def program(rank: int) -> Any:
        for name in _OF_TORCHRUN:
            os.environ.pop(name)
        os.environ.update(variables(rank))
        return train(*shape)

    return learners(4, program)


def assert_trained(outcomes: list[Outcome], num_super_learners: int) -> None:
    told = values(outcomes)
    assert [rank for _, _, rank in told] == [0, 1, 2, 3]
    assert {count for _, count, _ in told} == {num_super_learners}
    for weights, _, _ in told:
        assert torch.equal(weights, told[0][0])
    torch.testing.assert_close(told[0][0], consensus_after(ROWS, 4))


def of_slurm(rank: int, node: int, local_rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "node[1-2]",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local_rank),
    }


def named(node: int) -> None:
    """Gives this process the host name of a node, as far as the package can see."""
    socket.gethostname = lambda: f"node{node}"  # type: ignore[assignment]


def test_the_variables_of_slurm_make_a_super_learner_of_each_node() -> None:
    outcomes = started_by(lambda rank: of_slurm(rank, rank // 2, rank % 2), 2, 2)
    assert_trained(outcomes, 2)


def test_a_cyclic_distribution_of_slurm_is_refused_with_the_right_option() -> None:
    def variables(rank: int) -> dict[str, str]:
        node = rank % 2
        named(node)
        return of_slurm(rank, node, rank // 2)

    for outcome in started_by(variables, 2, 2):
        assert "learners 0-1 (hosts node0, node1) would form one" in outcome.error
        assert "`srun --distribution=block`" in outcome.error


def test_unequal_nodes_are_refused_with_their_numbers() -> None:
    def variables(rank: int) -> dict[str, str]:
        node = rank // 3
        named(node)
        return of_slurm(rank, node, rank % 3) | {"SLURM_TASKS_PER_NODE": "3,1"}

    for outcome in started_by(variables, 2, 2):
        assert "(there are 3 on node0, 1 on node1)" in outcome.error
        assert (
            "learner 2 on host node0: it is learner 3 of its machine" in outcome.error
        )


def test_the_variables_of_kubeflow_make_a_super_learner_of_each_pod() -> None:
    def variables(rank: int) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": "4"}

    def program(rank: int) -> Any:
        for name in _OF_TORCHRUN:
            os.environ.pop(name)
        os.environ.update(variables(rank))
        return train(1, 4, KubeflowEnvironment())

    assert_trained(learners(4, program), 4)


@pytest.mark.slow
def test_plain_variables_on_each_host_do_too() -> None:
    """One process started by hand on each host; Lightning starts the others there."""
    port = free_port()

    def environment(node: int) -> dict[str, str]:
        own = {"NODE_RANK": str(node), "MASTER_PORT": str(port)}
        quiet = {k: v for k, v in os.environ.items() if k not in _OF_TORCHRUN}
        here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return {**quiet, **here, "MASTER_ADDR": "127.0.0.1", **own}

    processes = [
        subprocess.Popen(
            [warm.python(), *SCRIPT, "--devices=2", "--nodes=2"],
            env=environment(node),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [process.communicate(timeout=PROGRAM_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert_result("".join(outputs), 4, 2)


def assert_result(output: str, num_learners: int, num_super_learners: int) -> None:
    told = launch_hosts.results(output)
    assert [result["rank"] for result in told] == list(range(num_learners)), output
    assert {result["super-learners"] for result in told} == {num_super_learners}
    end = launch_hosts.weights_at_the_end(num_learners)
    for result in told:
        weights = torch.tensor(result["weights"], dtype=torch.float64)
        torch.testing.assert_close(weights, end, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py",
)
def test_mpirun_starts_learners_that_train() -> None:
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "4"]
    done = subprocess.run(
        [*words, sys.executable, *SCRIPT, "--devices=4", "--nodes=1", "--size=2"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stderr
    assert_result(done.stdout, 4, 2)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["static", "network", "firewall"])
def test_torchrun_on_emulated_hosts(name: str) -> None:
    """The other scenarios differ from tests without a launcher in the hosts alone."""
    if reason := launch_hosts.missing(name):
        pytest.skip(reason)
    finished = launch_hosts.play(name, python=warm.python())
    assert launch_hosts.wrong(name, finished) == [], finished
