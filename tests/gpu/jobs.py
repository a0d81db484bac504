"""Jobs of learners that share GPU 0, each a process of its own.

NCCL refuses two learners on one GPU unless it takes them for learners of two hosts,
which `NCCL_HOSTID` tells it: their messages then cross sockets, as between machines.
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
ROOT = Path(__file__).parents[2]
PER_LEARNER, SECONDS = 16, 100

Ended = list[dict[str, Any]]
"""What each learner printed last."""


def fit(
    accelerator: str,
    num_learners: int = 2,
    precision: str = "32-true",
    scale: float | None = None,
    own_device: bool = False,
    nccl: bool = False,
    **dials: Any,
) -> Ended:
    """What every learner ends with after a training on `Rows`.

    Args:
        accelerator: Of the Trainer.
        num_learners: Each the only one of its host, unless it has a device of its own.
        precision: Of the Trainer.
        scale: Of the gradients of "16-mixed", at first; None: Lightning's.
        own_device: Whether learner n has device n.
        nccl: Whether learners that share a GPU use NCCL all the same.
        dials: Of the strategy.
    """
    dials = {"super_learner_size": 1, **dials}
    if not own_device and not nccl:
        dials["process_group_backend"] = "gloo"
    told = {
        "accelerator": accelerator,
        "devices": num_learners if own_device else 1,
        "num_nodes": 1 if own_device else num_learners,
        "precision": precision,
        "scale": scale,
        "num_rows": PER_LEARNER * num_learners,
        "num_learners": num_learners,
        "strategy": dials,
    }
    return finish(start_all("tests.gpu.learner", told, num_learners, own_device))


def start_all(
    module: str, told: dict[str, Any], num: int, own_device: bool = False
) -> "list[subprocess.Popen[str]]":
    """Starts the learners of a job."""
    port = free_port()
    return [_start(module, told, rank, num, own_device, port) for rank in range(num)]


def finish(processes: "list[subprocess.Popen[str]]") -> Ended:
    """Waits for all and returns what each printed last."""
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(p.returncode for p in processes), [e[-2000:] for _, e in outputs]
    return [json.loads(said.splitlines()[-1]) for said, _ in outputs]


def _start(
    module: str,
    told: dict[str, Any],
    rank: int,
    num: int,
    own_device: bool,
    port: int,
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
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same sums in each run
    }
    if not own_device:
        environment |= {"NCCL_HOSTID": f"host {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    # Libraries of a GPU are to be loaded by the process that uses them.
    python = warm.python() if told["accelerator"] == "cpu" else sys.executable
    return subprocess.Popen(
        [python, "-m", module, json.dumps(told)],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_consensus(ended: Ended, tolerance: float = 1e-5) -> None:
    """All hold start - lr * sum of the mean gradients."""
    num_rows = PER_LEARNER * len(ended)
    expected = -LR * PER_LEARNER * Rows(num_rows).rows.mean(0)
    for learner in ended:
        weight = torch.tensor(learner["weight"], dtype=torch.float64)
        torch.testing.assert_close(weight, expected, atol=tolerance, rtol=0)
        assert learner["steps"] == PER_LEARNER
