"""Files that are never seen half written."""

import errno
import fcntl
import hashlib
import io
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar
from uuid import uuid4

_UNFINISHED = ".unfinished"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ABANDONED_S = 24 * 3600.0
"""After so long without a write, a file whose lock is not known here is a dead one."""

_MAY_PASS = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0

_Result = TypeVar("_Result")


@contextmanager
def written_whole(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Opens a UTF-8 text file as `bytes_written_whole` does; CSV needs `newline=""`."""
    with bytes_written_whole(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline=newline)
        try:
            yield text
        finally:
            text.detach()


@contextmanager
def bytes_written_whole(path: Path) -> Iterator[BinaryIO]:
    """Opens a binary file that becomes `path` at the end, and is then on the disk.

    After an error, a kill or a power failure at any point, `path` is the old file or
    the new one, never a partial file and never missing. The next call for any file in
    the folder removes what a kill has left there. Several processes may write the same
    file; the last one wins.

    Args:
        path: file to write; its folder is created if missing.

    Raises:
        OSError: The disk is full, or the folder is not writable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    file = _open_locked(path)
    unfinished = Path(file.name)
    try:
        with file:
            yield file
            file.flush()
            # Before the new name: a name may reach the disk sooner than the bytes.
            os.fsync(file.fileno())
            os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def remove_leftovers(folder: Path) -> list[Path]:
    """Removes the unfinished files of writers that were killed.

    A writer holds a lock on its file, which the system releases when the process dies.
    On shared file systems, a lock may be visible only to its own host, or to no process
    at all. So the file's name contains the host, the mount and the process of its
    writer. On that host it is removed when the process is gone and holds no lock. Files
    of other hosts are removed when they have not been written to for a day.

    Returns the removed files.
    """
    left = list(folder.glob(f".*{_UNFINISHED}"))
    return [path for path in left if _removed_if_left(path)]


def persist(action: Callable[[], _Result], patience_s: float) -> _Result:
    """Retries an action on a file while its error may pass.

    Errors that may pass are a full disk, an input or output error and an unreachable
    server. The pause between two attempts doubles, up to half a minute. Each failed
    attempt logs a warning.

    Args:
        action: function to call; it must be safe to call it twice.
        patience_s: seconds for which it is retried.

    Raises:
        OSError: The last error, after that time; an error that cannot pass, at once.
    """
    end, pause = time.monotonic() + patience_s, _FIRST_PAUSE_S
    while True:
        try:
            return action()
        except OSError as error:
            left = end - time.monotonic()
            if error.errno not in _MAY_PASS or left <= 0:
                raise
            pause = min(pause, left)
            warnings.warn(
                f"{error}. The next attempt is in {pause:.0f} s; for {left:.0f} s more "
                "this does not end the training",
                stacklevel=2,
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, whole or not at all."""
    with written_whole(path) as file:
        json.dump(value, file, indent=1)


def _open_locked(path: Path) -> BinaryIO:
    while True:
        owner = _lock_domain(path.parent)
        number = f"{os.getpid()}.{uuid4().hex[:8]}"
        name = f".{path.name}.{owner}.{number}{_UNFINISHED}"
        file = path.with_name(name).open("xb")
        with suppress(OSError):  # not every file system knows locks
            fcntl.flock(file, fcntl.LOCK_EX)
        # Another process may have removed it as a leftover between the two.
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _removed_if_left(path: Path) -> bool:
    owner, pid = path.name.rsplit(".", 4)[1:3]
    try:
        with path.open("rb") as file:
            if owner == _lock_domain(path.parent) and not _is_running(pid):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            elif not _is_abandoned(path):
                return False
            path.unlink()
    except (OSError, ValueError):  # in use, gone meanwhile, or no locks there
        return False
    return True


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True


def _lock_domain(folder: Path) -> str:
    """A text that is equal where one kernel keeps a folder's locks through one mount.

    Two mounts of one remote folder on a host may keep separate locks. Their devices
    have different numbers.
    """
    text = f"{boot_id()} {os.stat(folder).st_dev}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def boot_id() -> str:
    """The identifier of this run of the kernel, or the host's name if it has none."""
    # Host names are often equal among containers.
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return socket.gethostname()


def _is_abandoned(path: Path) -> bool:
    """Whether a file is abandoned, by its file system's clock, as hosts' may differ."""
    with _open_locked(path.with_name("clock")) as probe:
        try:
            now = os.fstat(probe.fileno()).st_mtime
            return now - path.stat().st_mtime > _ABANDONED_S
        finally:
            os.unlink(probe.name)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse it
            os.fsync(number)
    finally:
        os.close(number)
