"""The strategy on GPUs, in real processes; on the CPU once, so that the test is known.

Learners share GPU 0 unless NCCL is asked for, which wants a GPU for each. The mean of
all learners is known exactly, as in `test_strategy_integration`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.helpers import free_port, num_gpus
from tests.learners import LR, Rows

NEEDS_GPU = pytest.mark.skipif(num_gpus() < 1, reason="needs a GPU")
NEEDS_TWO = pytest.mark.skipif(num_gpus() < 2, reason="needs two GPUs")
ROOT = Path(__file__).parents[1]
PER_LEARNER, SECONDS = 16, 100


def fit(
    accelerator: str,
    num_learners: int = 2,
    precision: str = "32-true",
    own_device: bool = False,
    **dials: Any,
) -> list[dict[str, Any]]:
    """What every learner ends with.

    Args:
        accelerator: Of the Trainer.
        num_learners: Each the only one of its host, unless it has a device of its own.
        precision: Of the Trainer.
        own_device: Whether learner n has device n.
        dials: Of the strategy.
    """
    dials = {"super_learner_size": 1, **dials}
    if not own_device:
        dials["process_group_backend"] = "gloo"
    told = {
        "accelerator": accelerator,
        "devices": num_learners if own_device else 1,
        "num_nodes": 1 if own_device else num_learners,
        "precision": precision,
        "num_rows": PER_LEARNER * num_learners,
        "num_learners": num_learners,
        "strategy": dials,
    }
    port = free_port()
    processes = [
        start(told, rank, num_learners, own_device, port)
        for rank in range(num_learners)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(p.returncode for p in processes), [e[-2000:] for _, e in outputs]
    return [json.loads(said.splitlines()[-1]) for said, _ in outputs]


def start(
    told: dict[str, Any], rank: int, num: int, own_device: bool, port: int
) -> "subprocess.Popen[str]":
    """Starts one learner, as `torchrun` would."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank if own_device else 0,
        "WORLD_SIZE": num,
        "LOCAL_WORLD_SIZE": num if own_device else 1,
        "GROUP_RANK": 0 if own_device else rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "test",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    # Libraries of a GPU are to be loaded by the process that uses them.
    python = warm.python() if told["accelerator"] == "cpu" else sys.executable
    return subprocess.Popen(
        [python, "-m", "tests.gpu_learner", json.dumps(told)],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_consensus(ended: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    """All hold start - lr * sum of the mean gradients."""
    num_rows = PER_LEARNER * len(ended)
    expected = -LR * PER_LEARNER * Rows(num_rows).rows.mean(0)
    for learner in ended:
        weight = torch.tensor(learner["weight"], dtype=torch.float64)
        torch.testing.assert_close(weight, expected, atol=tolerance, rtol=0)
        assert learner["steps"] == PER_LEARNER


def test_two_learners_of_two_hosts_on_the_cpu() -> None:
    ended = fit("cpu")
    assert_consensus(ended)
    assert all(learner["device"] == "cpu" for learner in ended)


@NEEDS_GPU
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16", "float16", "int8", "int4"])
def test_gossip_on_a_gpu_ends_in_the_mean(wire_dtype: str | None) -> None:
    ended = fit("cuda", wire_dtype=wire_dtype)
    assert_consensus(ended)
    assert all(learner["device"] == "cuda:0" for learner in ended)
    assert sum(learner["exchanges"] for learner in ended) > 0


@NEEDS_GPU
@pytest.mark.parametrize("order", ["step_then_average", "average_then_step"])
@pytest.mark.parametrize("num_learners", [2, 3])
def test_gossip_on_a_gpu_in_both_orders(order: str, num_learners: int) -> None:
    assert_consensus(fit("cuda", num_learners, order=order))


@NEEDS_GPU
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("bf16-mixed", 0.05), ("16-mixed", 0.01)]
)
def test_mixed_precision_on_a_gpu(precision: str, tolerance: float) -> None:
    assert_consensus(fit("cuda", precision=precision), tolerance)


@NEEDS_GPU
@pytest.mark.parametrize("communication", ["sync", "delay_by_one"])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_rounds_on_a_gpu_over_the_host(communication: str, topology: str) -> None:
    assert_consensus(fit("cuda", 3, communication=communication, topology=topology))


@NEEDS_GPU
@pytest.mark.parametrize("communication", ["async", "sync", "delay_by_one"])
def test_super_learners_of_two_on_one_gpu(communication: str) -> None:
    ended = fit("cuda", 4, super_learner_size=2, communication=communication)
    assert_consensus(ended)


@NEEDS_TWO
@pytest.mark.parametrize("communication", ["async", "sync", "delay_by_one"])
@pytest.mark.parametrize("topology", ["ring", "complete", "random_pairs"])
def test_a_gpu_for_each_learner_over_nccl(communication: str, topology: str) -> None:
    dials: dict[str, Any] = {"communication": communication, "topology": topology}
    assert_consensus(fit("cuda", own_device=True, **dials))
