"""How long an epoch takes when one of four learners is five times slower.

The ideal is the total work over the total speed: each batch is a timed wait of 50 ms,
250 ms in the slow learner, so that cores are not what is measured, and B batches take
B / (3 / 0.05 + 1 / 0.25) seconds at best. An epoch is over when the last learner has
made its last step. With equal shares, and under `ddp`, that takes four times the ideal.
"""

import json
import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.timing import Spread, print_row, spread
from lightning_adpsgd import HADPSGDStrategy

LEARNERS, SLOW, TIMES_SLOWER = 4, 3, 5
STEP_S = 0.05
SPEED = (LEARNERS - 1) / STEP_S + 1 / (TIMES_SLOWER * STEP_S)
"""Batches per second of all learners together."""

SHARED, EQUAL, DDP = "work_sharing=True", "work_sharing=False", "ddp"
NUM_BATCHES = (16, 32, 64, 128, 256, 1024)
CONTROLS = (64,)
SECONDS_PER_FIT = 8.0


class Learner(L.LightningModule):
    """A small model whose steps are timed waits.

    Args:
        folder: Where learner 0 leaves the seconds of each epoch.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)
        self._folder, self._begin = folder, 0.0
        self._seconds: list[float] = []

    @override
    def on_train_epoch_start(self) -> None:
        self.trainer.strategy.barrier("begin")
        self._begin = time.perf_counter()

    @override
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        slower = TIMES_SLOWER if self.global_rank == SLOW else 1
        time.sleep(STEP_S * slower)
        return self.layer(batch).square().mean()

    @override
    def on_train_epoch_end(self) -> None:
        self.trainer.strategy.barrier("end")
        self._seconds.append(time.perf_counter() - self._begin)
        if self.global_rank == 0:
            (self._folder / "seconds.json").write_text(json.dumps(self._seconds))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def epochs_over_ideal(setting: str, num_batches: int, num_epochs: int) -> list[float]:
    """Seconds of each epoch over those of the ideal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=LEARNERS,
            strategy=make_strategy(setting),
            max_epochs=num_epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = DataLoader(RandomDataset(32, num_batches), shuffle=True)
        trainer.fit(Learner(folder), loader)
        seconds = json.loads((folder / "seconds.json").read_text())
    return [value * SPEED / num_batches for value in seconds]


def make_strategy(setting: str) -> Any:
    if setting == DDP:
        return "ddp_fork"
    sharing = setting == SHARED
    return HADPSGDStrategy(
        super_learner_size=1, work_sharing=sharing, start_method="fork"
    )


def measure(quick: bool = False) -> dict[str, Any]:
    """Ratios to the ideal, the first epoch apart from the later ones.

    A learner that has not seen an epoch before does not know how slow it is.
    """
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"limit_epoch_over_ideal": 1.1}
    print_row("setting, batches", "first epoch", "later epochs", "over")
    for setting, num_batches in cases(quick):
        ideal = num_batches / SPEED
        times = LEARNERS if setting != SHARED else 1
        num_epochs = max(3, min(12, int(SECONDS_PER_FIT / ideal / times)))
        first, *later = epochs_over_ideal(setting, num_batches, num_epochs)
        found = spread(later)
        name = f"{setting}, {num_batches}"
        print_row(name, f"{first:.3f}", f"{found:.3f}", f"{len(later)} epochs")
        figures[name] = {"first": first, "later": Spread._asdict(found)}
    return figures


def cases(quick: bool) -> list[tuple[str, int]]:
    lengths = (64, 128) if quick else NUM_BATCHES
    return [
        *((SHARED, num) for num in lengths),
        *((setting, num) for setting in (EQUAL, DDP) for num in CONTROLS),
    ]


def main() -> None:
    warnings.filterwarnings("ignore")
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.ERROR)
    print(f"{LEARNERS} learners, one {TIMES_SLOWER} times slower: seconds of an epoch")
    print("over the ideal, total work over total speed; median [quartiles]")
    measure()


if __name__ == "__main__":
    main()
