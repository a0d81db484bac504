"""Checkpoints that are written whole or not at all, and checked when they are read.

The default of the strategies; `plugins=[...]` of a Trainer puts another in its place.
What the files are is in `format`: torch and Lightning alone read them.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, final

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_adpsgd.files import bytes_written_whole
from lightning_adpsgd.strategy.checkpoints.format import (
    check_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from lightning_adpsgd.strategy.checkpoints.sharded import check_folder, is_folder


@final
class WholeCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary file, to the disk, then renames; checks what it loads.

    On a local or mounted file system the file of an earlier save stays as it was until
    the new one is on the disk. On a remote one (`s3://` and the like) nothing can be
    renamed: there an object appears when its upload has ended, as the store has it.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint.

        Raises:
            OSError: Names the file; the one that was there before is as it was.
            TypeError: There are storage options.
        """
        if storage_options is not None:
            raise TypeError(
                f"`storage_options` is not taken by {type(self).__name__}, got "
                f"{storage_options!r}: give the Trainer a CheckpointIO of your own"
            )
        system, place = url_to_fs(str(path))
        try:
            if isinstance(system, LocalFileSystem):
                with bytes_written_whole(Path(place)) as file:
                    write_checkpoint(checkpoint, file)
            else:
                _write_remote(checkpoint, system, place)
        except OSError as error:
            raise _named(error, path) from error

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a whole checkpoint, by default onto the host and plain data alone.

        Raises:
            FileNotFoundError: There is none.
            DamagedCheckpoint: Names the file and what is wrong with it.
            UnsafeCheckpoint: Names the objects that are refused.
        """
        if is_folder(path):
            raise IsADirectoryError(
                f"checkpoint {path} is a folder of shards: resume it with "
                '`inside="model_parallel"`, or make one file of it with `python -m '
                f"lightning_adpsgd export {path} --out FILE`"
            )
        system, place = url_to_fs(str(path))
        if not system.exists(place):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        allowed = True if weights_only is None else weights_only
        with _opened(system, place) as file:
            return read_checkpoint(file, str(path), map_location or "cpu", allowed)


def check_file(path: str) -> None:
    """Raises what is wrong with a checkpoint, and nothing if it is whole."""
    if is_folder(path):
        check_folder(Path(path))
        return
    with _opened(*url_to_fs(str(path))) as file:
        check_checkpoint(file, path)


@contextmanager
def _opened(system: Any, place: str) -> Iterator[BinaryIO]:
    """The file, or a copy if it is elsewhere: not all servers give parts of one."""
    if isinstance(system, LocalFileSystem):
        with open(place, "rb") as file:
            yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        system.get_file(place, str(copy))
        with copy.open("rb") as file:
            yield file


def _write_remote(checkpoint: Any, system: Any, path: str) -> None:
    system.makedirs(system._parent(path), exist_ok=True)
    with system.transaction, system.open(path, "wb") as file:
        write_checkpoint(checkpoint, file)


def _named(error: OSError, path: Any) -> OSError:
    what = error.strerror or str(error)
    message = f"checkpoint {path} could not be written ({what}); "
    message += "a file that was there before is as it was"
    return OSError(error.errno, message) if error.errno else OSError(message)
