"""Locks that keep each island's checkpoints in folders of its own.

Two islands that save into one folder would use the same file names, and each would
remove the other's files. So an island holds a lock in each of its checkpoint folders.
"""

import errno
import fcntl
from pathlib import Path
from typing import BinaryIO

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_adpsgd.strategy.compatibility import callbacks_of

_NAME = ".island.lock"
_TAKEN = errno.EACCES, errno.EAGAIN


def hold_folders(trainer: pl.Trainer) -> list[BinaryIO]:
    """Locks the folders of a Trainer's checkpoints; closing the files releases them.

    The locks belong to the process: loader workers do not inherit them, and the system
    releases them when the process dies. On a file system without locks, none is held.

    Raises:
        ValueError: Another process holds one of the locks.
    """
    savers = callbacks_of(trainer, ModelCheckpoint)
    folders = {str(saver.dirpath) for saver in savers if saver.dirpath}
    local = [Path(folder) for folder in sorted(folders) if "://" not in folder]
    held = map(_hold, local if trainer.is_global_zero else ())
    return [file for file in held if file is not None]


def _hold(folder: Path) -> BinaryIO | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _NAME).open("ab")
    except OSError:  # the first save says what is wrong
        return None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in _TAKEN:
            raise ValueError(
                f"another super-learner saves its checkpoints into {folder}: give each "
                "island its own folder, with the `dirpath` of `ModelCheckpoint` or the "
                "Trainer's `default_root_dir`"
            ) from error
        return None
    return file
