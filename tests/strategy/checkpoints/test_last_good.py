"""`ckpt_path="last"`: damaged checkpoints are passed over, by name."""

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_adpsgd.strategy.checkpoints import last_good
from lightning_adpsgd.strategy.checkpoints.format import DamagedCheckpoint
from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO, step_in_file
from lightning_adpsgd.strategy.checkpoints.last_good import (
    newest_whole,
    whole_checkpoint_path,
)
from lightning_adpsgd.strategy.checkpoints.sharded import META
from tests.learners import Linear, gossip, loader, trainer_of
from tests.strategy.checkpoints.test_format import NO_CHECKPOINTS


class FirstWeights(Linear):
    """Remembers from where it went on."""

    first_step = -1

    @override
    def on_train_start(self) -> None:
        self.first_step = self.trainer.global_step


def fit(
    folder: Path | str,
    max_steps: int,
    ckpt_path: Any = None,
    communication: str = "async",
    **saver: Any,
) -> int:
    """Trains on to so many steps; returns where it began."""
    options = {"every_n_train_steps": 2, "save_top_k": -1, "save_last": True}
    saver = {**options, "filename": "{step}", **saver}
    module = FirstWeights()
    trainer = trainer_of(
        gossip("complete", communication),
        1,
        max_steps=max_steps,
        callbacks=[ModelCheckpoint(folder, **saver)],
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not resumable|.*is not empty")
        trainer.fit(module, loader(12), ckpt_path=ckpt_path)
    return module.first_step


def truncate(path: Path) -> None:
    content = path.read_bytes()
    stamp = path.stat().st_mtime_ns
    path.write_bytes(content[: len(content) // 2])
    os.utime(path, ns=(stamp, stamp))


def in_order_of_age(*paths: Path) -> None:
    for age, path in enumerate(paths):
        os.utime(path, (1e9 - age, 1e9 - age))


@pytest.mark.parametrize("communication", ["async", "sync", "delay_by_one"])
def test_the_newest_is_taken_where_all_are_whole(
    tmp_path: Path, communication: str
) -> None:
    fit(tmp_path, 6, communication=communication)
    assert fit(tmp_path, 8, "last", communication) == 6


def test_a_damaged_last_one_is_passed_over_by_name(tmp_path: Path) -> None:
    fit(tmp_path, 6)
    last, older = tmp_path / "last.ckpt", tmp_path / "step=4.ckpt"
    in_order_of_age(last, tmp_path / "step=6.ckpt", older, tmp_path / "step=2.ckpt")
    truncate(last)
    truncate(tmp_path / "step=6.ckpt")
    with pytest.warns(UserWarning, match="Skipped") as record:
        assert fit(tmp_path, 8, "last") == 4
    passed = [str(w.message) for w in record if "Skipped" in str(w.message)]
    assert ["last.ckpt" in text for text in passed] == [True, False]
    assert ["step=6.ckpt" in text for text in passed] == [False, True]


def test_a_damaged_last_one_is_passed_over_where_lightning_takes_it_without_a_path(
    tmp_path: Path,
) -> None:
    """As it does with `OnExceptionCheckpoint`, also if there was no exception."""
    fit(tmp_path, 4)
    truncate(tmp_path / "last.ckpt")
    callbacks = [ModelCheckpoint(tmp_path), OnExceptionCheckpoint(tmp_path)]
    options = {"max_steps": 6, "enable_checkpointing": True}
    trainer = trainer_of(gossip(), 1, callbacks=callbacks, **options)
    module = FirstWeights()
    with pytest.warns(UserWarning, match=r"Skipped.*last\.ckpt"):
        trainer.fit(module, loader(12))
    assert module.first_step == 4


@pytest.mark.parametrize("content", NO_CHECKPOINTS[1:5])
def test_what_is_no_checkpoint_is_passed_over_though_its_time_is_the_newest(
    tmp_path: Path, content: bytes
) -> None:
    fit(tmp_path, 4)
    (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.warns(UserWarning, match=r"Skipped.*last\.ckpt is not a `torch"):
        assert fit(tmp_path, 6, "last") == 4


def test_the_most_steps_are_taken_though_the_clock_was_set_back(tmp_path: Path) -> None:
    fit(tmp_path, 6)
    oldest = tmp_path / "step=2.ckpt"
    in_order_of_age(oldest, tmp_path / "step=4.ckpt", tmp_path / "step=6.ckpt")
    os.replace(tmp_path / "last.ckpt", tmp_path / "last-v1.ckpt")
    os.replace(oldest, tmp_path / "last.ckpt")
    os.utime(tmp_path / "last-v1.ckpt", (1, 1))
    assert fit(tmp_path, 8, "last") == 6
    truncate(tmp_path / "last.ckpt")
    truncate(tmp_path / "last-v1.ckpt")
    in_order_of_age(tmp_path / "step=4.ckpt", tmp_path / "step=8.ckpt")
    with pytest.warns(UserWarning, match="Skipped"):
        assert fit(tmp_path, 10, "last") == 8


def test_weights_alone_do_not_stand_in_the_way_of_a_whole_checkpoint(
    tmp_path: Path,
) -> None:
    fit(tmp_path, 2)
    fit(tmp_path, 4, save_weights_only=True, save_last=False)
    truncate(tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match="Skipped"):
        assert fit(tmp_path, 6, "last") == 2


def test_a_last_one_of_weights_alone_is_taken_after_all_others(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    WholeCheckpointIO().save_checkpoint(
        {"state_dict": {}, "global_step": 9}, tmp_path / "last.ckpt"
    )
    assert fit(tmp_path, 6, "last") == 4


def test_an_island_goes_on_from_where_it_was_told_to_end(tmp_path: Path) -> None:
    fit(tmp_path, 6)
    (tmp_path / "last.ckpt").unlink()
    os.replace(tmp_path / "step=6.ckpt", tmp_path / "preempted-3-abc.ckpt")
    assert fit(tmp_path, 8, "last", save_last=False) == 6
    os.replace(tmp_path / "step=2.ckpt", tmp_path / "last.ckpt")
    assert fit(tmp_path, 8, "last", save_last=False) == 6


def test_what_an_island_saved_at_a_url_is_found() -> None:
    folder = "memory://islands"
    fsspec.filesystem("memory").pipe("/islands/preempted-3-abc.ckpt", b"x")
    trainer = pl.Trainer(logger=False, callbacks=[ModelCheckpoint(dirpath=folder)])
    found = last_good._last_checkpoints(trainer)
    assert found == {"memory:///islands/preempted-3-abc.ckpt"}


@pytest.mark.parametrize(
    ("callbacks", "folder"),
    [
        ([], "checkpoints"),  # Lightning's own `ModelCheckpoint`
        ([OnExceptionCheckpoint("memory://run/ended"), ModelCheckpoint("b")], "ended"),
        ([OnExceptionCheckpoint("memory://run/ended")], "ended"),
        (None, ""),
    ],
)
def test_what_an_island_saved_is_found_wherever_it_was_told_to_save(
    callbacks: list[Any] | None, folder: str
) -> None:
    root, memory = "memory://run", fsspec.filesystem("memory")
    saves: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": callbacks is not None,
    }
    trainer = pl.Trainer(callbacks=callbacks, default_root_dir=root, **saves)
    path = os.path.join("/run", folder, "preempted-3-abc.ckpt")
    memory.store.clear()
    memory.pipe(path, b"x")
    assert last_good._last_checkpoints(trainer) == {f"memory://{path}"}


@pytest.mark.parametrize("at", ["memory://run", "file://{}", "{}"])
def test_what_was_saved_at_an_exception_is_found_wherever_it_is(
    tmp_path: Path, at: str
) -> None:
    folder = at.format(tmp_path)
    callback = OnExceptionCheckpoint(folder)
    trainer = pl.Trainer(logger=False, callbacks=[callback])
    WholeCheckpointIO().save_checkpoint({"n": 1}, callback.ckpt_path)
    (path,) = last_good._at_exceptions(trainer)
    assert path in last_good._found(folder, "*.ckpt")
    WholeCheckpointIO().remove_checkpoint(path)
    assert last_good._at_exceptions(trainer) == []


@pytest.mark.parametrize("ckpt_path", ["given.ckpt", "best"])
def test_no_store_is_asked_for_what_a_path_that_is_given_replaces(
    monkeypatch: pytest.MonkeyPatch, ckpt_path: str
) -> None:
    """It may be away."""

    def is_away(path: str) -> None:
        raise ConnectionRefusedError(path)

    trainer = pl.Trainer(
        logger=False, callbacks=[OnExceptionCheckpoint("memory://away")]
    )
    trainer.state.fn = TrainerFn.FITTING
    monkeypatch.setattr(last_good, "url_to_fs", is_away)
    lightnings = lambda state_fn, path: path  # noqa: E731
    arguments = (trainer, lightnings, TrainerFn.FITTING)
    assert whole_checkpoint_path(*arguments, ckpt_path) == ckpt_path
    with pytest.raises(ConnectionRefusedError):
        whole_checkpoint_path(*arguments, None)


def test_a_pipe_is_passed_over_and_not_read_for_ever(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    (tmp_path / "last.ckpt").unlink()
    os.mkfifo(tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match=r"Skipped.*last\.ckpt is not a regular file"):
        assert fit(tmp_path, 6, "last", save_last=False) == 4


def test_the_step_of_a_folder_of_shards_is_read(tmp_path: Path) -> None:
    """Its optimizer's state lies in files of its own."""
    io, folder = WholeCheckpointIO(), tmp_path / "a.ckpt"
    io.save_checkpoint({"global_step": 7, "lr_schedulers": []}, folder / META)
    assert step_in_file(str(folder)) == 7
    io.save_checkpoint({"global_step": 7}, folder / META)
    assert step_in_file(str(folder)) is None


def test_a_link_to_a_checkpoint_that_was_never_finished_is_passed_over(
    tmp_path: Path,
) -> None:
    fit(tmp_path, 4, save_last="link")
    assert (tmp_path / "last.ckpt").is_symlink()
    (tmp_path / "step=4.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"last\.ckpt is a link to step=4\.ckpt"):
        assert fit(tmp_path, 6, "last", save_last="link") == 2


def test_training_does_not_begin_anew_where_none_is_whole(tmp_path: Path) -> None:
    fit(tmp_path, 2)
    for path in tmp_path.glob("*.ckpt"):
        truncate(path)
    with (
        pytest.warns(UserWarning, match="Skipped"),
        pytest.raises(DamagedCheckpoint, match=r"last\.ckpt.*step=2\.ckpt.*start over"),
    ):
        fit(tmp_path, 4, "last")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE, errno.ECONNREFUSED])
def test_a_checkpoint_that_cannot_be_read_for_now_is_not_taken_for_a_damaged_one(
    tmp_path: Path, number: int
) -> None:
    """An older one would replace it; the folder for copies may be full."""
    read = list[str]()

    def fails(self: object, place: str, copy: str) -> None:
        read.append(place)
        raise OSError(number, os.strerror(number), copy)

    for name in ("last", "older"):
        WholeCheckpointIO().save_checkpoint({"n": 1}, f"memory://away/{name}.ckpt")
    paths = [f"memory://away/{name}.ckpt" for name in ("last", "older")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(fsspec.filesystem("memory")), "get_file", fails)
        said = rf"{paths[0]} could not be checked \({os.strerror(number)}\)$"
        with pytest.raises(OSError, match=said):
            newest_whole(paths)
    assert read == ["/away/last.ckpt"]


def test_training_begins_where_there_is_none(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no last checkpoint available"):
        assert fit(tmp_path, 2, "last") == 0


def test_a_damaged_checkpoint_that_is_asked_for_by_name_is_refused(
    tmp_path: Path,
) -> None:
    fit(tmp_path, 4)
    truncate(tmp_path / "last.ckpt")
    with pytest.raises(DamagedCheckpoint, match=r"last\.ckpt is truncated"):
        fit(tmp_path, 6, tmp_path / "last.ckpt")


def test_of_slurms_checkpoints_the_highest_whole_one_is_taken(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    for number in (2, 10):
        os.replace(
            tmp_path / f"step={number // 5 + 2}.ckpt",
            tmp_path / f"hpc_ckpt_{number}.ckpt",
        )
    assert newest_whole([str(tmp_path / "hpc_ckpt_10.ckpt")])
    assert fit(tmp_path, 6, "hpc") == 4
    truncate(tmp_path / "hpc_ckpt_10.ckpt")
    with pytest.warns(UserWarning, match=r"Skipped.*hpc_ckpt_10\.ckpt"):
        assert fit(tmp_path, 6, "hpc") == 2


def test_one_of_slurms_that_is_asked_for_by_name_is_replaced_by_no_other(
    tmp_path: Path,
) -> None:
    for number in (1, 2):
        path = tmp_path / f"hpc_ckpt_{number}.ckpt"
        WholeCheckpointIO().save_checkpoint({"global_step": number}, path)
    truncate(path)
    trainer = pl.Trainer(logger=False, default_root_dir=tmp_path)
    taken = last_good.whole_checkpoint_path(
        trainer, lambda state, path: path, None, str(path)
    )
    assert taken == str(path)


def test_slurms_checkpoints_are_looked_for_only_if_they_are_meant(
    tmp_path: Path,
) -> None:
    """Lightning cannot read the number in this name."""
    fit(tmp_path, 4)
    (tmp_path / "hpc_ckpt_old.ckpt").touch()
    assert fit(tmp_path, 6, tmp_path / "last.ckpt") == 4


def test_slurms_checkpoint_in_a_remote_store_is_taken(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    WholeCheckpointIO().save_checkpoint(content, "memory://slurm/hpc_ckpt_1.ckpt")
    module = FirstWeights()
    trainer = trainer_of(gossip(), 1, max_steps=6, default_root_dir="memory://slurm")
    trainer.fit(module, loader(12), ckpt_path="hpc")
    assert module.first_step == 4


def test_checkpoints_of_others_count(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"w": torch.zeros(3)}, path)
    assert newest_whole([str(path)]) == str(path)
    WholeCheckpointIO().save_checkpoint({"w": torch.zeros(3)}, path)
    assert newest_whole([str(path)]) == str(path)


def test_a_damaged_last_one_at_a_url_is_passed_over() -> None:
    folder = "memory://last"
    fit(folder, 4)
    assert fit(folder, 6, "last") == 4
    memory = fsspec.filesystem("memory")
    for name in ("last.ckpt", "step=6.ckpt"):
        memory.pipe_file(f"{folder}/{name}", memory.cat_file(f"{folder}/{name}")[:-9])
    with pytest.warns(UserWarning, match=r"Skipped: checkpoint memory://.*last\.ckpt"):
        assert fit(folder, 8, "last") == 4


def test_files_beside_a_whole_last_one_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each learner would copy what is remote."""
    fit(tmp_path, 6)
    read, age = list[str](), last_good._age
    monkeypatch.setattr(last_good, "_age", lambda path: read.append(path) or age(path))
    assert fit(tmp_path, 8, "last") == 6
    assert read == [str(tmp_path / "last.ckpt")]
