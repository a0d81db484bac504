"""Checkpoints that are written whole or not at all, and checked when they are read.

This is the strategies' default; a `CheckpointIO` among the Trainer's `plugins` replaces
it. `format` describes the files, which torch and Lightning read without this package.
"""

import errno
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, final

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_adpsgd.files import bytes_written_whole
from lightning_adpsgd.strategy.checkpoints.format import (
    check_checkpoint,
    named,
    outline_of,
    read_checkpoint,
    write_checkpoint,
)
from lightning_adpsgd.strategy.checkpoints.sharded import META, check_folder

PATIENCE_S = 120.0
"""Seconds for which a save is retried while its error may be temporary."""

# A server that is away, mounted or at a URL, and one whose name is not known for now.
_AWAY = {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, socket.EAI_AGAIN}
_AWAY |= {errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE}
OF_NO_FILE = {errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT, *_AWAY}
"""Numbers of errors that may pass, and do not say that a file is damaged."""
_MAY_PASS = {errno.EIO, *OF_NO_FILE}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_LOOK_S = 1.0
"""Seconds after which a pause looks again whether the training ends."""


def flawed_loader(version: str = torch.__version__) -> str | None:
    """The known flaw of `weights_only` in a release of torch; None if there is none."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) >= (2, 10):
        return None
    return (
        f"torch {version} can run code of a crafted checkpoint even with "
        "`weights_only=True` (CVE-2026-24747): load only files whose origin you know, "
        "or install torch 2.10 or later"
    )


@final
class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a temporary file, syncs it and renames it; checks what it loads.

    On a local or mounted file system, the file of an earlier save stays intact until
    the new one is on the disk. Remote stores (`s3://` and the like) cannot rename, so
    there an object appears when its upload has ended.

    Args:
        patience_s: number of seconds, from 0 on, for which a save is retried while its
            error may be temporary: a full disk, an input or output error, an
            unreachable server.

    Raises:
        ValueError: `patience_s` is negative.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        if not patience_s >= 0:
            raise ValueError(f"`patience_s` must be at least 0, got {patience_s}")
        self._patience_s = patience_s
        self._ends_soon: Callable[[], bool] = bool  # never, until a strategy says

    def hurry_if(self, ends_soon: Callable[[], bool]) -> None:
        """Leaves a save one more attempt once training `ends_soon`; for any thread."""
        self._ends_soon = ends_soon

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint.

        Raises:
            OSError: The file cannot be written; the message names it, and the previous
                file is intact. A possibly temporary error is raised after `patience_s`.
        """
        if storage_options is not None:
            raise TypeError(
                f"`storage_options` must be None with {type(self).__name__}, got "
                f"{storage_options!r}: give the Trainer a CheckpointIO of your own"
            )
        self._persist(partial(_write, checkpoint, str(path)), path, "written")

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint if it exists; retries errors as a save does."""
        self._persist(partial(super().remove_checkpoint, path), path, "removed")

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads an intact checkpoint, by default onto the host and only plain data.

        Raises:
            FileNotFoundError: There is no checkpoint at `path`.
            IsADirectoryError: It is a folder of shards.
            DamagedCheckpoint: The file is damaged; the message says where.
            UnpicklingError: The file holds objects that can run code; the message names
                their classes.
        """
        if os.path.isdir(path):
            raise IsADirectoryError(
                f"checkpoint {path} is a folder of shards: resume it with "
                '`inside="model_parallel"`, or make one file of it with `python -m '
                f"lightning_adpsgd export {path} --out FILE`"
            )
        system, place = url_to_fs(str(path))
        if not system.exists(place):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        if (flaw := flawed_loader()) is not None:
            rank_zero_warn(flaw)
        with _opened(system, place) as file:
            return read_checkpoint(file, str(path), map_location or "cpu", weights_only)

    def _persist(self, action: Callable[[], None], path: Any, done: str) -> None:
        """Acts, and tries again while its error may be temporary."""
        end, pause = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            # Before the attempt, so that one follows when the training ends meanwhile.
            is_last = self._ends_soon()
            try:
                action()
                return
            except OSError as cause:
                error, left = named(cause, path, done), end - time.monotonic()
                if error.errno not in _MAY_PASS or left <= 0 or is_last:
                    raise error from cause
            pause = min(pause, left)
            warnings.warn(
                f"{error}. The next attempt is in {pause:.0f} s; for {left:.0f} s more "
                "this does not end the training",
                stacklevel=2,
            )
            self._pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _pause(self, seconds: float) -> None:
        # Not on an event, whose lock a signal handler may find held by its own thread.
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._ends_soon():
            time.sleep(min(left, _LOOK_S))


def check_file(path: str) -> None:
    """Checks a checkpoint; DamagedCheckpoint or OSError if it is not intact."""
    if os.path.isdir(path):
        check_folder(Path(path))
        return
    with _opened(*url_to_fs(str(path))) as file:
        check_checkpoint(file, path)


def step_in_file(path: str) -> int | None:
    """The step at which a training would resume; None without optimizer state."""
    place = str(Path(path, META)) if os.path.isdir(path) else path
    with _opened(*url_to_fs(place)) as file:
        content = outline_of(file)
    # A folder of shards keeps the state elsewhere, and the schedules here.
    if not {"optimizer_states", "lr_schedulers"} & content.keys():
        return None
    step = content.get("global_step")
    return step if isinstance(step, int) else None


@contextmanager
def _opened(system: Any, place: str) -> Iterator[BinaryIO]:
    """The file, or a local copy of a remote one, because not all servers can seek."""
    if isinstance(system, LocalFileSystem):
        if os.path.exists(place) and not os.path.isfile(place):
            # A pipe or a device would be read for ever.
            raise OSError(f"checkpoint {place} is not a regular file")
        with open(place, "rb") as file:
            yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        system.get_file(place, str(copy))
        with copy.open("rb") as file:
            yield file


def _write(checkpoint: Any, path: str) -> None:
    system, place = url_to_fs(path)
    if isinstance(system, LocalFileSystem):
        with bytes_written_whole(Path(place)) as file:
            write_checkpoint(checkpoint, file)
        return
    system.makedirs(system._parent(place), exist_ok=True)
    with system.transaction, system.open(place, "wb") as file:
        write_checkpoint(checkpoint, file)
