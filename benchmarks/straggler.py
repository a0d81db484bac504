"""What one learner that sleeps 1 s in each step costs the other three.

Four learners train a small model through Lightning, under `adpsgd` and under `ddp` as
the control, with and without the straggler. Each step also sleeps 20 ms, as if the
gradient were computed by a device of its own: otherwise the four would share the cores
of this machine, and a sleeping learner would make the others faster.
"""

import json
import logging
import tempfile
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.timing import Spread, print_row, spread

LEARNERS, STRAGGLER = 4, 3
STEP_S, SLEEP_S = 0.02, 1.0
STEPS, STEPS_OF_STRAGGLER = 100, 4
REPETITIONS = 2


class Learner(L.LightningModule):
    """A small model whose steps take the time they are told to.

    Args:
        seconds: Of a step, per learner.
        folder: Where each learner leaves its steps per second.
    """

    def __init__(self, seconds: list[float], folder: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)
        self._seconds, self._folder = seconds, folder
        self._num_steps, self._begin = 0, 0.0

    @override
    def on_train_epoch_start(self) -> None:
        self._begin = time.perf_counter()

    @override
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(self._seconds[self.global_rank])
        self._num_steps += 1
        return self.layer(batch).square().mean()

    @override
    def on_train_epoch_end(self) -> None:
        rate = self._num_steps / (time.perf_counter() - self._begin)
        (self._folder / f"{self.global_rank}.json").write_text(json.dumps(rate))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Batches(L.LightningDataModule):
    """As many batches as each learner is to train on."""

    def __init__(self, num_batches: list[int]) -> None:
        super().__init__()
        self._num_batches = num_batches

    @override
    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        assert self.trainer is not None
        return DataLoader(
            RandomDataset(32, self._num_batches[self.trainer.global_rank])
        )


def steps_per_second(strategy: str, straggling: bool) -> list[float]:
    """The rates of the learners that are never the straggler."""
    seconds, num_batches = [STEP_S] * LEARNERS, [STEPS] * LEARNERS
    if straggling:
        seconds[STRAGGLER] += SLEEP_S
        num_batches[STRAGGLER] = STEPS_OF_STRAGGLER
    if straggling and strategy == "ddp":
        # Its steps are everybody's steps, and an uneven end would make it wait forever.
        num_batches = [STEPS_OF_STRAGGLER] * LEARNERS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = make_trainer(strategy)
        trainer.fit(Learner(seconds, folder), Batches(num_batches))
        others = [rank for rank in range(LEARNERS) if rank != STRAGGLER]
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in others]


def make_trainer(strategy: str) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=LEARNERS,
        strategy=f"{strategy}_fork",
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def measure(strategy: str) -> None:
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(REPETITIONS):
        for straggling in rates:
            rates[straggling] += steps_per_second(strategy, straggling)
    without, with_one = spread(rates[False]), spread(rates[True])
    ratio = Spread(*(value / without.median for value in with_one))
    print_row(strategy, f"{without:.1f}", f"{with_one:.1f}", f"{ratio:.3f}")


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.ERROR)
    print(
        f"{LEARNERS} learners, one of which sleeps {SLEEP_S:g} s a step; steps/s of the"
    )
    print("others, over learners and repetitions: median [quartiles]")
    print(f"limit: {1 / STEP_S:.0f} steps/s, which is {STEP_S} s of each step")
    print_row("strategy", "without straggler", "with straggler", "ratio")
    for strategy in ("adpsgd", "ddp"):
        measure(strategy)


if __name__ == "__main__":
    main()
