"""Frames of many utterances in one memory-mapped array, and labels beside it.

A folder holds `frames.npy` [total_frames, dims], `ids.npy` (the utterances) and
`spans.npy` [utterances, 2] (begin and end of each in the array). All are mapped:
opening reads no data, whatever the size of the corpus. Labels are an array
[total_frames] of their own, made later by the alignment; frames without a label hold
IGNORE, and `labels.present.npy` [utterances] tells which utterances have labels.
"""

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from lightning_adpsgd.asr.readahead import ReadAhead

IGNORE = -100  # what torch's cross_entropy passes over by default


class StoreError(ValueError):
    """Stored frames or labels cannot be used; the message has the path."""


class FramePlace(NamedTuple):
    """The place of one utterance in an unfinished array; other processes may fill it.

    Attributes:
        path: The unfinished array.
        name: The utterance.
        start: Its first frame in the array.
        end: The frame after its last one.
        dims: Values per frame.
    """

    path: Path
    name: str
    start: int
    end: int
    dims: int

    def put(self, frames: np.ndarray) -> None:
        """Write the frames.

        Raises:
            ValueError: Their number is not the one announced, or one is not finite.
        """
        shape = (self.end - self.start, self.dims)
        if frames.shape != shape:
            raise ValueError(
                f"{self.name}: expected frames {shape}, got {frames.shape}"
            )
        if not np.isfinite(frames).all():
            raise ValueError(f"{self.name}: `frames` must be finite")
        np.load(self.path, mmap_mode="r+")[self.start : self.end] = frames


class FrameWriter:
    """Writes a store whose size is known beforehand, in any order.

    The store is there once `finish` was called.

    Args:
        folder: Made if absent.
        ids: The utterances, in the order in which they lie in the array.
        lengths: Frames of each.
        dims: Values per frame.
        dtype: "float16" or "float32".
    """

    def __init__(
        self,
        folder: Path,
        ids: Sequence[str],
        lengths: Sequence[int],
        dims: int,
        dtype: str = "float16",
    ) -> None:
        if len(ids) == 0 or len(ids) != len(lengths):
            raise ValueError(
                f"`ids` and `lengths` must be of one length above 0, "
                f"got {len(ids)} and {len(lengths)}"
            )
        if min(lengths) < 1:
            raise ValueError(f"every length must be at least 1, got {min(lengths)}")
        ends = np.cumsum(np.asarray(lengths, np.int64))
        self.folder = folder
        self.spans = np.stack([ends - np.asarray(lengths), ends], axis=1)
        self._ids = np.asarray(ids, dtype=np.str_)
        self._shape = (int(ends[-1]), dims)
        self._dtype = np.dtype(dtype)
        self._partial = folder / ".frames.partial.npy"

    def create(self) -> None:
        """Lay out the array on disk, unless an interrupted attempt left it there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.is_begun():
            open_memmap(self._partial, "w+", self._dtype, self._shape).flush()

    def is_begun(self) -> bool:
        """Whether an unfinished array of the right shape is there."""
        if not self._partial.exists():
            return False
        try:
            found = np.load(self._partial, mmap_mode="r")
        except ValueError:  # interrupted while it was laid out
            return False
        return found.shape == self._shape and found.dtype == self._dtype

    def place(self, position: int) -> "FramePlace":
        """Where the utterance at `position` of `ids` goes."""
        start, end = (int(frame) for frame in self.spans[position])
        name = str(self._ids[position])
        return FramePlace(self._partial, name, start, end, self._shape[1])

    def put(self, position: int, frames: np.ndarray) -> None:
        """Write the frames of the utterance at `position` of `ids`."""
        self.place(position).put(frames)

    def finish(self, present: Sequence[bool] | None = None) -> None:
        """Publish the store.

        Args:
            present: Which utterances were written; the others are left out, their
                frames remain as gaps. None for all.
        """
        kept = np.ones(len(self._ids), bool) if present is None else np.array(present)
        save_array(self.folder / "ids.npy", self._ids[kept])
        save_array(self.folder / "spans.npy", self.spans[kept])
        os.replace(self._partial, self.folder / "frames.npy")


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array, whole or not at all."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial.npy")
    np.save(partial, array)
    os.replace(partial, path)


class FrameStore:
    """Stored frames, and their labels if there are any; pickles as its paths.

    Args:
        folder: What a `FrameWriter` finished.
        labels: Array of int32 [total_frames], or None.

    Raises:
        StoreError: A file is missing or does not fit the others.
    """

    def __init__(self, folder: Path, labels: Path | None = None) -> None:
        self.folder = folder
        self.labels_path = labels
        frames = _mapped(folder / "frames.npy", 2)
        self._frames = _tensor(frames)
        self._read_ahead = ReadAhead(frames._mmap)  # pyright: ignore[reportAttributeAccessIssue]
        self._first_byte = int(frames.offset)
        self._ids = _mapped(folder / "ids.npy", 1)
        self.spans = _mapped(folder / "spans.npy", 2)
        self._labels = None if labels is None else _tensor(_mapped(labels, 1))
        self._labelled = None if labels is None else _mapped(_present(labels), 1)
        self._positions: dict[str, int] = {}
        self._check()

    def _check(self) -> None:
        if len(self._ids) != len(self.spans) or len(self.spans) == 0:
            raise StoreError(
                f"{self.folder}: {len(self._ids)} ids and {len(self.spans)} spans; "
                "expected as many of both, above 0"
            )
        if self.spans[-1, 1] > len(self._frames):
            raise StoreError(
                f"{self.folder}/frames.npy: expected {self.spans[-1, 1]} frames, "
                f"found {len(self._frames)}"
            )
        if self._labels is not None and len(self._labels) != len(self._frames):
            raise StoreError(
                f"{self.labels_path}: expected {len(self._frames)} labels, one per "
                f"frame, found {len(self._labels)}; align again"
            )
        if self._labelled is not None and len(self._labelled) != len(self._ids):
            raise StoreError(
                f"{self.labels_path}: expected to cover {len(self._ids)} utterances, "
                f"covers {len(self._labelled)}; align again"
            )

    def __getstate__(self) -> tuple[Path, Path | None]:
        # A mapped array would be pickled with all its contents.
        return self.folder, self.labels_path

    def __setstate__(self, paths: tuple[Path, Path | None]) -> None:
        self.__init__(*paths)

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def ids(self) -> np.ndarray:
        """The utterances, [utterances] of text."""
        return self._ids

    @property
    def num_frames(self) -> int:
        """Frames of the array, gaps included: the length of the labels."""
        return len(self._frames)

    @property
    def dims(self) -> int:
        """Values per frame."""
        return self._frames.shape[1]

    def position(self, utterance: str) -> int:
        """Where an utterance stands in `ids`.

        Raises:
            KeyError: It is not in the store.
        """
        if not self._positions:
            self._positions = {str(name): i for i, name in enumerate(self._ids)}
        return self._positions[utterance]

    def __contains__(self, utterance: str) -> bool:
        try:
            self.position(utterance)
        except KeyError:
            return False
        return True

    def frames(self, position: int) -> Tensor:
        """A view of the frames of one utterance, [frames, dims]; not to be written."""
        start, end = self.spans[position]
        return self.frame_range(int(start), int(end))

    def frame_range(self, start: int, end: int) -> Tensor:
        """A view of the frames from `start` to `end` of the array."""
        return self._frames[start:end]

    def frames_at(self, rows: np.ndarray) -> Tensor:
        """A copy of these frames of the array, [..., dims], made at one go."""
        # To clip spares numpy a copy of its own; nothing is beyond the ends.
        found = np.take(self._frames.numpy(), rows, axis=0, mode="clip")
        return torch.from_numpy(found)

    def frame_windows(self, starts: np.ndarray, length: int) -> Tensor:
        """Copies of neighbouring frames, [starts, length, dims], made at one go.

        A window that would reach beyond the array is moved inside; in an array shorter
        than a window there are zeros.
        """
        frames = self._frames.numpy()
        last = len(frames) - 1
        self._read_ahead.want(
            self._first_byte + starts.clip(0, last) * frames.strides[0]
        )
        return torch.from_numpy(_windows(frames, starts, length))

    @property
    def labelled(self) -> np.ndarray:
        """Which utterances have labels, bool [utterances]."""
        if self._labelled is None:
            raise StoreError(f"{self.folder}: opened without `labels`")
        return self._labelled

    def labels(self, position: int) -> Tensor:
        """A view of the labels of one utterance, int32 [frames]."""
        start, end = self.spans[position]
        return self.label_range(int(start), int(end))

    def label_range(self, start: int, end: int) -> Tensor:
        """A view of the labels from `start` to `end` of the array."""
        return self._all_labels()[start:end]

    def labels_at(self, rows: np.ndarray) -> Tensor:
        """A copy of the labels of these frames of the array, int64 [...]."""
        found = np.take(self._all_labels().numpy(), rows, mode="clip")
        return torch.from_numpy(found.astype(np.int64))

    def label_windows(self, starts: np.ndarray, length: int) -> Tensor:
        """Copies of neighbouring labels, int64 [starts, length]; as `frame_windows`."""
        found = _windows(self._all_labels().numpy(), starts, length)
        return torch.from_numpy(found.astype(np.int64))

    def _all_labels(self) -> Tensor:
        if self._labels is None:
            raise StoreError(f"{self.folder}: opened without `labels`")
        return self._labels


def _mapped(path: Path, axes: int) -> np.memmap:
    try:
        array = np.load(path, mmap_mode="r")
    except FileNotFoundError as error:
        raise StoreError(f"{path}: expected an array, there is none") from error
    except ValueError as error:
        raise StoreError(f"{path}: broken or truncated array: {error}") from error
    if array.ndim != axes:
        raise StoreError(f"{path}: expected {axes} axes, got shape {array.shape}")
    return array


def _tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        # Mapped for reading only: a copy-on-write mapping, which torch would take
        # without a word, must fit into memory and so cannot hold a large corpus.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _windows(array: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    shape, last = (length, *array.shape[1:]), len(array) - length
    if last < 0:
        return np.zeros((len(starts), *shape), array.dtype)
    # All windows, overlapping, as rows of one array: one copy for each that is taken.
    rows = np.lib.stride_tricks.as_strided(
        array, (last + 1, math.prod(shape)), (array.strides[0], array.itemsize)
    )
    return rows[starts.clip(0, last)].reshape(-1, *shape)


def _present(labels: Path) -> Path:
    return labels.with_suffix(".present.npy")


def chunk_index(store: FrameStore, chunk: int) -> np.ndarray:
    """Where the chunks of the labelled utterances are; mapped, and so never read whole.

    It is counted once and kept beside the labels, where that can be written to.

    Args:
        store: With labels.
        chunk: Frames per chunk; the last one of an utterance may have fewer.

    Returns:
        int64 [2, utterances with labels + 1]: chunks before the utterance, and its
        position in the store; at the end the number of chunks, and that of utterances.
    """
    assert store.labels_path is not None
    path = _index_of(store.labels_path, chunk)
    if not path.exists():
        positions = np.flatnonzero(store.labelled)
        first, last = np.asarray(store.spans)[positions].T
        before = np.cumsum(np.append(0, -((first - last) // chunk)))
        index = np.stack([before, np.append(positions, len(store))])
        try:
            save_array(path, index)
        except OSError:  # where others keep their alignments
            return index
    return _mapped(path, 2)


def _index_of(labels: Path, chunk: int | str) -> Path:
    return labels.with_name(f"{labels.stem}.chunks-{chunk}.npy")


def write_labels(
    path: Path, store: FrameStore, alignments: Iterable[tuple[str, np.ndarray]]
) -> int:
    """Write the labels of a store's utterances, whole or not at all.

    Args:
        path: The file to write, for instance `labels.npy`.
        store: Whose frames are labelled.
        alignments: Utterance and labels [frames], in any order; the frames of
            utterances that do not occur get IGNORE.

    Returns:
        The number of labelled frames.

    Raises:
        ValueError: An utterance has another number of labels than frames.
    """
    partial = path.with_name(f".{path.stem}.partial.npy")
    labels = open_memmap(partial, "w+", np.int32, (store.num_frames,))
    labels[:] = IGNORE
    present = np.zeros(len(store), bool)
    for utterance, values in alignments:
        position = store.position(utterance)
        start, end = store.spans[position]
        if len(values) != end - start:
            raise ValueError(
                f"{utterance}: expected {end - start} labels, one per frame, "
                f"got {len(values)}"
            )
        labels[start:end] = values
        present[position] = True
    labels.flush()
    for outdated in path.parent.glob(_index_of(path, "*").name):
        outdated.unlink()
    save_array(_present(path), present)
    os.replace(partial, path)
    return int((store.spans[present, 1] - store.spans[present, 0]).sum())
