"""A disk of a few pages, which a test may fill.

It is a file system in memory, mounted where only a forked process sees it.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import Outcome, forked

# Of <sched.h> and <sys/mount.h>.
_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_RECURSIVE, _PRIVATE = 1 << 14, 1 << 18


def on_a_small_disk(
    folder: Path, action: Callable[[], object], size: str = "64k"
) -> Outcome:
    """How an action ends in a process for which a folder is such a disk.

    The test is skipped where the system mounts nothing for it.
    """
    folder.mkdir(exist_ok=True)

    def inside(_: int) -> str:
        try:
            _mount(folder, size)
        except OSError as error:
            return f"no disk: {error}"
        action()
        return ""

    [outcome] = forked(1, inside)
    if str(outcome.value).startswith("no disk"):
        pytest.skip(outcome.value)
    return outcome


def _mount(folder: Path, size: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: bytes | int | None) -> None:
        if getattr(library, name)(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)

    call("unshare", _NEW_MOUNTS | (_NEW_USER if os.getuid() else 0))
    call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
    options = f"size={size}".encode()
    call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options)
