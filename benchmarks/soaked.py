"""One life of a learner in `soak`: an island that shares batches and records all.

With credentials, it authenticates itself and encrypts its messages. It saves after each
epoch. Signals make its weights NaN, and its disk slow.
"""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks import killed_methods, step_journal, workload
from benchmarks.fault_injection import FALL_ILL, SLOW_DISK
from benchmarks.history import Name
from benchmarks.killable import Killable
from benchmarks.lightning_programs import quieten
from benchmarks.recorder import Recorder
from benchmarks.step_journal import Entry, Journal
from benchmarks.workload import NARROW, Batch
from lightning_adpsgd import HADPSGDStrategy

STEP_S = 0.1
UNITS = 1200  # batches of an epoch, of all learners
SLOW_FOR_S, WRITE_S = 6.0, 2.0
CREDENTIALS = "credentials"


# --- data: numbered batches, the same at every call


class Unit(NamedTuple):
    """A batch and its number."""

    number: int
    batch: Batch


class Units(Dataset[Unit]):
    """All batches of an epoch."""

    def __len__(self) -> int:
        return UNITS

    @override
    def __getitem__(self, index: int) -> Unit:
        return Unit(index, batch_of(index))


def batch_of(number: int) -> Batch:
    """The batch of a number in an epoch."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(workload.BATCH, workload.WIDTHS[0], generator=generator)
    return Batch(inputs, _teacher()(inputs))


@cache
def _teacher() -> Any:
    return workload.make_teacher()


def _only(units: list[Unit]) -> Unit:
    return units[0]


# --- the learner


class Module(L.LightningModule):
    """The module that a learner trains."""

    def __init__(self, life: Killable) -> None:
        super().__init__()
        self.model, self.life = life.make_model(), life
        self._ready_at = time.monotonic()
        self._diary = Journal(life.folder, life.number, life.life)
        self._recorder = Recorder(life.folder, Name(life.number, life.life))
        self._recorder.follow_exchanges()
        self._falls_ill = False
        signal.signal(FALL_ILL, self._fall_ill)

    def _fall_ill(self, number: int, frame: object) -> None:
        self._falls_ill = True

    @override
    def train_dataloader(self) -> DataLoader[Unit]:
        return DataLoader(Units(), batch_size=1, shuffle=True, collate_fn=_only)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = workload.make_optimizer(self.model)
        optimizer.register_step_post_hook(self._recorder.end_update)
        return optimizer

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._recorder.begin_update(optimizer)

    @override
    def training_step(self, batch: Unit, batch_idx: int) -> Tensor:
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        self._ready_at = time.monotonic() + STEP_S
        if self._falls_ill:
            self._falls_ill = False
            next(self.model.parameters()).data.fill_(float("nan"))
        return workload.loss(self.model, batch.batch)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Unit, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        island = strategy._run.job.island
        epoch = self.trainer.current_epoch
        self._recorder.step(island.engine.replica, (epoch, batch.number), island)
        members, loss = strategy.gossip_statistics().members, float(outputs["loss"])
        now = time.monotonic()
        self._diary.write(Entry(now, members, loss, step_journal.memory_of()))
        self.trainer.should_stop = self.life.over

    @override
    def on_train_epoch_end(self) -> None:
        if self.life.over:
            self.life.leave(workload.weights_of(self.model))


def live(life: Killable, host: str) -> None:
    """Runs one life, from the start of its process to the end of the run."""
    quieten()
    own_disk()
    os.environ["LIGHTNING_ADPSGD_CREDENTIALS"] = str(life.folder / CREDENTIALS)
    folder = life.folder / f"checkpoints-{life.number}"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=HADPSGDStrategy(
            *("ring", "async", 1),
            islands=f"tcp://{host}:{life.port}",
            work_sharing=True,
        ),
        max_epochs=1_000_000,
        limit_val_batches=0,
        logger=False,
        callbacks=[ModelCheckpoint(folder)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(life))


def own_disk() -> None:
    """After a signal, delays this process's writes to the disk for a while."""
    until, plain = [0.0], os.fsync

    def make_slow(number: int, frame: object) -> None:
        until[0] = time.monotonic() + SLOW_FOR_S

    def slow(file: int) -> None:
        if time.monotonic() < until[0]:
            time.sleep(WRITE_S)
        plain(file)

    signal.signal(SLOW_DISK, make_slow)
    os.fsync = slow  # pyright: ignore


# --- for comparison


def undisturbed(num_learners: int, num_steps: int) -> Tensor:
    """The weights of as many undisturbed learners that take their mean in each step."""
    model = workload.make_model(widths=NARROW)
    optimizer = workload.make_optimizer(model)
    feed = _epochs()
    for _ in range(num_steps):
        parts = list(itertools.islice(feed, num_learners))
        optimizer.zero_grad()
        columns = (torch.cat(column) for column in zip(*parts, strict=True))
        workload.loss(model, Batch(*columns)).backward()
        optimizer.step()
    return workload.weights_of(model)


def _epochs() -> Iterator[Batch]:
    dice = torch.Generator().manual_seed(0)
    while True:
        for number in torch.randperm(UNITS, generator=dice).tolist():
            yield batch_of(number)


@torch.no_grad()
def held_out_loss(weights: Tensor) -> float:
    """The loss on samples that no learner trains on."""
    model = workload.make_model(widths=NARROW)
    nn.utils.vector_to_parameters(weights, model.parameters())
    return workload.loss(model, next(workload.batches(99, workload.HELD_OUT))).item()


# --- islands that only write down their steps


class Journaled(killed_methods.Module):
    """An island of the simplest kind, which keeps a journal."""

    def __init__(self, life: Killable) -> None:
        super().__init__(life)
        self._diary = Journal(life.folder, life.number, life.life)

    @override
    def batches(self) -> Iterator[Batch]:
        return self.life.paced(STEP_S)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        members, loss = strategy.gossip_statistics().members, float(outputs["loss"])
        now = time.monotonic()
        self._diary.write(Entry(now, members, loss, step_journal.memory_of()))


def trouble(folder: Path) -> list[str]:
    """The output of learners that ended in an error of their own."""
    texts = [path.read_text() for path in sorted(folder.glob("*.trouble"))]
    return [text[-500:] for text in texts if "SIGTERMException" not in text]
