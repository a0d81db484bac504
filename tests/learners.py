"""Learners for integration tests: small modules, and a forked process for each."""

import faulthandler
import inspect
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy
from tests.helpers import PATIENCE, Outcome, forked, free_port

LR = 0.1
COMMUNICATIONS = ("sync", "delay_by_one", "async")
T = TypeVar("T")
# From Lightning 2.6 on `val_check_interval` may be a duration.
_INTERVAL = inspect.signature(pl.Trainer).parameters["val_check_interval"]
VALIDATES_BY_TIME = "timedelta" in str(_INTERVAL)


class Rows(Dataset[Tensor]):
    """Seeded random rows of a shape, [length, ...], in double precision."""

    def __init__(
        self, length: int, seed: int = 1, shape: tuple[int, ...] = (3,)
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = length, *shape
        self.rows = torch.randn(size, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Learned(pl.LightningModule, ABC):
    """A module with one loss, in training and in validation."""

    @abstractmethod
    def loss(self, batch: Tensor) -> Tensor: ...

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch))


class Linear(Learned):
    """Its gradient is the batch's mean row, whatever the weights: a fixed sequence."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), start, dtype=torch.float64))

    @override
    def loss(self, batch: Tensor) -> Tensor:
        return (batch @ self.weight).mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LR)


class Quadratic(Linear):
    """Pulls its weights to the batch: the gradient is 2 (w - mean row) / 3."""

    @override
    def loss(self, batch: Tensor) -> Tensor:
        return (batch - self.weight).square().mean()


def own_weight(module: Any) -> Tensor:
    """A copy of a learner's weight."""
    return module.weight.detach().clone()


class Trajectory(pl.Callback):
    """This learner's weights after each step, as they are read off its module."""

    def __init__(self, weights_of: Callable[[Any], Tensor] = own_weight) -> None:
        self._weights_of = weights_of
        self.weights: list[Tensor] = []

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.weights.append(self._weights_of(pl_module))


def loader(length: int, rank: int = 0, num: int = 1) -> DataLoader[Tensor]:
    """Every `num`-th row from `rank` on, in order, one to a batch."""
    return DataLoader(Subset(Rows(length), range(rank, length, num)))


class Sampled(Linear):
    """Deals its rows itself, because the learners begin inside `fit`."""

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return loader(16, self.global_rank, self.trainer.world_size)


def trainer_of(
    strategy: str | HADPSGDStrategy, num_learners: int, **arguments: Any
) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        # Lightning's sampler shuffles the training rows; `loader` deals them in order.
        "use_distributed_sampler": False,
    }
    return pl.Trainer(
        devices=num_learners,
        strategy=strategy,
        **{**quiet, "accelerator": "cpu", **arguments},
    )


def gossip(topology: Any = "ring", communication: Any = "async", **dials: Any) -> Any:
    """The strategy with one learner to a super-learner and a test's patience."""
    return HADPSGDStrategy(
        topology,
        communication,
        **{"super_learner_size": 1, "timeout": PATIENCE, **dials},
    )


def consensus_after(num_rows: int, num_learners: int, start: float = 0.0) -> Tensor:
    """start - lr * sum of the mean gradients of `Linear` over all steps."""
    steps = num_rows // num_learners
    return start - LR * steps * Rows(num_rows).rows.mean(0)


def as_torchrun(rank: int, num: int, port: int) -> dict[str, str]:
    """What torchrun tells a learner by its environment."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }


def learners(
    num: int, program: Callable[[int], Any], seconds: float = 100
) -> list[Outcome]:
    """Runs a program as each of `num` learners, as `torchrun` would start them."""
    port = free_port()

    def learner(rank: int) -> Any:
        os.environ.update(as_torchrun(rank, num, port))
        warnings.simplefilter("ignore")
        faulthandler.dump_traceback_later(seconds - 2)
        return program(rank)

    return forked(num, learner, seconds)


def values(outcomes: list[Outcome]) -> list[Any]:
    """What all learners returned; fails with the first error of any."""
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"learner {rank}: {outcome.error}"
    return [outcome.value for outcome in outcomes]


def in_every_mode(
    num: int,
    program: Callable[[int, Any], T],
    modes: Sequence[Any] = COMMUNICATIONS,
) -> dict[Any, list[T]]:
    """What each learner returns, for each mode; the same processes run all of them."""

    def named(rank: int, mode: Any) -> T:
        try:
            return program(rank, mode)
        except BaseException as error:
            error.add_note(f"mode: {mode}")
            raise

    def all_named(rank: int) -> list[T]:
        return [named(rank, mode) for mode in modes]

    told = values(learners(num, all_named, seconds=200))
    return dict(zip(modes, map(list, zip(*told, strict=True)), strict=True))


def each(results: dict[Any, list[T]]) -> list[tuple[Any, T]]:
    """All learners of all modes."""
    return [(mode, one) for mode, told in results.items() for one in told]
