"""Saving beside the training: what is written, in what order, and where errors go."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO
from lightning_adpsgd.strategy.checkpoints.saving import (
    SaveThread,
    snapshot_of,
    uploads_checkpoints,
)
from tests.helpers import PATIENCE_S
from tests.learners import Linear, gossip, loader, trainer_of


class Gate:
    """A write that begins, and ends when it is let."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.written: list[Any] = []

    def write(self, value: Any) -> None:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        self.written.append(value)


def fail(value: Any) -> None:
    raise OSError(28, "No space left on device")


# --- the snapshot


def test_a_snapshot_shares_nothing_with_what_it_is_of() -> None:
    weights = torch.zeros(3)
    value = {"w": weights, "nested": [{"w": weights[:2]}, (1, "a")], "names": ["x"]}
    snapshot = snapshot_of(value)
    weights.add_(1)
    value["names"].append("y")
    assert snapshot["w"].tolist() == [0, 0, 0]
    assert snapshot["nested"][0]["w"].tolist() == [0, 0]
    assert snapshot["nested"][1] == (1, "a")
    assert snapshot["names"] == ["x"]


def test_tied_tensors_stay_tied_and_views_are_not_taken_for_the_whole() -> None:
    weights = torch.arange(6.0)
    square = weights.view(2, 3)
    snapshot = snapshot_of(
        {"a": weights, "b": weights, "rows": square, "columns": square.t()}
    )
    assert snapshot["a"] is snapshot["b"]
    assert snapshot["rows"].tolist() == square.tolist()
    assert snapshot["columns"].tolist() == square.t().tolist()


# --- the thread


def test_training_goes_on_while_a_checkpoint_is_written() -> None:
    thread, gate = SaveThread(), Gate()
    weights = torch.zeros(1)
    thread.save({"w": weights}, "a.ckpt", gate.write)
    assert gate.begun.wait(PATIENCE_S)
    weights.add_(1)  # the next step
    assert gate.written == []
    gate.may_end.set()
    thread.stop()
    assert gate.written[0]["w"].item() == 0


def test_one_checkpoint_at_most_is_on_its_way() -> None:
    thread, gate = SaveThread(), Gate()
    thread.save(1, "a.ckpt", gate.write)
    second = threading.Thread(target=thread.save, args=(2, "b.ckpt", gate.write))
    second.start()
    assert gate.begun.wait(PATIENCE_S)
    assert second.is_alive()
    gate.may_end.set()
    second.join(PATIENCE_S)
    thread.stop()
    assert gate.written == [1, 2]


@pytest.mark.parametrize("meet", ["save", "wait", "stop"])
def test_an_error_reaches_the_training_once_with_file_and_cause(meet: str) -> None:
    thread = SaveThread()
    thread.save(1, "folder/a.ckpt", fail)
    again: dict[str, Callable[[], None]] = {
        "save": lambda: thread.save(2, "b.ckpt", fail),
        "wait": thread.wait,
        "stop": thread.stop,
    }
    with pytest.raises(RuntimeError, match=r"folder/a\.ckpt.*No space left"):
        again[meet]()
    thread.stop()
    assert not [t for t in threading.enumerate() if t.name.startswith("adpsgd-save")]


def test_the_old_checkpoint_is_removed_after_the_new_one_is_there() -> None:
    thread, gate = SaveThread(), Gate()
    removed: list[str] = []
    thread.afterwards(lambda: removed.append("nothing was on its way"))
    thread.save(1, "b.ckpt", gate.write)
    thread.afterwards(lambda: removed.append("a.ckpt"))
    assert len(removed) == 1
    gate.may_end.set()
    thread.wait()
    assert removed[1:] == ["a.ckpt"]
    thread.stop()


def test_the_old_checkpoint_stays_if_the_new_one_could_not_be_written() -> None:
    thread, removed = SaveThread(), list[str]()
    thread.save(1, "b.ckpt", fail)
    thread.afterwards(lambda: removed.append("a.ckpt"))
    with pytest.raises(RuntimeError, match="No space left"):
        thread.stop()
    assert removed == []


def test_loggers_that_read_the_file_are_known() -> None:
    class Uploads:
        _log_model = "all"

    assert uploads_checkpoints([Uploads()])
    assert not uploads_checkpoints([object()])


# --- in a Trainer


class FullDisk(TorchCheckpointIO):
    @override
    def save_checkpoint(
        self, checkpoint: Any, path: Any, storage_options: Any = None
    ) -> None:
        fail(checkpoint)


class Weights(Callback):
    """The weights at each save, by the number of the step."""

    def __init__(self) -> None:
        self.at: dict[int, torch.Tensor] = {}

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: Any
    ) -> None:
        weights = checkpoint["state_dict"]["weight"]
        self.at[trainer.global_step] = weights.clone()


def save_each_step(folder: Path, **dials: Any) -> Trainer:
    saver = ModelCheckpoint(
        folder, every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )
    strategy = gossip(**dials)
    return trainer_of(strategy, 1, callbacks=[saver], enable_checkpointing=True)


@pytest.mark.parametrize("save_in_background", [True, False])
def test_each_checkpoint_holds_the_weights_of_its_step(
    tmp_path: Path, save_in_background: bool
) -> None:
    trainer = save_each_step(tmp_path, save_in_background=save_in_background)
    weights = Weights()
    trainer.callbacks.append(weights)  # pyright: ignore
    trainer.fit(Linear(), loader(6))
    assert sorted(weights.at) == [1, 2, 3, 4, 5, 6]
    for step, expected in weights.at.items():
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert saved["state_dict"]["weight"].equal(expected)


def test_what_is_saved_after_the_training_is_there_at_once(tmp_path: Path) -> None:
    trainer, path = save_each_step(tmp_path), tmp_path / "after.ckpt"
    trainer.fit(Linear(), loader(6))
    trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["global_step"] == 6
    assert not [t for t in threading.enumerate() if t.name.startswith("adpsgd-save")]


@pytest.mark.parametrize("save_in_background", [True, False])
def test_a_full_disk_ends_the_training_with_file_and_cause(
    tmp_path: Path, save_in_background: bool
) -> None:
    trainer = save_each_step(tmp_path, save_in_background=save_in_background)
    trainer.strategy.checkpoint_io = FullDisk()
    with pytest.raises((RuntimeError, OSError), match="No space left"):
        trainer.fit(Linear(), loader(6))


def test_an_exception_of_the_training_is_not_hidden_by_one_of_a_save(
    tmp_path: Path,
) -> None:
    class Fails(Linear):
        @override
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ValueError("of the training")
            return super().training_step(batch, batch_idx)

    trainer = save_each_step(tmp_path)
    trainer.strategy.checkpoint_io = FullDisk()
    with (
        pytest.warns(UserWarning, match="No space left"),
        pytest.raises(ValueError, match="of the training"),
    ):
        trainer.fit(Fails(), loader(6))


def test_the_default_is_replaced_by_what_the_user_gives() -> None:
    assert isinstance(gossip().checkpoint_io, WholeCheckpointIO)
    given = TorchCheckpointIO()
    assert trainer_of(gossip(), 1, plugins=[given]).strategy.checkpoint_io is given
    assert gossip(checkpoint_io=given).checkpoint_io is given
