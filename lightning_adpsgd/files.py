"""Files that no reader ever finds half written."""

import hashlib
import io
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from uuid import uuid4

_UNFINISHED, _MOST_LETTERS = ".unfinished", 40
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
_ABANDONED_S = 24 * 3600.0
"""The time without a write after which a file of an unknown process is abandoned."""


def printable(text: str) -> str:
    """A text that UTF-8 takes: bytes of a file's name that are no text are escaped."""
    return text.encode(errors="backslashreplace").decode()


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
        OSError: The disk is full, or the folder is not writable; it names a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    number = f"{os.getpid()}.{uuid4().hex[:8]}"
    # A file may have a name as long as the disk allows, which has no room for more.
    begin = path.name[:_MOST_LETTERS]
    name = f".{begin}.{_pid_namespace()}.{number}{_UNFINISHED}"
    unfinished = path.with_name(name)
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            # Before the new name: a name may reach the disk sooner than the bytes.
            os.fsync(file.fileno())
            os.replace(unfinished, path)
    except BaseException as error:
        # It may not exist, or the disk refuses this too: the first error says why.
        with suppress(OSError):
            unfinished.unlink()
        # With a file name, an error without a number would no longer show its message.
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Removes the unfinished files of writers that were killed.

    The name of such a file says which process writes it, on which host or in which
    container. There the file is removed once that process is gone. Elsewhere it is
    removed if nobody has written to it for a day.
    """
    for path in list(folder.glob(f".*{_UNFINISHED}")):
        # Another process has removed the file, or its name has another form.
        with suppress(OSError, ValueError):
            namespace, pid = path.name.rsplit(".", 4)[1:3]
            age_s = time.time() - path.stat().st_mtime
            is_dead = namespace == _pid_namespace() and not _is_running(pid)
            if is_dead or age_s > _ABANDONED_S:
                path.unlink()


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, whole or not at all."""
    with written_whole(path) as file:
        json.dump(value, file, indent=1)


def sync_folder(folder: Path) -> None:
    """Writes the file names of a folder to the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse it
            os.fsync(number)
    finally:
        os.close(number)


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        pass
    return True


@cache
def _pid_namespace() -> str:
    """Identifies the PID namespace of this boot; a container has its own."""
    text = boot_id()
    with suppress(OSError):
        text += os.readlink(_NAMESPACE)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def boot_id() -> str:
    """The identifier of this run of the kernel, or the host's name if it has none."""
    # Host names are often equal among containers.
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return socket.gethostname()
