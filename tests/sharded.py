"""A small transformer that its learners shard, for tests."""

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Subset
from typing_extensions import override

from lightning_adpsgd.mixing.statistics import Statistics
from tests.helpers import engine_threads
from tests.learners import Learned, Rows, Trajectory

needs_fsdp2_on_cpus = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="needs a later torch"
)
LR = 0.05
# Norms, attention, the first layer and the head are in each of these learners.
PLAN: dict[str, ParallelStyle] = {
    "blocks.*.network.0": ColwiseParallel(),
    "blocks.*.network.2": RowwiseParallel(),
}


class Block(nn.Module):
    """Attention and a two-layer network, each around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.network = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.network(self.norms[1](x))


class Network(nn.Module):
    """Blocks between a linear layer and a head of 5 outputs.

    The head's rows do not divide by 2 or 4 learners, and so are padded by FSDP2.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.begin = nn.Linear(3, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 5)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.begin(x))).mean(1)


class Transformer(Learned):
    """Sharded over `data_parallel` where the strategy has a mesh, else whole.

    Where the mesh has `tensor_parallel` learners, these share the layers of `plan`.

    Args:
        width: width of the blocks.
        depth: number of blocks.
        seed: seed of the weights.
        prepare: function that changes the network before it is sharded.
        options: what `fully_shard` takes beside the mesh.
    """

    def __init__(
        self,
        width: int = 6,
        depth: int = 2,
        seed: int = 0,
        prepare: Callable[[Network], None] = lambda network: None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.prepare, self.lr, self.plan = prepare, LR, PLAN
        self.sizes, self.seed, self.options = (width, depth), seed, options
        self.network: Network | None = None

    @override
    def configure_model(self) -> None:
        if self.network is not None:
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.network = Network(*self.sizes).double()
        self.prepare(self.network)
        mesh = self.device_mesh
        if mesh is not None:
            if mesh["tensor_parallel"].size() > 1:
                parallelize_module(self.network, mesh["tensor_parallel"], self.plan)
            mesh = mesh["data_parallel"]
            for block in self.network.blocks:
                fully_shard(block, mesh=mesh, **self.options)
            fully_shard(self.network, mesh=mesh, **self.options)

    @override
    def forward(self, batch: Tensor) -> Tensor:
        assert self.network is not None
        return self.network(batch)

    @override
    def loss(self, batch: Tensor) -> Tensor:
        target = batch.sum((1, 2))[:, None] * torch.arange(5.0, dtype=batch.dtype)
        return (self(batch) - target).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.5)

    def whole(self) -> dict[str, Tensor]:
        """The weights of all learners of a super-learner; a collective of these."""
        return {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in self.state_dict().items()
        }


class FromMeta(Transformer):
    """A network that has no weights before its shards have memory."""

    @override
    def configure_model(self) -> None:
        with torch.device("meta"):
            layers = nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 5)
            network = nn.Sequential(*layers).double()
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        fully_shard(network[0], mesh=mesh)
        fully_shard(network, mesh=mesh)
        self.linear = network

    @override
    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(batch).mean(1)


def sequences(length: int, rank: int, num: int, batch: int = 2) -> DataLoader[Tensor]:
    """Every `num`-th sequence, [4, 3], from `rank` on, in order."""
    rows = Rows(length, shape=(4, 3))
    return DataLoader(Subset(rows, range(rank, length, num)), batch)


def as_vector(module: Transformer) -> Tensor:
    """The weights of all learners of a super-learner; a collective of these."""
    return torch.cat([w.detach().flatten() for w in module.whole().values()])


class Run(NamedTuple):
    """What one learner has seen of a training.

    Attributes:
        steps: weights after each step.
        end: weights at the end.
        metrics: what was logged.
        statistics: what communication has done.
        distance: consensus distance when the mean was last taken.
    """

    steps: Tensor
    end: Tensor
    metrics: dict[str, float]
    statistics: Statistics | None
    distance: float | None

    @classmethod
    def of(
        cls, trainer: pl.Trainer, module: Transformer, trajectory: Trajectory
    ) -> "Run":
        """A training that has ended, whose threads have ended too."""
        assert engine_threads() == []
        last = getattr(trainer.strategy, "last_consensus", None)
        return cls(
            torch.stack(trajectory.weights),
            as_vector(module),
            {name: float(value) for name, value in trainer.callback_metrics.items()},
            getattr(trainer.strategy, "gossip_statistics", lambda: None)(),
            last.distance if last is not None else None,
        )
