"""A save whose error may pass is tried again, for a bounded time."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_adpsgd.strategy.checkpoints import io as checkpoint_io
from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO

MAY_PASS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT]


def checkpoint(number: int) -> dict[str, Any]:
    return {"number": number, "weights": torch.full((300,), float(number))}


def number_in(path: Path) -> int:
    return WholeCheckpointIO().load_checkpoint(path)["number"]


class Disk:
    """Fails some times with an error, then works; its pauses take no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, left: int) -> None:
        self.number, self.left, self.now = number, left, 0.0
        self.pauses: list[float] = []
        self._write = checkpoint_io.write_checkpoint
        monkeypatch.setattr(checkpoint_io, "write_checkpoint", self.write)
        monkeypatch.setattr(checkpoint_io.time, "sleep", self.sleep)
        monkeypatch.setattr(checkpoint_io.time, "monotonic", lambda: self.now)

    def write(self, value: Any, file: Any) -> None:
        if self.left:
            file.write(b"half of it")
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        self._write(value, file)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.mark.parametrize("number", MAY_PASS)
def test_a_save_whose_error_passes_is_tried_again_and_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path, disk = tmp_path / "a.ckpt", Disk(monkeypatch, number, 4)
    with pytest.warns(UserWarning, match=r"a\.ckpt could not be written") as record:
        WholeCheckpointIO().save_checkpoint(checkpoint(1), path)
    assert number_in(path) == 1
    assert list(tmp_path.iterdir()) == [path]
    assert disk.pauses == [1, 2, 4, 8]
    assert len([w for w in record if "next attempt" in str(w.message)]) == 4


def test_a_save_whose_error_does_not_pass_ends_after_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plugin = tmp_path / "a.ckpt", WholeCheckpointIO(patience_s=100)
    plugin.save_checkpoint(checkpoint(1), path)
    disk = Disk(monkeypatch, errno.ENOSPC, 1000)
    with (
        pytest.warns(UserWarning, match="next attempt"),
        pytest.raises(OSError, match=r"a\.ckpt could not be written \(No space left"),
    ):
        plugin.save_checkpoint(checkpoint(2), path)
    assert sum(disk.pauses) == 100
    assert max(disk.pauses) == 30
    assert number_in(path) == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EFBIG])
def test_an_error_that_cannot_pass_is_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk = Disk(monkeypatch, number, 1)
    with pytest.raises(OSError, match=os.strerror(number)):
        WholeCheckpointIO().save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    assert disk.pauses == []


def test_an_old_checkpoint_that_cannot_be_removed_at_once_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plugin = tmp_path / "a.ckpt", WholeCheckpointIO()
    plugin.save_checkpoint(checkpoint(1), path)
    disk, remove = Disk(monkeypatch, errno.EIO, 0), TorchCheckpointIO.remove_checkpoint

    def fails_once(self: Any, path: Any) -> None:
        if not disk.pauses:
            raise OSError(errno.EIO, "Input/output error")
        remove(self, path)

    monkeypatch.setattr(TorchCheckpointIO, "remove_checkpoint", fails_once)
    with pytest.warns(UserWarning, match=r"a\.ckpt could not be removed"):
        plugin.remove_checkpoint(path)
    assert not path.exists()
