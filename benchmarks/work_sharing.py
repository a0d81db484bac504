"""How long an epoch takes when one of four learners is five times slower.

The ideal is the total work over the total speed: B batches take B over the sum of the
learners' batches per second. A batch is a timed wait of 50 ms, 250 ms in the slow
learner, so that the cores do not matter. The time that Lightning and gossip add is part
of a learner's speed. That speed is taken from the control with equal shares of the same
run; the ratio to the waits alone stands beside it. An epoch is over when the last
learner has made its last step. With equal shares, and under `ddp`, that takes four
times the ideal.
"""

import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.quiet import quiet_trainer, quieten
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread
from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.strategy.names import NAMES

LEARNERS, SLOW, TIMES_SLOWER = 4, 3, 5
STEP_S = 0.05
SPEED_OF_WAITS = (LEARNERS - 1) / STEP_S + 1 / (TIMES_SLOWER * STEP_S)
"""Batches per second of all learners together, if only the waits took time."""

SHARED, EQUAL, DDP = "work_sharing=True", "work_sharing=False", "ddp"
DEFAULT, READY_PAIRS = "adpsgd by default", "rdpsgd by default"
NUM_BATCHES = (16, 32, 64, 128, 256, 1024)
CONTROL_BATCHES = 64
BOUND = 1.1
SECONDS_PER_FIT = 8.0


class Epochs(NamedTuple):
    """The learners' records of the epochs of one fit.

    Attributes:
        seconds: Until the last learner was done.
        speeds: Batches per second of all learners together, while each had some.
    """

    seconds: list[float]
    speeds: list[float]


class Learner(L.LightningModule):
    """A small model whose steps are timed waits.

    Args:
        folder: Where each learner leaves its figures of each epoch.
        slow_s: Length of the slow learner's steps.
    """

    def __init__(self, folder: Path, slow_s: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)
        self._folder, self._slow_s = folder, slow_s
        self._begin, self._num_steps = 0.0, 0
        self._figures: list[tuple[float, float]] = []

    @override
    def on_train_epoch_start(self) -> None:
        self.trainer.strategy.barrier("begin")
        self._begin, self._num_steps = time.perf_counter(), 0

    @override
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(self._slow_s if self.global_rank == SLOW else STEP_S)
        self._num_steps += 1
        return self.layer(batch).square().mean()

    @override
    def on_train_epoch_end(self) -> None:
        busy = time.perf_counter() - self._begin
        self.trainer.strategy.barrier("end")
        seconds = time.perf_counter() - self._begin
        self._figures.append((seconds, self._num_steps / busy))
        file = self._folder / f"{self.global_rank}.json"
        file.write_text(json.dumps(self._figures))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(
    setting: str,
    num_batches: int,
    num_epochs: int,
    slow_s: float = TIMES_SLOWER * STEP_S,
) -> Epochs:
    """Makes one fit of all learners."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = quiet_trainer(
            make_strategy(setting),
            devices=LEARNERS,
            max_epochs=num_epochs,
            use_distributed_sampler=True,
        )
        loader = DataLoader(RandomDataset(32, num_batches), shuffle=True)
        trainer.fit(Learner(folder, slow_s), loader)
        files = [folder / f"{rank}.json" for rank in range(LEARNERS)]
        figures = [json.loads(file.read_text()) for file in files]
    by_epoch = list(zip(*figures, strict=True))
    seconds = [max(second for second, _ in epoch) for epoch in by_epoch]
    return Epochs(seconds, [sum(speed for _, speed in epoch) for epoch in by_epoch])


def make_strategy(setting: str) -> Any:
    if setting == DDP:
        return "ddp_fork"
    options: dict[str, Any] = {"work_sharing": setting == SHARED}
    if setting in (DEFAULT, READY_PAIRS):
        options = NAMES[setting.removesuffix(" by default")]
    return HADPSGDStrategy(**{"super_learner_size": 1, **options}, start_method="fork")


def measure(quick: bool = False) -> Report:
    """Measures ratios to the ideal, with the first epoch apart from the later ones.

    A learner that has not seen an epoch before does not know how slow it is.
    """
    torch.set_num_threads(1)
    quieten()
    warnings.simplefilter("ignore")
    control = train(EQUAL, CONTROL_BATCHES, 3)
    speed = statistics.median(control.speeds)
    report = Report(
        f"The time that an epoch of {LEARNERS} learners takes, one of them "
        f"{TIMES_SLOWER} times slower; the first epoch apart.",
        limit=f"the ideal, {speed:.1f} batches/s of all learners together",
        notes=["to waits alone: what Lightning and gossip take is not in the ideal."],
    )
    report.rows.append(row_of(EQUAL, CONTROL_BATCHES, control.seconds, speed))
    ddp = train(DDP, CONTROL_BATCHES, 3)
    report.rows.append(row_of(DDP, CONTROL_BATCHES, ddp.seconds, speed))
    for num_batches in NUM_BATCHES[2:4] if quick else NUM_BATCHES:
        num_epochs = int(SECONDS_PER_FIT * SPEED_OF_WAITS / num_batches)
        epochs = train(SHARED, num_batches, max(3, min(12, num_epochs)))
        row = row_of(SHARED, num_batches, epochs.seconds, speed)
        report.rows.append(row)
        claim = f"{num_batches} batches, later epochs: of the ideal"
        report.targets.append(Target(claim, BOUND, row.ratio or 0.0, at_least=False))
    return report


def row_of(setting: str, num_batches: int, seconds: list[float], speed: float) -> Row:
    """The row of one fit, given the batches per second of all learners together."""
    first, *later = (value * speed / num_batches for value in seconds)
    found = spread(later)
    case = {"method": setting, "batches": num_batches}
    details = {
        "s": found.median * num_batches / speed,
        "first epoch, of the ideal": first,
        "to waits alone": found.median * SPEED_OF_WAITS / speed,
        "epochs": len(seconds),
    }
    print_row(f"{setting}, {num_batches}", f"{found:.3f} of the ideal", f"{first:.3f}")
    return Row(case, found, "of the ideal", found.median, details=details)
