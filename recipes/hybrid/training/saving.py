"""The checkpoints of a training: the last, the best, and one before the machine goes.

All are those of the consensus model. `last.ckpt` is written after every validation and,
with `checkpoint_minutes`, in between; a training continues from it. `best.ckpt` has the
weights of the validation with the lowest loss.

Training draws random numbers for augmentation and dropout. Lightning's checkpoints do
not hold the states of the generators: a continued `ddp` would draw again what its first
epochs drew. `Generators` adds them.

Lightning forgets the lowest loss where the folder has moved, and the next validation
would take the place of the best one. `Moved` lets it remember.
"""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_adpsgd.coordination.gather import gather_weights_only
from lightning_adpsgd.strategy.checkpoints.rng_state import (
    generator_states,
    set_generator_states,
)
from recipes.hybrid.pipeline.groups import TrainSettings

BEST, MODEL = "best", "model.ckpt"
_LAST, _GENERATORS = "last", "generators"
_GRACE_S = 100.0  # SLURM's KillWait is 30 s, and `--signal=TERM@120` gives 120


def last_checkpoint(output: Path) -> Path:
    """Where the training in `output` keeps its last checkpoint."""
    return output / "checkpoints" / f"{_LAST}.ckpt"


def make_savers(train: TrainSettings, folder: Path) -> list[Callback]:
    """The callbacks that write checkpoints into a folder."""
    validated: dict[str, Any] = {
        "every_n_epochs": train.validate_every,
        "save_on_train_epoch_end": False,  # after validation, which makes the consensus
        "enable_version_counter": False,
    }
    last = ModelCheckpoint(folder, filename=_LAST, **validated)
    best = ModelCheckpoint(
        folder,
        filename=BEST,
        monitor="val_loss",
        save_weights_only=True,
        **validated,
    )
    if not train.checkpoint_minutes:
        return [best, last, Generators(), Moved(folder)]
    timed = ModelCheckpoint(
        folder,
        filename=_LAST,
        train_time_interval=timedelta(minutes=train.checkpoint_minutes),
        enable_version_counter=False,
    )
    return [best, last, timed, SaveAndStop(timed), Generators(), Moved(folder)]


class Generators(Callback):
    """Lets the learners of Lightning's DDP go on with the random numbers that are due.

    Other strategies do that themselves, with `save_learners`.
    """

    def __init__(self) -> None:
        self._states: list[Mapping[str, Any]] = []

    @override
    def on_save_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        # All learners are here, and learner 0 writes. Ours are classes below DDP's.
        if type(trainer.strategy) is DDPStrategy:
            own = generator_states(trainer.strategy.root_device)
            checkpoint[_GENERATORS] = gather_weights_only(own)

    @override
    def on_load_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        self._states = checkpoint.get(_GENERATORS, [])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Set-up draws, too; the next epoch has its loader after this.
        if len(self._states) == trainer.world_size:
            states = self._states[trainer.global_rank]
            set_generator_states(states, trainer.strategy.root_device)


class Moved(Callback):
    """Lets a training go on with its lowest loss after its folder was moved.

    Args:
        folder: where the checkpoints are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder)  # as Lightning notes it

    @override
    def on_load_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        for state in checkpoint["callbacks"].values():
            best = self._moved(state.get("best_model_path", ""))
            # A loss without its weights would keep out those that come.
            if "dirpath" in state and os.path.isfile(best):
                state["dirpath"] = self._folder
                state["best_model_path"] = best
                for name in ("kth_best_model_path", "last_model_path"):
                    state[name] = self._moved(state[name])
                known = state["best_k_models"]
                state["best_k_models"] = {self._moved(k): v for k, v in known.items()}

    def _moved(self, path: str) -> str:
        return os.path.join(self._folder, os.path.basename(path)) if path else path


class SaveAndStop(Callback):
    """At SIGTERM, makes a checkpoint due at once, and ends the training after it.

    Each learner that gets the signal continues until all have saved together, at most
    100 s. The signal that one learner alone gets is acted upon if that is learner 0;
    others continue until it ends them.

    Args:
        checkpoint: the callback that saves by time.
    """

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._since = math.inf
        self._has_saved = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # In the place of Lightning's, which ends the training without a checkpoint.
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: object) -> None:
        self._since = min(self._since, time.monotonic())
        self._has_saved = False
        # Not 0, which says that it does not save by time.
        self._checkpoint._train_time_interval = timedelta(microseconds=1)
        self._checkpoint._last_time_checked = 0.0

    @override
    def on_save_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        # One of weights alone, which no training goes on from, does not count.
        self._has_saved |= "optimizer_states" in checkpoint

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        waited = time.monotonic() - self._since
        if self._since == math.inf or (not self._has_saved and waited < _GRACE_S):
            return
        if trainer.is_global_zero:
            done = "saved" if self._has_saved else f"not saved within {_GRACE_S:.0f} s"
            print(f"\n  SIGTERM: {done}; the same command goes on", flush=True)
        raise SIGTERMException


@contextmanager
def passing_on_sigterm(process: BaseProcess | None = None) -> Iterator[None]:
    """Passes SIGTERM on to a process, or to all children that there are by then.

    Forked children inherit the handler and do not use it.
    """
    owner = os.getpid()

    def pass_on(number: int, _: object) -> None:
        if os.getpid() != owner:
            return
        for child in [process] if process else multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def has_ended(output: Path) -> bool:
    """Whether a training was at its end when its stage was cut off, if it was."""
    return (output / MODEL).exists()


def keep_checkpoints(output: Path) -> None:
    """Gives the checkpoints of a finished training their names: `model`, `best`."""
    best = last_checkpoint(output).with_name(f"{BEST}.ckpt")
    if best.exists():
        os.replace(best, output / f"{BEST}.ckpt")
    if not has_ended(output):
        os.replace(last_checkpoint(output), output / MODEL)


def best_epoch(output: Path) -> dict[str, int]:
    """Number of epochs behind the checkpoint with the lowest loss, for the summary."""
    folders = last_checkpoint(output).parent, output
    found = [path for f in folders if (path := f / f"{BEST}.ckpt").exists()]
    return {"best_epoch": _num_epochs(found[0])} if found else {}


def best_is_another(trained: Path) -> bool:
    """Whether the network with the lowest loss is not the last one."""
    best, last = trained / f"{BEST}.ckpt", trained / MODEL
    return best.exists() and _num_epochs(best) != _num_epochs(last)


def _num_epochs(path: Path) -> int:
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return int(checkpoint["epoch"]) + 1
