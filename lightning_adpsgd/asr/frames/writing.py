"""Writes frames whose number is known in advance, in any order, from any process.

The store gets its final name when it is complete; `store` reads it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib.format import open_memmap

from lightning_adpsgd.asr.frames.shards import (
    PLAN,
    SHARD_BYTES,
    Shards,
    read_plan,
    write_plan,
    write_rows,
)
from lightning_adpsgd.files import bytes_written_whole

WHOLE = "frames.npy"
_PARTIAL = ".frames.partial.npy"
_PARTIAL_PLAN = f".{PLAN}.partial"


class FramePlace(NamedTuple):
    """The place of one utterance in an unfinished array; other processes may fill it.

    Attributes:
        folder: Folder of the unfinished array.
        shards: Division of the array into files; None if one file holds it.
        name: The utterance.
        start: Its first frame in the array.
        end: The frame after its last one.
        dims: Values per frame.
    """

    folder: Path
    shards: Shards | None
    name: str
    start: int
    end: int
    dims: int

    def put(self, frames: np.ndarray) -> None:
        """Writes the frames.

        Raises:
            ValueError: The number of frames is not the announced one, or a value is
                non-finite in the type of the array.
        """
        shape = (self.end - self.start, self.dims)
        if frames.shape != shape:
            raise ValueError(
                f"{self.name}: expected frames {shape}, got {frames.shape}"
            )
        if self.shards is None:
            path = self.folder / _PARTIAL
            array: Any = np.load(path, mmap_mode="r")
            rows = self._stored(frames, array.dtype)
            write_rows(path, array.offset, self.start, rows)
        else:
            rows = self._stored(frames, np.dtype(self.shards.dtype))
            self.shards.put(self.folder, self.start, rows)

    def _stored(self, frames: np.ndarray, dtype: np.dtype) -> np.ndarray:
        with np.errstate(over="ignore"):  # float16 ends at 65,504
            rows = frames.astype(dtype)
        if not np.isfinite(rows).all():
            raise ValueError(f"{self.name}: `frames` must be finite in {dtype.name}")
        return rows


class FrameWriter:
    """Writes a store whose size is known in advance, in any order.

    The store exists once `finish` has been called.

    Args:
        folder: Made if absent.
        ids: The utterances, in the order in which they lie in the array.
        lengths: Frames of each.
        dims: Values per frame.
        dtype: "float16" or "float32".
        shard_bytes: Size of the files over which a larger array is divided.

    Raises:
        ValueError: `ids` and `lengths` differ in length or are empty, or a length is
            below 1.
    """

    def __init__(
        self,
        folder: Path,
        ids: Sequence[str],
        lengths: Sequence[int],
        dims: int,
        dtype: str = "float16",
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if len(ids) == 0 or len(ids) != len(lengths):
            raise ValueError(
                f"`ids` and `lengths` must be of one length above 0, "
                f"got {len(ids)} and {len(lengths)}"
            )
        if min(lengths) < 1:
            name = ids[int(np.argmin(lengths))]
            raise ValueError(
                f"every length must be at least 1, got {min(lengths)} of {name}"
            )
        ends = np.cumsum(np.asarray(lengths, np.int64))
        self.folder = folder
        self.spans = np.stack([ends - np.asarray(lengths), ends], axis=1)
        self._ids = np.asarray(ids, dtype=np.str_)
        self._shape = (int(ends[-1]), dims)
        self._dtype = np.dtype(dtype)
        shards = Shards.of(*self._shape, self._dtype, shard_bytes)
        self._shards = shards if shards.num_shards > 1 else None

    def create(self) -> None:
        """Lays out the array on disk, unless an interrupted attempt left it there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.is_begun():
            return
        if self._shards is None:
            partial = self.folder / _PARTIAL
            open_memmap(partial, "w+", self._dtype, self._shape).flush()
        else:
            (self.folder / PLAN).unlink(missing_ok=True)
            self._shards.lay_out(self.folder)
            write_plan(self.folder / _PARTIAL_PLAN, self._shards)

    def is_begun(self) -> bool:
        """Whether an unfinished array of the right shape is there."""
        try:
            if self._shards is not None:
                self._shards.check(self.folder)
                return read_plan(self.folder / _PARTIAL_PLAN) == self._shards
            found = np.load(self.folder / _PARTIAL, mmap_mode="r")
        except (EOFError, FileNotFoundError, ValueError):
            return False  # it is being laid out, or was interrupted while it was
        return found.shape == self._shape and found.dtype == self._dtype

    def place(self, position: int) -> FramePlace:
        """The place of the utterance at `position` of `ids`."""
        start, end = (int(frame) for frame in self.spans[position])
        name = str(self._ids[position])
        return FramePlace(self.folder, self._shards, name, start, end, self._shape[1])

    def put(self, position: int, frames: np.ndarray) -> None:
        """Writes the frames of the utterance at `position` of `ids`."""
        self.place(position).put(frames)

    def sync(self) -> None:
        """Waits until the frames that this machine has written are on the disk.

        Raises:
            OSError: They cannot get there; it names the file.
        """
        partial = [self.folder / _PARTIAL]
        if (shards := self._shards) is not None:
            partial = [shards.path(self.folder, n) for n in range(shards.num_shards)]
        for path in partial:
            with path.open("rb") as file:
                try:
                    os.fsync(file.fileno())
                except OSError as error:
                    error.filename = str(path)
                    raise

    def finish(self, present: Sequence[bool] | None = None) -> None:
        """Publishes the store.

        Args:
            present: Mask of the utterances that were written; the frames of
                others remain as gaps. None for all.
        """
        kept = np.ones(len(self._ids), bool) if present is None else np.array(present)
        save_array(self.folder / "ids.npy", self._ids[kept])
        save_array(self.folder / "spans.npy", self.spans[kept])
        if self._shards is None:
            (self.folder / PLAN).unlink(missing_ok=True)
            os.replace(self.folder / _PARTIAL, self.folder / WHOLE)
        else:
            os.replace(self.folder / _PARTIAL_PLAN, self.folder / PLAN)
            (self.folder / WHOLE).unlink(missing_ok=True)


def is_stored(folder: Path) -> bool:
    """Whether a `FrameWriter` has finished this store."""
    return (folder / WHOLE).exists() or (folder / PLAN).exists()


class _Sink:
    """What numpy takes for no file of the system.

    Into such a file it writes by itself, and of a full disk says only how much it
    wrote.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, content: bytes) -> object:
        return self._file.write(content)


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes an array, whole or not at all, also if several machines write it.

    Raises:
        OSError: The disk is full, or the folder is not writable; it names the file.
    """
    with bytes_written_whole(path) as file:
        np.save(_Sink(file), array)
