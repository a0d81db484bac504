"""An array of rows in several files of bounded size, read as one.

`frames.json` has the sizes; `frames.0000.bin`, `frames.0001.bin` and so on hold
consecutive rows without headers. All files but the last have the same number of rows,
chosen so that a file is a multiple of any system's page size. So the files can be
mapped one after the other into contiguous addresses. To a reader they are one array,
and a batch is gathered from all of them in one operation. They are opened when the
array is first used, and read only on access.

    address   |<- frames.0000.bin ->|<- frames.0001.bin ->|<- frames.0002.bin
    row       0                     rows_per_shard        2 * rows_per_shard
"""

import ctypes
import json
import math
import mmap
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_adpsgd.files import write_json

SHARD_BYTES = 1 << 30
PLAN = "frames.json"
_PAGE = 1 << 16  # a multiple of the pages of all systems
_MAP_FIXED = 0x10  # alike on Linux and macOS; Python does not name it
_FAILED = ctypes.c_void_p(-1).value


class ShardError(ValueError):
    """Shards cannot be used; the message names the file."""


class Shards(NamedTuple):
    """The division of rows into files.

    Attributes:
        num_rows: Number of rows of all files together.
        dims: Number of values in a row.
        dtype: Type of a value, as numpy names it.
        rows_per_shard: Number of rows of each file but the last.
    """

    num_rows: int
    dims: int
    dtype: str
    rows_per_shard: int

    @classmethod
    def of(
        cls, num_rows: int, dims: int, dtype: np.dtype, most_bytes: int = SHARD_BYTES
    ) -> "Shards":
        """Makes files of at most `most_bytes`, or the few pages of whole rows."""
        row_bytes = dims * dtype.itemsize
        step = _PAGE // math.gcd(_PAGE, row_bytes)
        rows_per_shard = max(1, most_bytes // (row_bytes * step)) * step
        return cls(num_rows, dims, dtype.name, rows_per_shard)

    @property
    def row_bytes(self) -> int:
        """The number of bytes of a row."""
        return self.dims * np.dtype(self.dtype).itemsize

    @property
    def num_shards(self) -> int:
        """The number of files."""
        return -(-self.num_rows // self.rows_per_shard)

    def path(self, folder: Path, number: int) -> Path:
        """The path of one file."""
        return folder / f"frames.{number:04d}.bin"

    def size(self, number: int) -> int:
        """The number of bytes of one file."""
        before = number * self.rows_per_shard
        return min(self.rows_per_shard, self.num_rows - before) * self.row_bytes

    def lay_out(self, folder: Path) -> None:
        """Creates the files, filled with zeros; overwrites existing ones."""
        for number in range(self.num_shards):
            with self.path(folder, number).open("wb") as file:
                file.truncate(self.size(number))

    def put(self, folder: Path, start: int, rows: np.ndarray) -> None:
        """Writes rows [rows, dims] from `start` on, into one file or several."""
        end = start + len(rows)
        for number in range(start // self.rows_per_shard, self.num_shards):
            first = number * self.rows_per_shard
            low, high = max(start, first), min(end, first + self.rows_per_shard)
            if low >= high:
                break
            some = rows[low - start : high - start].astype(self.dtype)
            write_rows(self.path(folder, number), 0, low - first, some)

    def check(self, folder: Path) -> None:
        """Compares the files' sizes with the expected ones.

        Raises:
            ShardError: A file is missing, truncated or too long.
        """
        for number in range(self.num_shards):
            path, expected = self.path(folder, number), self.size(number)
            try:
                found = path.stat().st_size
            except OSError as error:
                raise ShardError(
                    f"{path}: shard {number} of {self.num_shards} cannot be read: "
                    f"{error.strerror}; restore it, or make the features again"
                ) from error
            if found != expected:
                raise ShardError(
                    f"{path}: shard {number} of {self.num_shards} is broken or "
                    f"truncated: expected {expected} bytes, found {found}; "
                    "restore it, or make the features again"
                )

    def mapped(self, folder: Path) -> mmap.mmap:
        """The bytes of all files, mapped contiguously for reading.

        Raises:
            ShardError: A file cannot be opened or mapped.
        """
        # Only addresses: the system keeps no memory for them. The files come in their
        # place, and go with them when Python frees the mapping.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        room = mmap.mmap(-1, self.num_rows * self.row_bytes, flags, mmap.PROT_READ)
        begin = np.frombuffer(room, np.uint8).ctypes.data
        for number in range(self.num_shards):
            before = number * self.rows_per_shard * self.row_bytes
            _map_at(begin + before, self.size(number), self.path(folder, number))
        return room


def write_plan(path: Path, shards: Shards) -> None:
    """Writes the sizes, whole or not at all."""
    write_json(path, shards._asdict())


def read_plan(path: Path) -> Shards:
    """Reads a file of `write_plan`.

    Raises:
        ShardError: The file is damaged, or describes files that this system cannot map.
    """
    try:
        shards = Shards(**json.loads(path.read_text(encoding="utf-8")))
        page = shards.rows_per_shard * shards.row_bytes % mmap.ALLOCATIONGRANULARITY
        usable = shards.num_rows > 0 and shards.rows_per_shard > 0 and page == 0
    except (ValueError, TypeError) as error:
        raise ShardError(f"{path}: no sizes of shards: {error}") from error
    if not usable:
        raise ShardError(
            f"{path}: `num_rows` must be above 0 and a shard a multiple of "
            f"{mmap.ALLOCATIONGRANULARITY} bytes, got {shards}"
        )
    return shards


def _map_at(address: int, size: int, path: Path) -> None:
    try:
        opened = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ShardError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        found = _system_mmap()(
            address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, opened, 0
        )
    finally:
        os.close(opened)
    if found == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise ShardError(f"{path}: {size} bytes cannot be mapped: {reason}")


@cache
def _system_mmap() -> Any:
    """The C library's `mmap`: Python's own chooses the address itself."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    integers = ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, *integers
    function.restype = ctypes.c_void_p
    return function


def write_rows(path: Path, offset: int, first: int, rows: np.ndarray) -> None:
    """Writes rows [rows, dims] into an existing file.

    It does not use a mapping: if two machines write one page, a network file system
    keeps only one version.

    Args:
        path: File that holds the array.
        offset: Number of bytes before the first row.
        first: Index of the first row to write.
        rows: Rows to write, in the dtype of the array.

    Raises:
        OSError: The disk is full, or the file cannot be written; it names the file.
    """
    try:
        with path.open("r+b") as file:
            file.seek(offset + first * rows.dtype.itemsize * rows.shape[1])
            file.write(np.ascontiguousarray(rows).tobytes())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
