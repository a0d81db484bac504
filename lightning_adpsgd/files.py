"""Files that are never seen half written."""

import fcntl
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from uuid import uuid4

_UNFINISHED = ".unfinished"


@contextmanager
def written_whole(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Does what `bytes_written_whole` does, for text in UTF-8.

    Args:
        path: file to write; its folder is made if there is none.
        newline: as for `open`; "" for CSV.
    """
    with bytes_written_whole(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline=newline)
        try:
            yield text
        finally:
            text.detach()


@contextmanager
def bytes_written_whole(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for bytes that becomes `path` at the end, and is then on the disk.

    After an error, a kill or a power failure at any point, `path` is the old file or
    the new one, never a part and never nothing. The next call for any file of the
    folder removes what a kill has left there. Several processes may write the same
    file; the last one stays.

    Args:
        path: file to write; its folder is made if there is none.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
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

    A writer holds a lock on its file. The system takes the lock from a dead process, on
    any machine.

    Returns:
        The files that were removed.
    """
    return [p for p in folder.glob(f".*{_UNFINISHED}") if _removed_if_left(p)]


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, whole or not at all."""
    with written_whole(path) as file:
        json.dump(value, file, indent=1)


def _open_locked(path: Path) -> BinaryIO:
    while True:
        name = f".{path.name}.{uuid4().hex[:8]}{_UNFINISHED}"
        file = path.with_name(name).open("xb")
        with suppress(OSError):  # not every file system knows locks
            fcntl.flock(file, fcntl.LOCK_EX)
        # Another process may have removed it as a leftover between the two.
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _removed_if_left(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:  # in use, gone meanwhile, or a file system without locks
        return False
    return True


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse it
            os.fsync(number)
    finally:
        os.close(number)
