"""Programs of a learner that train through Lightning's Trainer, as users do."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks import workload
from benchmarks.feed import Counted, Feed, Task, Trace
from benchmarks.learners import Place
from benchmarks.quiet import quiet_trainer, quieten
from benchmarks.workload import Batch
from lightning_adpsgd import HADPSGDStrategy


class Module(L.LightningModule):
    """The workload as a LightningModule."""

    def __init__(self, feed: Feed, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._feed, self._task = feed, task
        feed.counted = self._counted
        self.local: Tensor | None = None

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self._feed, batch_size=None)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._feed.tick()
        return workload.loss(self.model, batch)

    @override
    def on_train_epoch_end(self) -> None:
        self.local = workload.weights_of(self.model)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._task.make_optimizer(self.model.parameters())

    def _counted(self) -> Counted:
        strategy = self.trainer.strategy
        if not isinstance(strategy, HADPSGDStrategy):
            return Counted()
        found = strategy.gossip_statistics()
        if found is None:
            return Counted()
        return Counted(found.exposed_seconds, found.exchanges)


def through_trainer(strategy: str) -> Callable[[Place, Task], Trace]:
    """A program that trains with a strategy, without Lightning's extras."""

    def program(place: Place, task: Task) -> Trace:
        num_hosts = place.world_size // place.per_host
        return train(place, task, strategy, place.per_host, num_hosts)

    return program


def alone(place: Place, task: Task) -> Trace:
    """A program that trains through a Trainer that sees no other learner."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    return train(place, task, "auto", devices=1, num_nodes=1)


def within_host(place: Place, task: Task) -> Trace:
    """A program of `ddp` within a host, which sees no other host."""
    local = place.rank % place.per_host
    os.environ.update(
        RANK=str(local),
        WORLD_SIZE=str(place.per_host),
        GROUP_RANK="0",
        MASTER_ADDR=place.address,
    )
    return train(place, task, "ddp", place.per_host, num_nodes=1)


def train(
    place: Place,
    task: Task,
    strategy: Any,
    devices: int,
    num_nodes: int,
    callbacks: Sequence[L.Callback] = (),
) -> Trace:
    """Makes one fit."""
    quieten()
    feed = Feed(place, task)
    module = Module(feed, task.make_model(place.rank), task)
    trainer = quiet_trainer(
        strategy, callbacks=list(callbacks), devices=devices, num_nodes=num_nodes
    )
    trainer.fit(module)
    feed.leave()
    return feed.trace(workload.weights_of(module.model), module.local)
