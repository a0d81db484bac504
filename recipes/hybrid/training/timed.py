"""Training for a time: when it ends, its learning rate, its pace, its curve.

No learner waits for another because of any of it. The training is validated once, at
its end. The curve before that comes from copies of the weights, which are evaluated
when the time is over (`held_out`).
"""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.asr.schedule import GlobalSampleLR
from lightning_adpsgd.callbacks.clock import Monitor
from lightning_adpsgd.files import bytes_written_whole
from recipes.hybrid.pipeline.settings import Settings

COPIES_AT = tuple(share / 10 for share in range(1, 10))
"""Shares of the time after which weights are copied."""

COPIES = "copies"
"""Name of their folder, in that of the training."""

_NEVER = 1 << 40  # batches


def trainer_options(settings: Settings) -> dict[str, Any]:
    """The arguments of a Trainer that say how long it trains and when it validates."""
    train = settings.train
    if settings.timed is None:
        epochs = train.epochs
        return {"max_epochs": epochs, "check_val_every_n_epoch": train.validate_every}
    # An end of an epoch would be a meeting, at which all wait for the slowest.
    return {
        "max_epochs": -1,
        "check_val_every_n_epoch": None,
        "val_check_interval": _NEVER,
    }


def timed_callbacks(settings: Settings, output: Path) -> list[Callback]:
    """What ends the training, sets its rate and its pace, and copies weights."""
    if (race := settings.timed) is None:
        return []
    timer = Timer(timedelta(seconds=race.seconds), verbose=False)
    callbacks: list[Callback] = [timer, TimedSchedule(timer, settings.train.epochs)]
    callbacks += [Copies(race.seconds, output / COPIES)]
    # Last, so that nothing else of a step begins late.
    return [*callbacks, Pace(race.step_s, race.pause_s)]


class TimedSchedule(Callback):
    """Fits the schedule of the learning rate to the time: epochs are shares of it.

    Learners that allreduce their gradients need equal rates, and take the mean of their
    clocks. All others go by their own.

    Args:
        timer: Timer that ends the training.
        epochs: Epochs of the whole schedule.
    """

    def __init__(self, timer: Timer, epochs: int) -> None:
        self._timer, self._epochs = timer, epochs

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        done, left = self._timer.time_elapsed(), self._timer.time_remaining()
        assert left is not None
        device = trainer.strategy.root_device
        share = torch.tensor(done / (done + left), device=device)
        epoch = self._epochs * min(1.0, float(trainer.strategy.reduce(share)))
        for config in trainer.lr_scheduler_configs:
            assert isinstance(config.scheduler, GlobalSampleLR)
            corpus = config.scheduler.schedule.corpus_samples
            config.scheduler.global_samples = round(epoch * corpus)


class Pace(Callback):
    """Makes steps last as long as machines of other speeds would need for them.

    The last learner waits before its backward pass, so that others which need its
    gradient wait for just that. (DDP sends buffers in the forward pass; a wait there
    would be in no one's figures.) The rest of a step passes after the backward pass.
    Communication continues meanwhile.

    Args:
        step_s: Seconds that every step lasts at least.
        pause_s: Seconds that each step of the last learner lasts longer.
    """

    def __init__(self, step_s: float, pause_s: float) -> None:
        self._step_s, self._pause_s = step_s, pause_s
        self._until = self._waits_s = 0.0

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        slow = trainer.global_rank == trainer.world_size - 1
        self._waits_s = self._pause_s if slow else 0.0
        self._until = time.monotonic() + self._waits_s + self._step_s

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        time.sleep(self._waits_s)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        time.sleep(max(0.0, self._until - time.monotonic()))


class Copies(Monitor):
    """Keeps copies of this learner's weights, each after a share of the time.

    A copy is taken at the next step boundary, without a word to other learners.

    Args:
        seconds: The whole time.
        folder: Folder of the copies, one for all learners of a training.
    """

    def __init__(self, seconds: float, folder: Path) -> None:
        super().__init__()
        self._due_s = [share * seconds for share in COPIES_AT]
        self._folder = folder

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        while self._due_s and self.clock.seconds >= self._due_s[0]:
            number = len(COPIES_AT) - len(self._due_s)
            self._due_s.pop(0)
            path = _path(self._folder, number, trainer.global_rank)
            self._write(path, trainer.global_step, pl_module)

    def _write(self, path: Path, steps: int, module: LightningModule) -> None:
        # Parameters may be views of one vector, all of which would be saved with each.
        weights = {name: w.clone() for name, w in module.state_dict().items()}
        copy = Copy(steps, self.clock.seconds, self.clock.samples, weights)
        path.parent.mkdir(parents=True, exist_ok=True)
        with bytes_written_whole(path) as file:
            torch.save(copy._asdict(), file)


class Copy(NamedTuple):
    """Weights on the way: of one learner, or the mean of all.

    Attributes:
        steps: Steps so far, of the learner; of the mean, those of learner 0.
        seconds: Training time at which it was taken.
        samples: Samples so far, of the learner or of all.
        weights: The module's state, by name.
    """

    steps: int
    seconds: float
    samples: int
    weights: dict[str, Tensor]


def consensus_copies(output: Path, num_learners: int) -> Iterator[Copy]:
    """The mean over all learners of each copy, in the order of time.

    A copy that a learner lacks, because the time ended first, is left out.
    """
    for number in range(len(COPIES_AT)):
        paths = [_path(output / COPIES, number, n) for n in range(num_learners)]
        if all(path.exists() for path in paths):
            yield _mean([Copy(**torch.load(p, weights_only=True)) for p in paths])


def _mean(copies: list[Copy]) -> Copy:
    weights = {
        name: torch.stack([copy.weights[name] for copy in copies]).mean(0)
        for name in copies[0].weights
    }
    seconds = sum(copy.seconds for copy in copies) / len(copies)
    samples = sum(copy.samples for copy in copies)
    return Copy(copies[0].steps, seconds, samples, weights)


def _path(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}.{rank}.pt"
