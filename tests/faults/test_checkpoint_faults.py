"""Checkpoints while processes are killed, disks are full, and bits are flipped."""

import errno
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd import files
from lightning_adpsgd.strategy.checkpoints import io as checkpoint_io
from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO
from lightning_adpsgd.strategy.checkpoints.saving import BackgroundCheckpointIO
from tests.helpers import PATIENCE_S, forked
from tests.learners import Linear, gossip, loader, trainer_of
from tests.strategy.checkpoints.test_failing_disks import Disk

NUM_WEIGHTS = 300_000


def checkpoint(number: int) -> dict[str, Any]:
    """Whose every number says which it is."""
    return {"number": number, "weights": torch.full((NUM_WEIGHTS,), float(number))}


def killed(action: Callable[[], Any]) -> None:
    """Runs an action in a process of its own, which must end by kill -9."""
    pid = os.fork()
    if not pid:
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def kill_this() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def number_in(path: Path) -> int:
    """Of the checkpoint, which must be whole."""
    loaded = WholeCheckpointIO().load_checkpoint(path)
    assert loaded["weights"].eq(loaded["number"]).all()
    return loaded["number"]


# --- kill -9


def save_on(path: Path, first: int, said: int) -> None:
    """Saves one checkpoint after another, and says the number of each that is saved."""
    plugin, number = WholeCheckpointIO(), first
    while True:
        plugin.save_checkpoint(checkpoint(number), path)
        os.write(said, number.to_bytes(4, "little"))
        number += 1


def life(path: Path, first: int, moment_s: float) -> int:
    """Of a process that saves, from its first save to a moment after; what it said."""
    listen, say = os.pipe()
    pid = os.fork()
    if not pid:
        save_on(path, first, say)
    os.close(say)
    with os.fdopen(listen, "rb") as pipe:
        said = pipe.read(4)
        time.sleep(moment_s)  # no event says where in a save it is: that is the point
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        said += pipe.read()
    return int.from_bytes(said[-4:], "little")


def test_a_kill_at_30_moments_of_a_save_always_leaves_a_whole_file(
    tmp_path: Path,
) -> None:
    path, generator, first = tmp_path / "a.ckpt", random.Random(0), 0
    for _ in range(30):
        said = life(path, first, generator.uniform(0.0, 0.02))
        # What was said to be saved is there, or what came after it.
        assert said <= number_in(path) <= said + 1
        assert len(list(tmp_path.iterdir())) <= 2
        first = said + 2
    WholeCheckpointIO().save_checkpoint(checkpoint(first), path)
    assert list(tmp_path.iterdir()) == [path]


class DiesAfter:
    """Kills the process when so many bytes were written."""

    def __init__(self, file: Any, num_bytes: int) -> None:
        self._file, self._left = file, num_bytes

    def write(self, data: Any) -> int:
        done = self._file.write(data[: self._left])
        self._left -= done
        if self._left == 0:
            self._file.flush()
            kill_this()
        return done


def test_a_kill_after_any_number_of_bytes_leaves_the_old_file(tmp_path: Path) -> None:
    path, plugin = tmp_path / "a.ckpt", WholeCheckpointIO()
    plugin.save_checkpoint(checkpoint(1), path)
    size = path.stat().st_size
    write = checkpoint_io.write_checkpoint

    def save(num_bytes: int) -> None:
        def write_part(value: Any, file: Any) -> None:
            dies: Any = DiesAfter(file, num_bytes)
            write(value, dies)

        checkpoint_io.write_checkpoint = write_part
        plugin.save_checkpoint(checkpoint(2), path)

    generator = random.Random(1)
    for num_bytes in (1, size, *(generator.randrange(1, size) for _ in range(12))):
        killed(lambda num_bytes=num_bytes: save(num_bytes))
        assert number_in(path) == 1
    assert len(list(tmp_path.iterdir())) == 2  # what the last one left
    plugin.save_checkpoint(checkpoint(3), path)
    assert list(tmp_path.iterdir()) == [path]
    assert number_in(path) == 3


@pytest.mark.parametrize(
    ("module", "name", "saved"),
    [
        ("os", "fsync", 1),  # before the bytes are on the disk
        ("os", "replace", 1),  # before the new name
        ("files", "sync_folder", 2),  # after it
    ],
)
def test_a_kill_between_any_two_moves_leaves_the_old_file_or_the_new(
    tmp_path: Path, module: str, name: str, saved: int
) -> None:
    path, plugin = tmp_path / "a.ckpt", WholeCheckpointIO()
    plugin.save_checkpoint(checkpoint(1), path)

    def save() -> None:
        owner = {"os": os, "files": files}[module]
        setattr(owner, name, lambda *_: kill_this())
        plugin.save_checkpoint(checkpoint(2), path)

    killed(save)
    assert number_in(path) == saved
    plugin.save_checkpoint(checkpoint(3), path)
    assert list(tmp_path.iterdir()) == [path]


# --- a full disk


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond; the error is that of a full disk but for its name."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_else(
    tmp_path: Path,
) -> None:
    path, plugin = tmp_path / "a.ckpt", WholeCheckpointIO()
    plugin.save_checkpoint(checkpoint(1), path)
    size = path.stat().st_size
    for limit in (0, 100, size // 2, size - 1):
        with (
            largest_file(limit),
            pytest.raises(OSError, match=r"a\.ckpt could not be written .*File too"),
        ):
            plugin.save_checkpoint(checkpoint(2), path)
        assert list(tmp_path.iterdir()) == [path]
        assert number_in(path) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_small_file_system_that_is_full(tmp_path: Path) -> None:
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs"]
    if subprocess.run(["mount", *options, str(tmp_path)], check=False).returncode:
        pytest.skip("this root may not mount")
    try:
        path, plugin = tmp_path / "a.ckpt", WholeCheckpointIO(patience_s=0)
        plugin.save_checkpoint(checkpoint(1), path)  # 1.2 MB
        for _ in range(2):
            with pytest.raises(OSError, match="No space left on device"):
                plugin.save_checkpoint(checkpoint(2), path)
            assert list(tmp_path.iterdir()) == [path]
            assert number_in(path) == 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# --- in a training


class FallsAt(Linear):
    """Does something in the middle of a step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        super().__init__()
        self.step, self.action = step, action

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.step:
            self.action()
        return super().training_step(batch, batch_idx)


def train(folder: Path, module: Linear, resumed: bool = False) -> int:
    """Saves each step; returns the step of the start."""
    saver = ModelCheckpoint(
        folder, every_n_train_steps=1, save_top_k=1, save_last=True, filename="{step}"
    )
    begun: list[int] = []

    class Begins(pl.Callback):
        @override
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            begun.append(trainer.global_step)

    trainer = trainer_of(
        gossip(), 1, callbacks=[saver, Begins()], enable_checkpointing=True
    )
    trainer.fit(module, loader(12), ckpt_path="last" if resumed else None)
    return begun[0]


def test_a_training_that_is_killed_goes_on_from_its_last_checkpoint(
    tmp_path: Path,
) -> None:
    killed(lambda: train(tmp_path, FallsAt(7, kill_this)))

    def resume(rank: int) -> int:
        return train(tmp_path, Linear(), resumed=True)

    (outcome,) = forked(1, resume)
    # That of step 7 may have been on its way.
    assert outcome.value in (6, 7)
    assert not list(tmp_path.glob(".*"))


def test_sigterm_waits_for_the_checkpoint_that_is_on_its_way(tmp_path: Path) -> None:
    written = tmp_path / "last.ckpt"

    class Slow(Linear):
        """Its checkpoints take until the signal has come."""

        @override
        def on_train_start(self) -> None:
            begun, signalled = threading.Event(), threading.Event()
            files: Any = WholeCheckpointIO()
            save = files.save_checkpoint

            def slowly(*arguments: Any, **options: Any) -> None:
                begun.set()
                assert signalled.wait(PATIENCE_S)
                save(*arguments, **options)

            files.save_checkpoint = slowly
            self.trainer.strategy.checkpoint_io = BackgroundCheckpointIO(files)
            self.begun, self.signalled = begun, signalled

        @override
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                assert self.begun.wait(PATIENCE_S)
                assert not written.exists()
                os.kill(os.getpid(), signal.SIGTERM)
                self.signalled.set()
            return super().training_step(batch, batch_idx)

    def learner(rank: int) -> None:
        saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_last=True)
        saver.save_top_k = 0
        trainer = trainer_of(gossip(), 1, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(Slow(), loader(12))

    forked(1, learner)
    loaded = torch.load(written, weights_only=True)
    assert loaded["global_step"] == 3


def test_training_goes_on_beside_a_disk_that_fails_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, errno.EIO, 3)
    with pytest.warns(UserWarning, match="next attempt"):
        train(tmp_path, Linear())
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 12
