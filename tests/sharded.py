"""A small transformer that its learners shard, for tests."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Subset
from typing_extensions import override

from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.weights.shards import local_part
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
        target = batch.sum((1, 2))[:, None] * torch.arange(
            5.0, dtype=batch.dtype, device=batch.device
        )
        return (self(batch) - target).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.5)


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
    state = module.state_dict().values()
    whole = (w.full_tensor() if isinstance(w, DTensor) else w for w in state)
    return torch.cat([weight.detach().flatten() for weight in whole])


def held(module: Transformer) -> Tensor:
    """A copy of what this learner holds of the weights."""
    return torch.cat([one.flatten() for one in _parts(module)])


def joined(module: Transformer, steps: Sequence[Tensor]) -> Tensor:
    """The weights after each step, from what each learner of a super-learner held.

    One collective of these, for all steps; they must share no layer.
    """
    own = torch.stack([*steps]).numpy(), [one.numel() for one in _parts(module)]
    of_learners = [own]
    if module.device_mesh is not None:
        group = module.device_mesh.get_group("data_parallel")
        of_learners *= dist.get_world_size(group)
        dist.all_gather_object(of_learners, own, group)
    parts = [torch.from_numpy(rows).split(sizes, 1) for rows, sizes in of_learners]
    # A shard is some rows of a weight, and so one stretch of its elements.
    in_order = zip(*parts, strict=True)
    return torch.cat([part for of_weight in in_order for part in of_weight], 1)


def _parts(module: Transformer) -> list[Tensor]:
    return [local_part(weight) for weight in module.state_dict().values()]


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
    def of(cls, trainer: pl.Trainer, steps: Tensor, end: Tensor) -> "Run":
        """A training that has ended, whose threads have ended too."""
        assert engine_threads() == []
        last = getattr(trainer.strategy, "last_consensus", None)
        return cls(
            steps,
            end,
            {name: float(value) for name, value in trainer.callback_metrics.items()},
            getattr(trainer.strategy, "gossip_statistics", lambda: None)(),
            last.distance if last is not None else None,
        )

    @classmethod
    def of_shards(
        cls, trainer: pl.Trainer, module: Transformer, trajectory: Trajectory
    ) -> "Run":
        """A training of learners that share no layer; it has noted what is `held`."""
        *steps, end = joined(module, [*trajectory.weights, held(module)])
        return cls.of(trainer, torch.stack(steps), end)
