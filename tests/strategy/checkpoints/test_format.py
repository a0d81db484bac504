"""Checkpoints as files: whole or not at all, checked, readable by torch alone."""

import hashlib
import inspect
import io
import os
import pickle
import random
import re
import socket
import stat
import threading
import time
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import LambdaCallback
from typing_extensions import override

from lightning_adpsgd import files
from lightning_adpsgd.files import (
    bytes_written_whole,
    remove_leftovers,
    written_whole,
)
from lightning_adpsgd.strategy.checkpoints import io as checkpoint_io
from lightning_adpsgd.strategy.checkpoints.format import (
    DamagedCheckpoint,
    check_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from lightning_adpsgd.strategy.checkpoints.io import (
    WholeCheckpointIO,
    check_file,
    flawed_loader,
    step_in_file,
)
from tests.helpers import PATIENCE_S
from tests.learners import Linear, gossip, loader, trainer_of


def checkpoint(value: float = 1.0) -> dict[str, Any]:
    weights = torch.full((300,), value)
    return {"state_dict": {"w": weights, "tied": weights}, "epoch": 3, "names": ["a"]}


def written(value: Any) -> bytes:
    file = io.BytesIO()
    write_checkpoint(value, file)
    return file.getvalue()


def written_by_0_2(value: Any) -> bytes:
    """As before: the comment of the archive holds the SHA-256 of all the rest."""
    content = written(value)[:-2]
    digest = hashlib.sha256(content + b"\0\0").hexdigest()
    comment = b"lightning_adpsgd sha256 " + digest.encode()
    return content + len(comment).to_bytes(2, "little") + comment


def old_format() -> bytes:
    """A file as torch wrote it before 1.6."""
    file = io.BytesIO()
    torch.save({}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def check(content: bytes) -> None:
    check_checkpoint(io.BytesIO(content), "some.ckpt")


def read(content: bytes, **options: Any) -> Any:
    return read_checkpoint(io.BytesIO(content), "some.ckpt", **options)


def flipped(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def same(one: Any, other: Any) -> bool:
    return pickle.dumps(_numbers(one)) == pickle.dumps(_numbers(other))


def _numbers(value: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: tensor.tolist() for name, tensor in value["state_dict"].items()}
    return {**value, "state_dict": tensors}


def archive_of_others() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("word/document.xml", "<text/>")
    return file.getvalue()


NO_CHECKPOINTS = (
    b"",
    b"hello",
    bytes(5000),
    b"<!DOCTYPE html><html><title>502 Bad Gateway</title></html>" * 9,
    random.Random(3).randbytes(1000),
    archive_of_others(),
    pickle.dumps({"global_step": 3}),
)

# --- the format


def test_torch_alone_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(written(checkpoint()))
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert same(loaded, checkpoint())
    tied = loaded["state_dict"]
    assert tied["w"].data_ptr() == tied["tied"].data_ptr()


def test_a_file_is_what_torch_writes() -> None:
    theirs = io.BytesIO()
    torch.save(checkpoint(), theirs)
    assert written(checkpoint()) == theirs.getvalue()


def test_a_file_has_checksums_though_torch_is_told_to_write_none() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        file = io.BytesIO()
        write_checkpoint({"weights": torch.ones(8)}, file)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    check_checkpoint(file, "mine")


@pytest.mark.parametrize("content", [b"", b"x", b"not an archive"])
def test_what_somebody_has_put_in_the_place_of_torchs_save_writes_as_it_likes(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "save", lambda value, file: file.write(content))
    WholeCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").read_bytes() == content


@pytest.mark.parametrize(
    "error", [EOFError, KeyError, IndexError, RuntimeError, TypeError, ValueError]
)
def test_whatever_torch_says_of_a_file_names_it(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise error("of the first line\nand a trace")

    content = written(checkpoint())
    monkeypatch.setattr(torch, "load", fails)
    said = rf"some.ckpt cannot be read \({error.__name__}: .?of the first line"
    with pytest.raises(DamagedCheckpoint, match=said) as caught:
        read(content)
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.parametrize("make", [written, written_by_0_2])
def test_a_whole_checkpoint_is_loaded(make: Any) -> None:
    assert same(read(make(checkpoint())), checkpoint())


# --- objects that are not data


def test_an_object_that_could_run_code_is_refused_by_name() -> None:
    content = written({"hyper_parameters": Namespace(lr=1.0)})
    with pytest.raises(
        pickle.UnpicklingError, match=r"some.ckpt.*argparse.Namespace.*add_safe"
    ):
        read(content)
    assert read(content, weights_only=False)["hyper_parameters"].lr == 1.0
    with torch.serialization.safe_globals([Namespace]):
        assert read(content)["hyper_parameters"].lr == 1.0


def test_the_plugin_runs_no_code_unless_it_is_told_to(tmp_path: Path) -> None:
    path, plugin = tmp_path / "a.ckpt", WholeCheckpointIO()
    plugin.save_checkpoint({"hyper_parameters": Namespace(lr=1.0)}, path)
    for options in ({}, {"weights_only": None}, {"weights_only": True}):
        with pytest.raises(pickle.UnpicklingError, match=r"argparse\.Namespace"):
            plugin.load_checkpoint(path, **options)
    loaded = plugin.load_checkpoint(path, weights_only=False)
    assert loaded["hyper_parameters"].lr == 1.0


def test_torchs_variable_decides_where_no_argument_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plugin = tmp_path / "a.ckpt", WholeCheckpointIO()
    plugin.save_checkpoint({"hyper_parameters": Namespace(lr=1.0)}, path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert plugin.load_checkpoint(path)["hyper_parameters"].lr == 1.0
    with pytest.raises(pickle.UnpicklingError, match=r"argparse\.Namespace"):
        plugin.load_checkpoint(path, weights_only=True)


class Fails:
    """Its own code refuses to be unpickled."""

    def __reduce__(self) -> Any:
        return Fails.refuse, ()

    @staticmethod
    def refuse() -> None:
        raise pickle.UnpicklingError("of the class")


@pytest.mark.parametrize("weights_only", [False, None])
def test_who_trusts_a_file_is_not_told_to_trust_it(
    weights_only: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if weights_only is None:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(DamagedCheckpoint, match=r"some\.ckpt .*of the class"):
        read(written([Fails()]), weights_only=weights_only)


def test_who_trusts_no_file_is_told_what_this_one_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(pickle.UnpicklingError, match=r"argparse\.Namespace"):
        read(written({"mine": Namespace()}), weights_only=False)


class Keeps(Linear):
    """Has an object in its checkpoints that is no plain data."""

    found: Any = None

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = Namespace(lr=1.0)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["mine"]


def test_a_training_resumes_with_an_object_by_the_remedy_of_the_message(
    tmp_path: Path,
) -> None:
    """Before 2.6 `fit` takes no `weights_only`, and a plugin is the way."""
    path = str(tmp_path / "a.ckpt")
    first = trainer_of("adpsgd", 1)
    first.fit(Keeps(), loader(2))
    first.save_checkpoint(path)
    with pytest.raises(pickle.UnpicklingError, match=r"TorchCheckpointIO\(\)"):
        trainer_of("adpsgd", 1).fit(Keeps(), loader(2), ckpt_path=path)
    module, plugins = Keeps(), [TorchCheckpointIO()]
    trusts: dict[str, Any] = {}
    if "weights_only" in inspect.signature(pl.Trainer.fit).parameters:
        plugins, trusts["weights_only"] = [], False
    second = trainer_of("adpsgd", 1, plugins=plugins)
    second.fit(module, loader(2), ckpt_path=path, **trusts)
    assert module.found == Namespace(lr=1.0)


class RateOfNumpy(Linear):
    @override
    def configure_optimizers(self) -> Any:
        rate, factor = np.geomspace(0.1, 0.2, 2)
        optimizer = torch.optim.SGD(self.parameters(), rate)
        often = torch.optim.lr_scheduler.ExponentialLR(optimizer, factor)
        # It keeps a Counter whose keys are NumPy's.
        late = torch.optim.lr_scheduler.MultiStepLR(optimizer, np.array([100]))
        return [optimizer], [often, late]


@pytest.mark.parametrize("save_learners", [False, True])
def test_a_training_whose_rate_is_a_number_of_numpy_resumes(
    save_learners: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    saver = LambdaCallback(
        on_train_end=lambda trainer, _: trainer.save_checkpoint(path)
    )
    strategy = gossip(save_learners=save_learners)
    trainer_of(strategy, 1, callbacks=[saver]).fit(RateOfNumpy(), loader(2))
    strategy = gossip(save_learners=save_learners)
    second = trainer_of(strategy, 1, max_epochs=2)
    second.fit(RateOfNumpy(), loader(2), ckpt_path=path)
    assert second.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.2**2)


# --- the writer


def test_an_error_of_the_file_is_the_one_that_is_raised() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > 600:
                raise OSError(28, "No space left on device")
            return super().write(data)

    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(checkpoint(), Full())


def test_after_an_error_the_old_file_is_as_it_was_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"old")

    def fail() -> None:
        with bytes_written_whole(path) as file:
            file.write(b"new")
            raise ValueError("on the way")

    with pytest.raises(ValueError, match="on the way"):
        fail()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a.ckpt": b"old"}


def test_the_bytes_reach_the_disk_before_the_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "a.ckpt", []

    def fsync(number: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(number).st_mode)
        synced.append(("folder" if is_folder else "file", path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with bytes_written_whole(path) as file:
        file.write(b"new")
    assert synced == [("file", False), ("folder", True)]


@pytest.mark.parametrize("newline", [None, ""])
def test_text_is_written_whole_or_not_at_all(
    tmp_path: Path, newline: str | None
) -> None:
    path = tmp_path / "folder" / "a.csv"
    with written_whole(path, newline) as file:
        assert file.write("Käse\n") == 5
        assert not path.exists()

    def fail() -> None:
        with written_whole(path) as file:
            file.write("half")
            raise ValueError("on the way")

    with pytest.raises(ValueError, match="on the way"):
        fail()
    assert path.read_bytes() == "Käse\n".encode()
    assert list(path.parent.iterdir()) == [path]


def left_by_a_dead_writer(folder: Path) -> Path:
    """As a kill leaves it."""
    folder = folder.resolve()
    if not (pid := os.fork()):
        with bytes_written_whole(folder / "b.ckpt") as file:
            file.write(b"half")
            file.flush()
            os._exit(0)
    os.waitpid(pid, 0)
    (found,) = folder.glob(".b.ckpt.*")
    return found


def leftovers_removed_from(folder: Path) -> list[Path]:
    before = sorted(folder.iterdir())
    remove_leftovers(folder)
    return [path for path in before if path not in set(folder.iterdir())]


def test_a_file_with_another_kind_of_name_stays_for_a_day(tmp_path: Path) -> None:
    for name in (".b.ckpt.01234567.unfinished", "..unfinished"):
        (tmp_path / name).write_bytes(b"half")
    assert leftovers_removed_from(tmp_path) == []
    os.utime(tmp_path / ".b.ckpt.01234567.unfinished", (1, 1))
    assert leftovers_removed_from(tmp_path) == [
        tmp_path / ".b.ckpt.01234567.unfinished"
    ]


def test_what_a_dead_writer_left_goes_and_what_a_living_one_writes_stays(
    tmp_path: Path,
) -> None:
    left = left_by_a_dead_writer(tmp_path)
    with bytes_written_whole(tmp_path / "a.ckpt") as file:
        assert not left.exists()
        left.write_bytes(b"half")
        assert leftovers_removed_from(tmp_path) == [left]
        file.write(b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_what_another_user_writes_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_by_a_dead_writer(tmp_path)

    def refused(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert leftovers_removed_from(tmp_path) == []
    assert left.exists()


def test_a_folder_whose_names_reach_the_disk_does_not_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, closed, close = [], list[int](), os.close
    begin = os.open

    def notes(number: int) -> None:
        closed.append(number)
        close(number)

    monkeypatch.setattr(os, "open", lambda *a: opened.append(begin(*a)) or opened[-1])
    monkeypatch.setattr(os, "close", notes)
    files.sync_folder(tmp_path)
    assert len(opened) == 1
    assert closed == opened


def test_the_writers_own_error_is_raised_though_its_file_was_removed(
    tmp_path: Path,
) -> None:
    def write() -> None:
        with bytes_written_whole(tmp_path / "a"):
            for path in tmp_path.iterdir():
                path.unlink()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        write()


@pytest.mark.parametrize("where", ["another host", "another container"])
def test_a_file_of_a_process_that_is_not_known_here_stays_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Its number is another one's here, so that a living writer looks dead."""
    left = left_by_a_dead_writer(tmp_path)
    numbers, link = tmp_path / "pid", files._pid_namespace.__wrapped__
    numbers.symlink_to("pid:[1]")
    if where == "another host":
        monkeypatch.setattr(files, "boot_id", lambda: where)
    else:
        monkeypatch.setattr(files, "_NAMESPACE", numbers)
    monkeypatch.setattr(files, "_pid_namespace", link)
    assert leftovers_removed_from(tmp_path) == []
    now = time.time()
    os.utime(left, (now - 23 * 3600, now - 23 * 3600))
    assert leftovers_removed_from(tmp_path) == []
    os.utime(left, (now - 25 * 3600, now - 25 * 3600))
    assert leftovers_removed_from(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == [numbers]


def test_where_the_kernel_tells_no_boot_the_host_name_stands_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_BOOT", tmp_path / "none")
    assert files.boot_id.__wrapped__() == socket.gethostname()


def test_many_threads_may_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    contents = [bytes([number]) * 5000 for number in range(8)]

    def write(content: bytes) -> None:
        with bytes_written_whole(path) as file:
            file.write(content)

    threads = [threading.Thread(target=write, args=(c,)) for c in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


# --- the CheckpointIO


def test_a_checkpoint_is_saved_loaded_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.ckpt"
    plugin = WholeCheckpointIO()
    plugin.save_checkpoint(checkpoint(1.0), path)
    plugin.save_checkpoint(checkpoint(2.0), str(path))
    assert same(plugin.load_checkpoint(path), checkpoint(2.0))
    plugin.remove_checkpoint(path)
    assert list(path.parent.iterdir()) == []
    with pytest.raises(FileNotFoundError, match=str(path)):
        plugin.load_checkpoint(path)


def test_a_checkpoint_comes_onto_the_host_unless_it_is_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Onto the GPU it would come beside the weights that are there already."""
    where = list[Any]()
    plugin, path = WholeCheckpointIO(), tmp_path / "a.ckpt"
    plugin.save_checkpoint({}, path)
    read = lambda file, name, place, allowed: where.append(place)  # noqa: E731
    monkeypatch.setattr(checkpoint_io, "read_checkpoint", read)
    plugin.load_checkpoint(path)
    plugin.load_checkpoint(path, "cuda:1")
    assert where == ["cpu", "cuda:1"]


def test_a_remote_path_takes_the_same_checkpoint() -> None:
    path = "memory://folder/a.ckpt"
    plugin = WholeCheckpointIO()
    plugin.save_checkpoint(checkpoint(), path)
    check_file(path)
    assert same(plugin.load_checkpoint(path), checkpoint())
    plugin.remove_checkpoint(path)
    with pytest.raises(FileNotFoundError, match=path):
        plugin.load_checkpoint(path)


def test_a_server_that_gives_files_only_whole_will_do(tmp_path: Path) -> None:
    plugin = WholeCheckpointIO()
    plugin.save_checkpoint(checkpoint(), tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_bytes(written(checkpoint())[:-100])
    with serving(tmp_path) as address:
        check_file(f"{address}/a.ckpt")
        assert same(plugin.load_checkpoint(f"{address}/a.ckpt"), checkpoint())
        with pytest.raises(DamagedCheckpoint, match=f"{address}/b"):
            plugin.load_checkpoint(f"{address}/b.ckpt")
        with pytest.raises(FileNotFoundError, match=f"{address}/c"):
            plugin.load_checkpoint(f"{address}/c.ckpt")


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server of these files, which knows no parts of them."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)


def test_releases_of_torch_whose_loader_is_flawed_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("2.6.0+cu124", "2.9.1"):
        assert "CVE-2026-24747" in (flawed_loader(version) or "")
    assert flawed_loader("2.10.0a0+git1") is flawed_loader("3.0") is None
    WholeCheckpointIO().save_checkpoint(checkpoint(), tmp_path / "a.ckpt")
    monkeypatch.setattr(checkpoint_io, "flawed_loader", lambda: "torch is flawed")
    with pytest.warns(UserWarning, match="torch is flawed"):
        WholeCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")


def test_a_path_of_no_file_is_refused(tmp_path: Path) -> None:
    plugin = WholeCheckpointIO()
    with pytest.raises(IsADirectoryError, match="is a folder of shards"):
        plugin.load_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is not a regular file"):
        check_file(str(tmp_path / "pipe"))


def test_a_checkpoint_that_is_not_there_is_removed_without_an_error(
    tmp_path: Path,
) -> None:
    WholeCheckpointIO().remove_checkpoint(tmp_path / "a.ckpt")


def test_storage_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        WholeCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", {"acl": "x"})


# --- damage


def test_a_truncated_checkpoint_is_refused_wherever_it_ends() -> None:
    content = written(checkpoint())
    generator = random.Random(0)
    near = {1, 2, 21, 22, 23, len(content) - 1, len(content)}
    missing = near | {generator.randrange(1, len(content)) for _ in range(100)}
    for number in missing:
        with pytest.raises(DamagedCheckpoint, match=r"some\.ckpt"):
            read(content[: len(content) - number])


def test_a_flipped_bit_anywhere_is_noticed_or_harmless() -> None:
    content = written(checkpoint())
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        at_end = range(8 * archive.start_dir, 8 * len(content), 7)
    num_noticed = 0
    for bit in (*random.Random(2).sample(range(8 * len(content)), 300), *at_end):
        try:
            assert same(read(flipped(content, bit)), checkpoint()), bit
        except DamagedCheckpoint:
            num_noticed += 1
    assert num_noticed > 300


def test_a_flipped_bit_of_a_tensor_is_noticed() -> None:
    content = written(checkpoint())
    begin = content.index(torch.full((300,), 1.0).numpy().tobytes())
    for bit in random.Random(1).sample(range(8 * 1200), 50):
        with pytest.raises(DamagedCheckpoint, match=r"CRC-32 of record .*data/0"):
            read(flipped(content, 8 * begin + bit))


def test_a_record_that_is_marked_as_a_folder_is_refused() -> None:
    content = written(checkpoint())
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        at = content.index(b"archive/data/0", archive.start_dir) - 46 + 38
    with pytest.raises(DamagedCheckpoint, match="data/0 is marked as a folder"):
        read(flipped(content, 8 * at + 4))


def test_bytes_that_are_no_checkpoint_are_refused() -> None:
    for content in NO_CHECKPOINTS:
        for reads in (read, check):
            with pytest.raises(DamagedCheckpoint, match=r"some\.ckpt"):
                reads(content)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "it holds nothing: "),
        (bytes(4096), "it holds nothing: "),
        (b"<html>" * 9, "it begins with b'<html><html><html><html>': "),
        (old_format(), "it begins with b'"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_described(content: bytes, what: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=re.escape(what)):
        read(content)


# --- the step of a file


def step_of(value: Any, folder: Path) -> int | None:
    (folder / "a.ckpt").write_bytes(written(value))
    return step_in_file(str(folder / "a.ckpt"))


def test_the_step_is_read_without_tensors_and_without_the_classes_of_the_file(
    tmp_path: Path,
) -> None:
    value = {
        **checkpoint(),
        "global_step": 7,
        "optimizer_states": [{"state": {0: torch.zeros(3)}}],
        "hyper_parameters": Namespace(lr=1.0, path=Path("a"), names={"b"}),
        "callbacks": {Path("key"): [Trap(), Trap.Within()]},
    }
    assert step_of(value, tmp_path) == 7
    assert Trap.num_sprung == 0


class Trap:
    """Runs when it is unpickled as what it is."""

    num_sprung = 0

    class Within:
        """A pickle names it by the class that it is in."""

    def __reduce__(self) -> Any:
        return Trap.spring, ()

    @staticmethod
    def spring() -> None:
        Trap.num_sprung += 1


def test_what_no_training_goes_on_from_has_no_step(tmp_path: Path) -> None:
    weights_alone = {**checkpoint(), "global_step": 7}
    assert step_of(weights_alone, tmp_path) is None
    for content in ([1], {"optimizer_states": [], "global_step": "7"}):
        assert step_of(content, tmp_path) is None
