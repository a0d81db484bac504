"""Checkpoints in shards: whole or not at all, and nothing that runs code."""

import errno
import os
import pickle
import re
import shutil
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.__main__ import main
from lightning_adpsgd.strategy import model_parallel
from lightning_adpsgd.strategy.checkpoints import (
    last_good,
    loading_shards,
    sharded,
)
from lightning_adpsgd.strategy.checkpoints.format import DamagedCheckpoint
from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO
from lightning_adpsgd.strategy.checkpoints.last_good import newest_whole
from lightning_adpsgd.strategy.checkpoints.loading_shards import (
    Folder,
    load_optimizers,
    load_weights,
)
from lightning_adpsgd.strategy.checkpoints.sharded import (
    META,
    check_folder,
    has_optimizer,
    read_rest,
    read_shards,
    write_shards,
)
from tests.learners import learners, values

SHARDS = "__0_0.distcp"
IMPORT = sys.modules["torch._utils"]._import_dotted_name


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A learner alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


def weights(value: float) -> dict[str, Tensor]:
    return {"layer.weight": torch.full((3, 2), value), "bias": torch.full((4,), value)}


def state(value: float) -> dict[str, Any]:
    momentum = {"state": {"bias": {"momentum": torch.full((4,), value)}}}
    return {"state_dict": weights(value), "optimizer_0": momentum}


@pytest.fixture
def folder(group: dist.ProcessGroup, tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    write_shards(state(1.0), {"epoch": 5}, path, group)
    return path


def test_what_is_written_is_read(folder: Path) -> None:
    found = state(0.0)
    read_shards(found, folder)
    for name, value in weights(1.0).items():
        assert torch.equal(found["state_dict"][name], value)
    assert read_rest(folder) == {"epoch": 5}
    assert has_optimizer(folder, 0)
    assert not has_optimizer(folder, 1)
    read_rest(folder)
    check_folder(folder, slice(0, None, 1))
    assert [path.name for path in folder.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("before", ["folder", "file", "unfinished"])
def test_a_new_one_takes_the_place_of_what_was_there(
    group: dist.ProcessGroup,
    folder: Path,
    before: str,
    can_exchange: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not can_exchange:
        monkeypatch.setattr(sharded, "_exchange", lambda *_: False)
    path = folder
    if before == "file":
        path = folder.with_name("file.ckpt")
        path.write_text("one file")
    if before == "unfinished":  # what a kill has left
        left = folder.with_name(f".{folder.name}.unfinished")
        left.mkdir()
        (left / "__7_0.distcp").write_text("of another run")
    write_shards(state(2.0), {"epoch": 6}, path, group)
    read_shards(found := state(0.0), path)
    assert found["state_dict"]["bias"].tolist() == [2.0] * 4
    assert sorted(p.name for p in path.iterdir()) == [".metadata", SHARDS, META]
    assert not [p.name for p in path.parent.iterdir() if p.name.startswith(".")]


@pytest.mark.skipif(sys.platform != "linux", reason="no other system exchanges names")
def test_two_folders_exchange_their_names_at_once(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        (path / f"was {path.name}").touch()
    assert sharded._exchange(one, other)
    assert [path.name for path in one.iterdir()] == ["was other"]
    assert [path.name for path in other.iterdir()] == ["was one"]
    assert not sharded._exchange(one, tmp_path / "absent")


def test_what_a_killed_save_put_aside_stands_in_the_way_of_none(
    group: dist.ProcessGroup, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where names cannot be exchanged, the old folder is put aside for a moment."""
    monkeypatch.setattr(sharded, "_exchange", lambda *_: False)
    aside = folder.with_name(f".{folder.name}.replaced")
    aside.mkdir()
    (aside / SHARDS).write_text("of before")
    write_shards(state(2.0), {"epoch": 6}, folder, group)
    assert read_rest(folder) == {"epoch": 6}
    assert not aside.exists()
    os.rename(folder, aside)  # as a kill between both renames leaves it
    write_shards(state(3.0), {"epoch": 7}, folder, group)
    assert read_rest(folder) == {"epoch": 7}
    assert not aside.exists()


def test_what_a_killed_save_put_aside_is_gone_on_from(folder: Path) -> None:
    """Nothing has the name that it had, so training would begin anew."""
    aside = folder.with_name(f".{folder.name}.replaced")
    callbacks: Any = [ModelCheckpoint(folder.parent)]
    trainer = pl.Trainer(logger=False, callbacks=callbacks)
    shutil.copytree(folder, aside)
    assert last_good._last_checkpoints(trainer) == {str(folder)}
    shutil.rmtree(folder)  # as a kill between both renames leaves it
    with pytest.warns(UserWarning, match=rf"{aside} counts as {folder.name}: a save"):
        found = last_good._last_checkpoints(trainer)
    assert found == {str(aside)}


@pytest.mark.parametrize("exchange", [sharded._exchange, lambda *_: False])
def test_an_old_folder_that_somebody_reads_does_not_end_the_training(
    group: dist.ProcessGroup,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    exchange: Any,
) -> None:
    """A network file system keeps what is open, and so the folder that it is in."""

    def busy(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        write_shards(state(2.0), {"epoch": 6}, folder, group)
        assert read_rest(folder) == {"epoch": 6}
        # It is read for longer than it takes until the next save.
        patch.setattr(sharded, "_exchange", exchange)
        write_shards(state(3.0), {"epoch": 7}, folder, group)
        write_shards(state(4.0), {"epoch": 8}, folder, group)
    assert read_rest(folder) == {"epoch": 8}
    monkeypatch.setattr(sharded, "_exchange", exchange)
    for epoch in (9, 10, 11):
        write_shards(state(3.0), {"epoch": epoch}, folder, group)
    left = {path.name for path in folder.parent.iterdir()}
    assert "last.ckpt" in left
    assert len(left) <= 2


def test_an_error_in_the_middle_leaves_the_old_one(
    group: dist.ProcessGroup, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sharded, "write_checkpoint", full)
    with pytest.raises(OSError, match="No space"):
        write_shards(state(2.0), {"epoch": 6}, folder, group)
    assert read_rest(folder) == {"epoch": 5}
    check_folder(folder, slice(0, None, 1))


FULL = OSError(28, "No space left")


def of_the_archive() -> None:
    """As torch, whose archive fails once more when it is closed."""
    try:
        raise FULL
    finally:
        raise RuntimeError("unexpected pos 704 vs 598")


def of_the_disk() -> None:
    raise FULL


def of_the_program() -> None:
    raise RuntimeError("cannot pickle it")


@pytest.mark.parametrize(
    ("fails", "number", "cause"),
    [
        (of_the_archive, 28, "No space left"),
        (of_the_disk, 28, "No space left"),
        (of_the_program, None, "cannot pickle it"),
    ],
)
def test_an_error_of_a_shard_names_the_folder_and_the_cause(
    group: dist.ProcessGroup,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[[], None],
    number: int | None,
    cause: str,
) -> None:
    monkeypatch.setattr(sharded.FileSystemWriter, "write_data", lambda *_: fails())
    expected = rf"last\.ckpt could not be written \(.*{cause}"
    with pytest.raises(OSError, match=expected) as told:
        write_shards(state(2.0), {"epoch": 6}, folder, group)
    assert told.value.errno == number
    assert read_rest(folder) == {"epoch": 5}


def test_an_error_of_the_first_learner_ends_the_others_with_its_cause(
    tmp_path: Path,
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise FULL

    def program(rank: int) -> list[str]:
        dist.init_process_group("gloo")
        whole = dist.distributed_c10d._get_default_group()
        told = list[str]()
        for name, of in (("mkdir", Path), ("write_checkpoint", sharded)):
            with pytest.MonkeyPatch.context() as patch:
                if rank == 0:
                    patch.setattr(of, name, full)
                with pytest.raises(OSError, match="No space") as error:
                    write_shards(state(1.0), {}, tmp_path / "last.ckpt", whole)
            told.append(str(error.value))
        dist.barrier()  # nobody has ended before all have heard of it
        dist.destroy_process_group()
        return told

    own, others = values(learners(2, program))
    assert own[0] == str(FULL)
    file = tmp_path / ".last.ckpt.unfinished" / sharded.META
    assert own[1] == f"{FULL}: '{file}'"
    for message, cause in zip(others, own, strict=True):
        assert message.endswith(
            f"last.ckpt was not written: learner 0 raised OSError: {cause}"
        )


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", [META, ".metadata", SHARDS])
@pytest.mark.parametrize("damage", [os.unlink, cut])
def test_a_file_that_is_missing_or_short_is_seen_at_once_and_named(
    folder: Path, damage: Callable[[Path], None], name: str
) -> None:
    damage(folder / name)
    with pytest.raises(DamagedCheckpoint, match=rf"last\.ckpt.*{name}|{name}.*damaged"):
        read_rest(folder)


def test_a_flipped_bit_in_the_index_is_seen_at_once(folder: Path) -> None:
    flip(folder / ".metadata")
    with pytest.raises(DamagedCheckpoint, match=r"SHA-256 of \.metadata is another"):
        check_folder(folder)


@pytest.mark.parametrize("exchange", [sharded._exchange, lambda *_: False])
def test_the_name_of_a_folder_reaches_the_disk(
    group: dist.ProcessGroup,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    exchange: Any,
) -> None:
    synced = list[tuple[Path, int]]()
    monkeypatch.setattr(sharded, "_exchange", exchange)
    note = lambda of: synced.append((of, read_rest(folder)["epoch"]))  # noqa: E731
    monkeypatch.setattr(sharded, "sync_folder", note)
    write_shards(state(2.0), {"epoch": 6}, folder, group)
    assert synced == [(folder.parent, 6)]


def test_shards_of_a_file_have_memory_of_their_own(group: dist.ProcessGroup) -> None:
    """The rest of the file would stay as long as they do."""
    own = distribute_tensor(torch.zeros(3, 2), init_device_mesh("cpu", (1,)))
    whole = torch.ones(3, 2)
    part = loading_shards._cut_like({"weight": whole}, {"weight": own})["weight"]
    assert torch.equal(part.to_local(), whole)
    assert part.to_local().data_ptr() != whole.data_ptr()


def test_a_flipped_bit_in_a_shard_is_seen_when_it_is_resumed(folder: Path) -> None:
    flip(folder / SHARDS)
    read_rest(folder)
    with pytest.raises(DamagedCheckpoint, match=f"SHA-256 of {SHARDS} is another"):
        check_folder(folder, slice(0, None, 1))
    assert main(["export", str(folder), "--out", str(folder) + ".one"]) == 2


def test_learners_sum_each_file_once(folder: Path) -> None:
    flip(folder / SHARDS)
    seen = []
    for learner in range(3):
        try:
            check_folder(folder, slice(learner, None, 3))
        except DamagedCheckpoint:
            seen.append(learner)
    assert len(seen) == 1


def test_a_file_that_is_missing_is_named_to_each_learner(folder: Path) -> None:
    os.unlink(folder / SHARDS)
    for learner in range(2):
        with pytest.raises(DamagedCheckpoint, match=f"{SHARDS} is missing: resume"):
            check_folder(folder, slice(learner, None, 2))


def test_a_damaged_folder_is_passed_over_for_one_that_is_whole(
    group: dist.ProcessGroup, folder: Path
) -> None:
    older = folder.with_name("older.ckpt")
    write_shards(state(0.5), {"epoch": 4}, older, group)
    (folder / SHARDS).unlink()
    with pytest.warns(UserWarning, match=f"Skipped: .*{SHARDS} is missing"):
        assert newest_whole([str(folder), str(older)]) == str(older)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/evil",)


class Roundabout:
    """Runs code by names of torch's own, which an index may not have either."""

    def __init__(self, called: Any, *words: Any) -> None:
        self._call = called, words

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (Evil(), r"posix\.system"),
        (Roundabout(IMPORT, "os.system"), "_import_dotted"),
        (Roundabout(sharded.FileSystemReader, "/tmp"), "FileSystemReader"),
    ],
)
def test_an_index_that_runs_code_is_refused(
    folder: Path, content: Any, name: str
) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    said = rf"last\.ckpt is damaged: .metadata .*{name}.*, which can run code: resume"
    with pytest.raises(DamagedCheckpoint, match=said):
        has_optimizer(folder, 0)
    with pytest.raises(DamagedCheckpoint, match=said):
        read_shards(state(0.0), folder)


def test_an_index_cannot_reach_what_a_module_has_imported(folder: Path) -> None:
    at = "torch.distributed.checkpoint.filesystem", "os.getcwd"
    words = b"".join(b"\x8c" + bytes([len(w)]) + w.encode() for w in at)
    (folder / ".metadata").write_bytes(b"\x80\x04" + words + b"\x93)R.")
    with pytest.raises(DamagedCheckpoint, match=r"os\.getcwd, which can run code"):
        has_optimizer(folder, 0)


def test_the_path_of_an_index_of_python_3_13_is_read(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That release names another module for the class, which others lack."""
    path = tmp_path / "last.ckpt"
    with monkeypatch.context() as patch:
        patch.setattr(type(path), "__module__", "pathlib._local")
        patch.setitem(sys.modules, "pathlib._local", sys.modules["pathlib"])
        write_shards(state(1.0), {}, path, group)
    assert b"pathlib._local" in (path / ".metadata").read_bytes()
    assert has_optimizer(path, 0)


def test_a_value_of_a_shard_that_runs_code_is_refused(
    group: dist.ProcessGroup, tmp_path: Path
) -> None:
    path, run = tmp_path / "last.ckpt", tmp_path / "run"
    value = Roundabout(os.system, f"touch {run}")
    write_shards({"optimizer_0": {"lr": value}}, {}, path, group)
    said = r"last\.ckpt: optimizer_0\.lr holds objects of posix\.system, and to load"
    with pytest.raises(pickle.UnpicklingError, match=said):
        read_shards({"optimizer_0": {"lr": 0.1}}, path)
    assert not run.exists()


def test_an_option_of_an_optimizer_may_be_an_object_that_the_user_trusts(
    group: dist.ProcessGroup, tmp_path: Path
) -> None:
    path, options = tmp_path / "last.ckpt", {"lr": Namespace(value=0.5)}
    write_shards({"optimizer_0": options}, {}, path, group)
    found: dict[str, Any] = {"optimizer_0": {"lr": None}}
    read_shards(found, path, weights_only=False)
    assert found["optimizer_0"] == options


def test_an_optimizer_may_have_options_that_a_scheduler_has_given_it_since(
    group: dist.ProcessGroup, tmp_path: Path
) -> None:
    model, path = torch.nn.Linear(1, 1), tmp_path / "last.ckpt"
    before, now = (torch.optim.SGD(model.parameters(), lr) for lr in (0.5, 0.1))
    kept = get_optimizer_state_dict(model, before)
    write_shards({"optimizer_0": kept}, {}, path, group)
    now.param_groups[0]["initial_lr"] = 0.1
    load_optimizers(model, Folder(path, True), [now])
    assert now.param_groups[0]["lr"] == 0.5


def test_plain_values_beside_tensors_are_read(
    group: dist.ProcessGroup, tmp_path: Path
) -> None:
    plain = {"lr": 0.1, "betas": (0.9, 0.99), "fused": None, "name": "adam"}
    write_shards({"optimizer_0": plain}, {}, tmp_path / "last.ckpt", group)
    found: dict[str, Any] = {"optimizer_0": {**dict.fromkeys(plain), "betas": (0, 0)}}
    read_shards(found, tmp_path / "last.ckpt")
    assert found["optimizer_0"] == plain


def test_objects_that_the_user_trusts_are_read_and_stand_in_no_ones_way(
    capsys: pytest.CaptureFixture[str], group: dist.ProcessGroup, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    write_shards(state(1.0), {"hyper_parameters": Namespace(lr=1.0)}, path, group)
    check_folder(path, slice(0, None, 1))
    assert newest_whole([str(path)]) == str(path)
    assert read_rest(path, False) == {"hyper_parameters": Namespace(lr=1.0)}
    with pytest.raises(pickle.UnpicklingError, match=r"argparse\.Namespace"):
        read_rest(path)
    command = ["export", str(path), "--out", str(tmp_path / "one")]
    assert main(command) == 2
    assert re.search(r"argparse\.Namespace.*`--trust`", capsys.readouterr().err)
    assert main([*command, "--trust"]) == 0
    whole = torch.load(tmp_path / "one", weights_only=False)
    assert whole["hyper_parameters"] == Namespace(lr=1.0)


NO_INDEX = (
    b"",
    b"\x80\x04",  # it ends early
    b"\x80\xff.",  # of a protocol that is yet to come
    b"h\x05.",  # a reference to nothing
    b"I\x00\n.",  # the number 0
    b"N)R.",  # a call of None
    b"ctorch.distributed.checkpoint.metadata\nabsent\n.",  # of another release
)


def test_an_index_without_sense_is_damage(folder: Path) -> None:
    for content in NO_INDEX:
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(DamagedCheckpoint, match="metadata cannot be read"):
            has_optimizer(folder, 0)
    (folder / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(DamagedCheckpoint, match="metadata cannot be read: it holds a"):
        has_optimizer(folder, 0)


def test_an_index_that_cannot_be_read_is_damage_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [AttributeError, EOFError, KeyError, TypeError, ValueError]

    def fails(self: object) -> None:
        raise errors.pop()("a reason")

    monkeypatch.setattr(sharded._Index, "load", fails)
    said = r"last.ckpt is damaged: .metadata cannot be read: .?a reason"
    while errors:
        with pytest.raises(DamagedCheckpoint, match=said):
            has_optimizer(folder, 0)


def test_a_model_of_another_shape_is_told_so(folder: Path) -> None:
    other = {"state_dict": {"bias": torch.zeros(9)}}
    with pytest.raises((RuntimeError, ValueError), match="bias"):
        read_shards(other, folder)
    cast = {"state_dict": {"bias": torch.zeros(1)}}
    with pytest.raises(RuntimeError, match="does not fit the model"):
        read_shards(cast, folder)
    missing = {"state_dict": {"extra": torch.zeros(2)}}
    with pytest.raises(RuntimeError, match="extra"):
        read_shards(missing, folder)
    read_shards(missing, folder, strict=False)


@pytest.mark.parametrize("rows", [2, 4])
def test_a_file_of_a_model_of_another_shape_is_told_so(
    group: dist.ProcessGroup, rows: int
) -> None:
    """It must not be cut to what fits."""
    module = torch.nn.Linear(2, 3, bias=False)
    whole = distribute_tensor(torch.zeros(3, 2), init_device_mesh("cpu", (1,)))
    module.weight = torch.nn.Parameter(whole)
    file = {"state_dict": {"weight": torch.ones(rows, 2)}}
    said = rf"`weight` has the shape \({rows}, 2\) there and \(3, 2\) here"
    with pytest.raises(RuntimeError, match=said):
        load_weights(module, file, True)


def test_an_optimizer_state_of_another_shape_is_named_with_its_weight(
    group: dist.ProcessGroup,
) -> None:
    """All weights have an `exp_avg`."""
    own = distribute_tensor(torch.zeros(3, 2), init_device_mesh("cpu", (1,)))
    whole, ours = (
        {"state": {"layer.weight": {"exp_avg": tensor}}}
        for tensor in (torch.ones(4, 2), own)
    )
    with pytest.raises(RuntimeError, match=r"`state\.layer\.weight\.exp_avg` has"):
        loading_shards._cut_like(whole, ours)


def test_learners_that_see_different_folders_do_not_begin(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one step or not: they would join shards of two trainings."""
    strategy = HADPSGDStrategy("ring", "sync", 1, inside="model_parallel")
    assert strategy.load_checkpoint(folder)["epoch"] == 5
    told = list[str]()

    def texts_of_all(text: str) -> list[str]:
        told.append(text)
        return [text, "another"]

    monkeypatch.setattr(model_parallel, "texts_of_all", texts_of_all)
    with pytest.raises(ValueError, match=rf"the same checkpoint .*{folder} of step"):
        strategy.load_checkpoint(folder)
    assert told == [sharded.sum_of(folder / META)]


def test_a_shard_that_is_gone_is_damage_and_no_misfit(folder: Path) -> None:
    os.unlink(folder / SHARDS)
    with pytest.raises(DamagedCheckpoint, match=r"is damaged: .*No such file"):
        read_shards(state(0.0), folder)


def test_one_file_can_be_made_of_it(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "one.ckpt"
    dist.destroy_process_group()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["export", str(folder), "--out", str(file)]) == 0
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    found = WholeCheckpointIO().load_checkpoint(file)
    assert found["epoch"] == 5
    assert set(found["state_dict"]) == set(weights(1.0))
    assert torch.equal(found["state_dict"]["bias"], torch.ones(4))
    # It never replaces a file.
    assert main(["export", str(folder), "--out", str(file)]) == 2


def test_an_export_has_what_a_module_keeps_beside_its_tensors(
    group: dist.ProcessGroup, tmp_path: Path
) -> None:
    extra = {"mean": torch.ones(2), "counts": [3, torch.ones(1)]}
    kept = {**weights(1.0), "scale._extra_state": extra, "n._extra_state": 7}
    write_shards({"state_dict": kept}, {}, tmp_path / "last.ckpt", group)
    sharded.export(tmp_path / "last.ckpt", tmp_path / "one.ckpt")
    found = WholeCheckpointIO().load_checkpoint(tmp_path / "one.ckpt")["state_dict"]
    torch.testing.assert_close(found, kept, rtol=0, atol=0)


def test_an_export_of_no_checkpoint_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, run = tmp_path / "empty", tmp_path / "run"
    for folder in (empty, run / "last.ckpt"):
        folder.mkdir(parents=True)
    for path in (tmp_path / "none", empty, run):
        assert main(["export", str(path), "--out", str(tmp_path / "one")]) == 2
        assert capsys.readouterr().err == (
            f"error: there is no checkpoint at {path}: it must be a folder with "
            "meta.pt and .metadata\n"
        )


def test_an_export_of_one_file_says_that_it_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "whole.ckpt"
    file.write_bytes(b"weights")
    assert main(["export", str(file), "--out", str(tmp_path / "one")]) == 2
    assert f"{file} is a file already" in capsys.readouterr().err


def test_a_folder_is_not_taken_for_a_file(folder: Path) -> None:
    with pytest.raises(IsADirectoryError, match=r"export .*last\.ckpt --out"):
        WholeCheckpointIO().load_checkpoint(folder)
