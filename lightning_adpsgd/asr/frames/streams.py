"""Streams: features of a frame in addition to its log-mel energies.

There are two kinds, both aligned with the utterances of a `FrameStore`, in its order:

- a vector for each frame, such as fMLLR: a `FrameStore` with the same utterances;
- a vector for a longer stretch, such as an i-vector per conversation side or every ten
  frames: a `RowStore`. It is not stored once per frame, on disk or elsewhere: a chunk
  has the row of its first frame, and the model repeats it on its device.

A folder holds `fmllr/`, `ivector/`, or both. The papers' 260 inputs are 120 of log-mel
with differences, 40 of fMLLR and 100 of an i-vector, in this order.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from lightning_adpsgd.asr.frames.shards import write_rows
from lightning_adpsgd.asr.frames.store import FrameStore, StoreError, _mapped
from lightning_adpsgd.asr.frames.writing import save_array


class RowStore:
    """A vector for each stretch of an utterance, memory-mapped; pickled by its path.

    `rows.npy` is [rows, dims], `first.npy` int64 [utterances] the row at which each
    utterance begins, `period.npy` the frames of a row, or 0 if one row is for the whole
    utterance. Utterances may share rows, as those of one conversation side do.

    Args:
        folder: Folder from a finished `RowWriter`.

    Raises:
        StoreError: A file is missing or does not fit the others.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows = _mapped(folder / "rows.npy", 2)
        self._first = _mapped(folder / "first.npy", 1)
        self.period = int(_mapped(folder / "period.npy", 0))

    def __reduce__(self) -> tuple[type["RowStore"], tuple[Path]]:
        return RowStore, (self.folder,)

    def __len__(self) -> int:
        return len(self._first)

    @property
    def dims(self) -> int:
        """The number of values in a row."""
        return self._rows.shape[1]

    def at(self, positions: np.ndarray, frames: np.ndarray) -> Tensor:
        """A copy of the rows for one frame of each utterance, [utterances, dims]."""
        steps = frames // self.period if self.period else 0
        rows = self._first[positions] + steps
        return torch.from_numpy(np.take(self._rows, rows, axis=0))

    def along(self, position: int, num_frames: int) -> Tensor:
        """The rows of all frames of an utterance, [num_frames, dims]."""
        frames = np.arange(num_frames)
        return self.at(np.full(num_frames, position), frames)

    def check(self, lengths: np.ndarray) -> None:
        """Checks the rows against the utterances' lengths in frames.

        Raises:
            StoreError: The utterances differ, or rows are missing.
        """
        if len(self) != len(lengths):
            raise StoreError(
                f"{self.folder}: expected rows for {len(lengths)} utterances, there "
                f"are some for {len(self)}; adapt again"
            )
        steps = (np.asarray(lengths) - 1) // self.period if self.period else 0
        needed = int((self._first + steps).max()) + 1
        if needed > len(self._rows):
            raise StoreError(
                f"{self.folder}/rows.npy: expected {needed} rows, found "
                f"{len(self._rows)}; adapt again"
            )


class RowWriter:
    """Writes the rows of a `RowStore`, in any order; `finish` publishes the store.

    Args:
        folder: Folder of the store, made if absent.
        first: For each utterance of the base store, in its order, its first row.
        num_rows: Number of rows of all utterances.
        dims: Values of a row.
        period: Number of frames from one row to the next; 0 for one row per utterance.

    Raises:
        ValueError: `num_rows` or `dims` is below 1, or `period` is negative.
    """

    def __init__(
        self, folder: Path, first: np.ndarray, num_rows: int, dims: int, period: int
    ) -> None:
        if min(num_rows, dims) < 1 or period < 0:
            raise ValueError(
                "`num_rows` and `dims` must be at least 1 and `period` 0 or more, got "
                f"{num_rows}, {dims} and {period}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._first, self._period = np.asarray(first, np.int64), np.array(period)
        self._partial, self._shape = folder / ".rows.partial.npy", (num_rows, dims)
        # Laid out, and written otherwise: on a full disk, a write into a mapping ends
        # the process.
        laid = open_memmap(self._partial, "w+", np.float32, self._shape)
        self._offset = int(laid.offset)

    def put(self, row: int, values: np.ndarray) -> None:
        """Writes rows [rows, dims] from `row` on.

        Raises:
            ValueError: A value is not finite, or the rows do not fit in.
            OSError: The disk is full; it names the file.
        """
        with np.errstate(over="ignore"):  # what is beyond float32 is refused, too
            values = values.astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"{self.folder}: rows from {row} on must be finite")
        num_rows, dims = self._shape
        if values.shape[1:] != (dims,) or not 0 <= row <= num_rows - len(values):
            raise ValueError(
                f"{self.folder}: rows from {row} on must be of {dims} values and end "
                f"at row {num_rows}, got shape {list(values.shape)}"
            )
        write_rows(self._partial, self._offset, row, values)

    def finish(self) -> None:
        """Publishes the rows."""
        save_array(self.folder / "first.npy", self._first)
        save_array(self.folder / "period.npy", self._period)
        with self._partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(self._partial, self.folder / "rows.npy")


class Beside(NamedTuple):
    """The streams of a batch of chunks or of an utterance.

    Attributes:
        fmllr: [batch, time, dims] of chunks, [time, dims] of an utterance; no dims
            where there is no such stream.
        ivector: [batch, dims] of chunks, [time, dims] of an utterance.
    """

    fmllr: Tensor
    ivector: Tensor


class Streams:
    """The streams of one split, opened for the utterances of its store.

    Args:
        folder: Folder with `fmllr`, `ivector`, both or neither.
        store: The log-mel frames.

    Raises:
        StoreError: A stream has other utterances than the store, or other lengths.
    """

    def __init__(self, folder: Path, store: FrameStore) -> None:
        fmllr, ivector = folder / "fmllr", folder / "ivector"
        self.fmllr = FrameStore(fmllr) if fmllr.exists() else None
        self.ivector = RowStore(ivector) if ivector.exists() else None
        self._store = store
        if self.fmllr is not None:
            _check_utterances(self.fmllr, store)
        if self.ivector is not None:
            self.ivector.check(_lengths(store))

    @property
    def dims(self) -> int:
        """The number of values that the streams add to a frame."""
        return sum(s.dims for s in (self.fmllr, self.ivector) if s is not None)

    def chunks(
        self, positions: np.ndarray, starts: np.ndarray, num_frames: int
    ) -> Beside:
        """The streams of a batch of chunks; repeats the last frame beyond an utterance.

        Args:
            positions: Positions of the utterances in the store, [batch].
            starts: First frames, counted from the start of the utterance, [batch].
            num_frames: Number of frames of a chunk.
        """
        batch = len(positions)
        fmllr, ivector = torch.zeros(batch, num_frames, 0), torch.zeros(batch, 0)
        if self.fmllr is not None:
            first, last = np.asarray(self.fmllr.spans)[positions].T
            found = self.fmllr.frames_within(first + starts, num_frames, first, last)
            fmllr = torch.from_numpy(found)
        if self.ivector is not None:
            ivector = self.ivector.at(positions, starts)
        return Beside(fmllr, ivector)

    def utterance(self, position: int) -> Beside:
        """The streams of all frames of an utterance."""
        start, end = (int(frame) for frame in self._store.spans[position])
        fmllr = ivector = torch.zeros(end - start, 0)
        if self.fmllr is not None:
            fmllr = self.fmllr.frames(position)
        if self.ivector is not None:
            ivector = self.ivector.along(position, end - start)
        return Beside(fmllr, ivector)


def _lengths(store: FrameStore) -> np.ndarray:
    spans = np.asarray(store.spans)
    return spans[:, 1] - spans[:, 0]


def _check_utterances(stream: FrameStore, store: FrameStore) -> None:
    if not np.array_equal(stream.ids, store.ids):
        raise StoreError(
            f"{stream.folder}: expected the utterances of {store.folder}, in their "
            f"order; {len(stream)} and {len(store)} differ; adapt again"
        )
    differ = np.flatnonzero(_lengths(stream) != _lengths(store))
    if len(differ):
        at = int(differ[0])
        raise StoreError(
            f"{stream.folder}: {store.ids[at]} has {_lengths(stream)[at]} frames, in "
            f"{store.folder} {_lengths(store)[at]}; adapt again"
        )
