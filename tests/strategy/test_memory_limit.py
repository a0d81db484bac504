"""A transformer of which no learner could hold a replica, under a limit of memory.

The limit is one of the kernel on the private memory of each process (RLIMIT_DATA), set
when all is imported and nothing is built. The learners are forked from a program of
their own: what a worker's other tests have left in its heap is used again under any
limit, or cannot be used at all, and so would decide what fits.
"""

import ctypes
import json
import resource
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, Subset
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy
from tests import warm
from tests.helpers import PATIENCE, PATIENCE_S
from tests.learners import Learned, Rows, learners, trainer_of
from tests.sharded import needs_fsdp2_on_cpus

pytestmark = needs_fsdp2_on_cpus

WIDTH, DEPTH, STEPS = 384, 12, 2
WEIGHTS = 4 * 12 * WIDTH * WIDTH * DEPTH
"""Bytes of a replica, but for biases: 85 MB."""

LIMIT = 4.6
"""In replicas. With gradients, Adam's moments and the buckets of DDP one takes 5."""

_ARENAS, _MMAP_THRESHOLD = -8, -3


class Block(nn.Module):
    """Attention with four heads, and a network, each around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.heads, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:2], 4, -1
        parts = (p.view(shape).transpose(1, 2) for p in self.heads(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*parts)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        return x + self.network(self.norm(x))


class Large(Learned):
    """Learns to repeat its input; block after block is made, and sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: nn.Sequential | None = None
        self.losses: list[float] = []

    @override
    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        torch.manual_seed(0)
        mesh, blocks = self.device_mesh, list[Block]()
        for _ in range(DEPTH):
            blocks.append(Block())
            if mesh is not None:
                fully_shard(blocks[-1], mesh=mesh["data_parallel"])
        self.blocks = nn.Sequential(*blocks)

    @override
    def loss(self, batch: Tensor) -> Tensor:
        assert self.blocks is not None
        batch = batch.float()
        loss = (self.blocks(batch) - batch).square().mean()
        self.losses.append(float(loss))
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-4, fused=True)


def limit_memory(num_bytes: int) -> None:
    """Allows this process so much private memory beside what it has."""
    libc = ctypes.CDLL(None)
    # What is freed goes back to the system, whichever thread frees it.
    libc.mallopt(_ARENAS, 1)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 20)
    attributes = ctypes.create_string_buffer(64)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 20))
    libc.pthread_setattr_default_np(attributes)
    status = Path("/proc/self/status").read_text()
    used = int(status.partition("VmData:")[2].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, used + num_bytes))


def train(strategy: Any, num_learners: int, rank: int) -> tuple[list[float], int]:
    """The losses of all steps, and how many exchanges there were."""
    limit_memory(int(LIMIT * WEIGHTS))
    trainer, module = trainer_of(strategy, num_learners), Large()
    trainer.fit(module, DataLoader(Subset(Rows(4, 1, (4, WIDTH)), [rank] * STEPS)))
    exchanges = 0 if strategy == "ddp" else strategy.gossip_statistics().exchanges
    return module.losses, exchanges


STRATEGIES = {
    "sharded": lambda: HADPSGDStrategy(
        "complete", "async", 2, inside="model_parallel", timeout=PATIENCE, cpu_share=1.0
    ),
    "ddp": lambda: "ddp",
}


def program(name: str, num: int) -> None:
    """Prints the error of each learner, or what it returned."""
    for outcome in learners(num, partial(train, STRATEGIES[name](), num), 300):
        print(json.dumps({"error": outcome.error, "value": outcome.value}), flush=True)


def outcomes_of(name: str, num: int) -> list[dict[str, Any]]:
    """What learners print that a program without other tests starts."""
    code = f"from {__name__} import program; program({name!r}, {num})"
    ended = subprocess.run(
        [warm.python(), "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        timeout=PATIENCE_S * 12,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"error"')]
    assert len(lines) == num, ended.stdout
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_learners_train_what_one_could_not_hold() -> None:
    for outcome in outcomes_of("sharded", 4):
        assert not outcome["error"]
        losses, num_exchanges = outcome["value"]
        assert len(losses) == STEPS
        assert losses[-1] < losses[0]
        assert num_exchanges > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_whole_replicas_do_not_fit_the_limit() -> None:
    """Not even without gossip; otherwise the test above would show nothing."""
    outcomes = outcomes_of("ddp", 2)
    assert any("can't allocate memory" in outcome["error"] for outcome in outcomes)
    assert not any(outcome["value"] for outcome in outcomes)
