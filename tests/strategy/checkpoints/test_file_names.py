"""Which files the callbacks of several learners keep, without processes."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_adpsgd.strategy.checkpoints.file_names import (
    agree_on_names,
    keep_files_apart,
)
from lightning_adpsgd.strategy.checkpoints.saving import BackgroundCheckpointIO
from lightning_adpsgd.strategy.overrides import Overrides
from tests.strategy.checkpoints.test_saving import Gate

PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")


class Learner:
    """A Trainer and its strategy, in one learner of a job."""

    interrupted = sanity_checking = fast_dev_run = False
    ckpt_path, root_device = None, torch.device("cpu")

    def __init__(
        self, rank: int, said: list[Any], *savers: ModelCheckpoint, io: Any = None
    ) -> None:
        self.is_global_zero, self._said, self._heard = rank == 0, said, 0
        self.callbacks, self.strategy, self.loggers = [*savers], self, []
        self.checkpoint_io = io
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.saved: list[Path] = []
        self.current_epoch = self.global_step = 0
        overrides, this = Overrides(), self.as_trainer()
        keep_files_apart(this, overrides)
        agree_on_names(this, overrides)

    def as_trainer(self) -> Any:
        return self

    def broadcast(self, value: Any) -> Any:
        """What learner 0 has said; the learners of a test run one after another."""
        if self.is_global_zero:
            self._said.append(pickle.dumps(value))
        self._heard += 1
        return pickle.loads(self._said[self._heard - 1])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.broadcast(decision)

    def save_checkpoint(self, path: Any, weights_only: bool = False) -> None:
        self.saved.append(Path(path))
        if isinstance(self.checkpoint_io, BackgroundCheckpointIO):
            self.checkpoint_io.save_in_background({}, path)
        elif self.is_global_zero:
            Path(path).touch()

    def remove_checkpoint(self, path: Any) -> None:
        if isinstance(self.checkpoint_io, BackgroundCheckpointIO):
            self.checkpoint_io.remove_checkpoint(path)
        elif self.is_global_zero:
            Path(path).unlink()

    def barrier(self) -> None:
        pass

    def save(self, step: int, **metrics: float) -> None:
        self.global_step = step
        self.callback_metrics = {n: torch.tensor(v) for n, v in metrics.items()}
        for saver in self.callbacks:
            candidates = saver._monitor_candidates(self.as_trainer())
            saver._save_topk_checkpoint(self.as_trainer(), candidates)
            saver._save_last_checkpoint(self.as_trainer(), candidates)


def kept(saver: ModelCheckpoint) -> tuple[Any, ...]:
    return saver.best_k_models, *(getattr(saver, name) for name in PATHS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save_last": True, "save_top_k": 0},
        {"save_last": "link"},
        {"monitor": "loss", "save_top_k": 2, "save_last": True},
        {"monitor": "loss", "filename": "{step}-{loss:.1f}"},
        {"monitor": "loss", "filename": "always"},
    ],
)
def test_learners_that_made_different_steps_hold_the_paths_of_learner_0(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    savers, said = [ModelCheckpoint(tmp_path, **options) for _ in range(2)], []
    losses = (3.0, 1.0, 2.0, 0.5)
    for rank, saver in enumerate(savers):
        learner = Learner(rank, said, saver)
        for step, loss in enumerate(losses, start=1):
            # Each has a loss of its own, by which another epoch is the best.
            learner.save(step * (7 - rank), loss=loss if rank == 0 else -loss)
        assert learner._heard == len(said)
    assert kept(savers[0]) == kept(savers[1])
    there = {str(path) for path in tmp_path.iterdir()}
    assert {p for p in kept(savers[1])[1:] if p} | {*savers[1].best_k_models} <= there


def test_metrics_travel_as_numbers_and_keep_their_types(tmp_path: Path) -> None:
    """A tensor within an object is pickled by a `torch.save` of its own."""
    said: list[Any] = []
    for rank, loss in enumerate([torch.tensor(0.1, dtype=torch.bfloat16), 7]):
        saver = ModelCheckpoint(tmp_path, monitor="loss")
        learner = Learner(rank, said, saver).as_trainer()
        candidates = {"loss": loss, "step": 3 + rank, "epoch": torch.tensor(1)}
        saver._save_topk_checkpoint(learner, candidates)
        assert saver.best_model_score is not None
        assert saver.best_model_score.dtype == torch.bfloat16
        assert saver.best_model_path.endswith("epoch=1-step=3.ckpt")
    numbers = [*pickle.loads(said[0]).values()]
    assert numbers[1:] == [(3, None), (1, torch.int64)]


def test_a_learner_that_is_interrupted_asks_nobody(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True)
    learner = Learner(1, [], saver)
    learner.interrupted = True
    learner.save(5)
    assert [path.name for path in learner.saved] == ["epoch=0-step=5.ckpt", "last.ckpt"]


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
@pytest.mark.parametrize("options", [{"save_top_k": 0}, {"monitor": "absent"}])
def test_where_nothing_is_saved_nobody_is_asked(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    said: list[Any] = []
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=SimpleNamespace()))
    learner = Learner(0, said, ModelCheckpoint(tmp_path, **options))
    vars(learner)["fit_loop"] = loop
    loop.epoch_loop.val_loop._has_run = False
    learner.save(1)
    assert said == learner.saved == []


class Disk(Gate):
    """It writes as soon as somebody waits for it."""

    @override
    def save_checkpoint(
        self, checkpoint: Any, path: Any, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, path)
        Path(path).touch()

    @override
    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink()


def slow_files(monkeypatch: pytest.MonkeyPatch) -> BackgroundCheckpointIO:
    disk = Disk()
    files = BackgroundCheckpointIO(disk)

    def wait() -> None:
        if files._work is not None:
            disk.may_end.set()
        BackgroundCheckpointIO.wait(files)
        disk.may_end.clear()

    monkeypatch.setattr(files, "wait", wait)
    return files


def test_two_callbacks_that_save_at_one_step_write_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    savers = [ModelCheckpoint(tmp_path, monitor=name) for name in ("a", "b")]
    files = slow_files(monkeypatch)
    learner = Learner(0, [], *savers, io=files)
    learner.save(4, a=1.0, b=1.0)
    learner.save(8, a=0.5, b=2.0)
    files.teardown()
    names = [Path(saver.best_model_path).name for saver in savers]
    assert names == ["epoch=0-step=8.ckpt", "epoch=0-step=4-v1.ckpt"]
    assert {path.name for path in tmp_path.iterdir()} == {*names}


def test_saves_that_come_faster_than_the_disk_are_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = ModelCheckpoint(tmp_path, "fixed", monitor="a", save_top_k=2)
    files = slow_files(monkeypatch)
    learner = Learner(0, [], saver, io=files)
    learner.save(1, a=3.0)
    learner.save(2, a=2.0)
    files.teardown()
    names = {Path(path).name for path in saver.best_k_models}
    assert names == {"fixed.ckpt", "fixed-v1.ckpt"}


def test_only_the_file_that_is_asked_for_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = slow_files(monkeypatch)
    files.save_in_background({}, tmp_path / "a.ckpt")
    files.wait_for(tmp_path / "b.ckpt")
    assert files._work is not None
    files.wait_for(str(tmp_path / "a.ckpt"))
    assert files._work is None
