"""Two islands do not save into one folder."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.strategy.checkpoints.own_folders import hold_folders
from tests.learners import Linear, loader, trainer_of

_HOLD = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_another(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """The folder belongs to another process, which the end of the block kills."""
    command = [sys.executable, "-c", _HOLD, str(folder / ".island.lock")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other
        other.kill()


def trainer_into(folder: str, **options: Any) -> pl.Trainer:
    savers = [ModelCheckpoint(folder), ModelCheckpoint(folder, monitor="loss")]
    strategy = HADPSGDStrategy("ring", "async", 1, **options)
    return trainer_of(
        strategy, 1, callbacks=savers, enable_checkpointing=True, max_steps=1
    )


def test_an_island_is_refused_the_folder_of_another(tmp_path: Path) -> None:
    trainer = trainer_into(str(tmp_path), islands="tcp://127.0.0.1:1/job")
    with (
        held_by_another(tmp_path),
        pytest.warns(UserWarning, match="not empty"),
        pytest.raises(ValueError, match=rf"saves its checkpoints into {tmp_path}"),
    ):
        trainer.fit(Linear(), loader(2))


def test_a_folder_is_free_once_its_island_is_dead(tmp_path: Path) -> None:
    trainer = trainer_into(str(tmp_path))
    with held_by_another(tmp_path), pytest.raises(ValueError, match="another"):
        hold_folders(trainer)
    (held,) = hold_folders(trainer)
    held.close()


def test_one_learner_holds_the_folder_for_all_of_its_island(tmp_path: Path) -> None:
    savers = [ModelCheckpoint(str(tmp_path))]
    other: Any = SimpleNamespace(callbacks=savers, is_global_zero=False)
    assert hold_folders(other) == []


def test_what_cannot_be_locked_is_left_to_the_first_save(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert hold_folders(trainer_into(str(tmp_path / "file" / "below"))) == []
    assert hold_folders(trainer_into("memory://place")) == []
