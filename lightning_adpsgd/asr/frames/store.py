"""The frames of many utterances in one memory-mapped array, with labels.

A folder holds `frames.npy` [total_frames, dims], or the same array in several files
(`shards`) where it is larger than one of them may be. It also holds `ids.npy` (the
utterances) and `spans.npy` [utterances, 2] (begin and end of each in the array). All
are mapped: opening reads no data, whatever the size of the corpus. Labels are an array
[total_frames] of their own, made later by the alignment; frames without a label hold
IGNORE, and `labels.present.npy` [utterances] tells which utterances have labels.
"""

import mmap
import warnings
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.lib.format import write_array_header_1_0
from torch import Tensor

from lightning_adpsgd.asr.frames.readahead import ReadAhead
from lightning_adpsgd.asr.frames.shards import (
    PLAN,
    ShardError,
    read_plan,
)
from lightning_adpsgd.asr.frames.writing import WHOLE, save_array
from lightning_adpsgd.files import bytes_written_whole

IGNORE = -100  # the label that torch's cross_entropy ignores by default
_LABEL = np.dtype(np.int32)
_BLOCK = 1 << 20  # labels that are laid out at a time


class StoreError(ValueError):
    """Stored frames or labels cannot be used; the message has the path."""


def stored_frames(folder: Path) -> int:
    """The frames of a finished store, including gaps.

    Raises:
        StoreError: The store is missing or damaged.
    """
    return _files(folder).num_frames


class FrameStore:
    """Stored frames with their labels, if any; pickled by its paths.

    Args:
        folder: Folder from a finished `FrameWriter`.
        labels: File of an int32 array [total_frames], or None.

    Raises:
        StoreError: A file is missing or does not fit the others.
    """

    def __init__(self, folder: Path, labels: Path | None = None) -> None:
        self.folder = folder
        self.labels_path = labels
        self._files = _files(folder)
        self._ids = _mapped(folder / "ids.npy", 1)
        self.spans = _mapped(folder / "spans.npy", 2)
        self._labels = None if labels is None else np.asarray(_mapped(labels, 1))
        self._labelled = None if labels is None else _mapped(_present(labels), 1)
        self._positions: dict[str, int] = {}
        self._check()

    def _check(self) -> None:
        if len(self._ids) != len(self.spans) or len(self.spans) == 0:
            raise StoreError(
                f"{self.folder}: {len(self._ids)} ids and {len(self.spans)} spans; "
                "expected equal numbers above 0"
            )
        if self.spans[-1, 1] > self.num_frames:
            raise StoreError(
                f"{self.folder}/frames.npy: expected {self.spans[-1, 1]} frames, "
                f"found {self.num_frames}"
            )
        if self._labels is not None and len(self._labels) != self.num_frames:
            raise StoreError(
                f"{self.labels_path}: expected {self.num_frames} labels, one per "
                f"frame, found {len(self._labels)}; align again"
            )
        if self._labelled is not None and len(self._labelled) != len(self._ids):
            raise StoreError(
                f"{self.labels_path}: expected to cover {len(self._ids)} utterances, "
                f"covers {len(self._labelled)}; align again"
            )

    @cached_property
    def _mapping(self) -> "_Mapping":
        return self._files.open()

    @cached_property
    def _frame_windows(self) -> "_Windows":
        return _Windows(self._mapping.array)

    @cached_property
    def _label_windows(self) -> "_Windows":
        return _Windows(self._all_labels())

    @cached_property
    def _read_ahead(self) -> ReadAhead:
        return ReadAhead(self._mapping.file)

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
        """The number of frames of the array with gaps, and of its labels."""
        return self._files.num_frames

    @property
    def dims(self) -> int:
        """The number of values per frame."""
        return self._files.dims

    def position(self, utterance: str) -> int:
        """The position of an utterance in `ids`.

        Raises:
            KeyError: The utterance is not in the store.
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
        """A read-only view of the frames of one utterance, [frames, dims]."""
        start, end = self.spans[position]
        return self.frame_range(int(start), int(end))

    def frame_range(self, start: int, end: int) -> Tensor:
        """A view of the frames from `start` to `end` of the array."""
        return _tensor(self._mapping.array[start:end])

    def frames_at(self, rows: np.ndarray) -> np.ndarray:
        """A copy of these frames of the array, [..., dims], in one operation."""
        # Clipping saves numpy a further copy; no index is beyond the ends.
        return np.take(self._mapping.array, rows, axis=0, mode="clip")

    def frame_windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Copies of windows of frames, [starts, length, dims], in one operation.

        Beyond the ends of the array, its first and last frame are repeated. There must
        be at least one window.
        """
        inside = np.minimum(np.maximum(starts, 0), self.num_frames - 1)
        self._read_ahead.want(self._mapping.place(inside))
        return self._frame_windows.at(starts, length)

    def frames_within(
        self, begin: np.ndarray, length: int, first: np.ndarray, last: np.ndarray
    ) -> np.ndarray:
        """Copies of windows of frames within utterances, [windows, length, dims].

        Before an utterance its first frame is repeated, and after it its last one.

        Args:
            begin: First frames of the windows, int64 [windows].
            length: Length of every window.
            first: First frame of the utterance of each window.
            last: Frame after the last one of that utterance.
        """
        frames = self.frame_windows(begin, length)
        [beyond] = np.nonzero((begin < first) | (begin + length > last))
        rows = begin[beyond, None] + np.arange(length)
        low, high = first[beyond, None], last[beyond, None] - 1
        frames[beyond] = self.frames_at(np.minimum(np.maximum(rows, low), high))
        return frames

    @property
    def labelled(self) -> np.ndarray:
        """Mask of the utterances that have labels, bool [utterances].

        Raises:
            StoreError: The store was opened without `labels`.
        """
        if self._labelled is None:
            raise StoreError(f"{self.folder}: opened without `labels`")
        return self._labelled

    def labels(self, position: int) -> Tensor:
        """A view of the labels of one utterance, int32 [frames]."""
        start, end = self.spans[position]
        return self.label_range(int(start), int(end))

    def label_range(self, start: int, end: int) -> Tensor:
        """A view of the labels from `start` to `end` of the array.

        Raises:
            StoreError: The store was opened without `labels`.
        """
        return _tensor(self._all_labels()[start:end])

    def label_windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Copies of windows of labels, int32 [starts, length]; see `frame_windows`."""
        return self._label_windows.at(starts, length)

    def _all_labels(self) -> np.ndarray:
        if self._labels is None:
            raise StoreError(f"{self.folder}: opened without `labels`")
        return self._labels


class _Mapping(NamedTuple):
    """A mapped array [rows, dims], with its mapping and its place in it."""

    array: np.ndarray
    file: mmap.mmap
    first_byte: int

    def place(self, rows: np.ndarray) -> np.ndarray:
        """The bytes of the mapping at which rows begin."""
        return self.first_byte + rows * self.array.strides[0]


class _OneFile:
    """Frames in `frames.npy`."""

    def __init__(self, path: Path) -> None:
        self._array = _mapped(path, 2)
        self.num_frames, self.dims = self._array.shape

    def open(self) -> _Mapping:
        file = self._array._mmap  # pyright: ignore[reportAttributeAccessIssue]
        return _Mapping(np.asarray(self._array), file, int(self._array.offset))


class _ManyFiles:
    """Frames in shards, which `open` opens; before it only their sizes are compared."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._shards = read_plan(folder / PLAN)
            self._shards.check(folder)
        except ShardError as error:
            raise StoreError(str(error)) from error
        self.num_frames, self.dims = self._shards.num_rows, self._shards.dims

    def open(self) -> _Mapping:
        try:
            file = self._shards.mapped(self._folder)
        except ShardError as error:
            raise StoreError(str(error)) from error
        array = np.frombuffer(file, self._shards.dtype).reshape(-1, self.dims)
        return _Mapping(array, file, 0)


def _files(folder: Path) -> _OneFile | _ManyFiles:
    if (folder / PLAN).exists():
        return _ManyFiles(folder)
    return _OneFile(folder / WHOLE)


class _Windows:
    """All stretches of neighbouring rows of an array, overlapping, each as one item.

    An item is copied by one copy of memory, whatever the type of the numbers in it.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self._of_length: dict[int, np.ndarray] = {}

    def at(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Copies [starts, length, ...]; see `FrameStore.frame_windows`."""
        array = self._array
        if starts.min() < 0 or starts.max() > len(array) - length:
            rows = starts[:, None] + np.arange(length)
            return np.take(array, rows, axis=0, mode="clip")
        found = self._items(length)[starts].view(array.dtype)
        return found.reshape(-1, length, *array.shape[1:])

    def _items(self, length: int) -> np.ndarray:
        if length not in self._of_length:
            step = self._array.strides[0]
            item = np.dtype((np.void, length * step))
            shape = (len(self._array) - length + 1,)
            self._of_length[length] = np.ndarray(shape, item, self._array, 0, (step,))
        return self._of_length[length]


def _mapped(path: Path, axes: int) -> np.memmap:
    try:
        array = np.load(path, mmap_mode="r")
    except FileNotFoundError as error:
        raise StoreError(
            f"{path}: expected an array, but the file does not exist"
        ) from error
    except (EOFError, ValueError) as error:
        raise StoreError(f"{path}: broken or truncated array: {error}") from error
    if array.ndim != axes:
        raise StoreError(f"{path}: expected {axes} axes, got shape {array.shape}")
    return array


def _tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        # Mapped for reading only: a copy-on-write mapping, which torch would accept
        # without a warning, must fit into memory and so cannot hold a large corpus.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _present(labels: Path) -> Path:
    return labels.with_suffix(".present.npy")


class ChunkIndex(NamedTuple):
    """The places of the chunks of the labelled utterances.

    Attributes:
        places: int64 [utterances with labels, 4]: chunks before the utterance, its
            position in the store, its first frame, and the frame after its last one.
        rows: uint32 [chunks], the row of `places` that each chunk belongs to.
    """

    places: np.ndarray
    rows: np.ndarray


def chunk_index(store: FrameStore, chunk: int) -> ChunkIndex:
    """The index of the labelled utterances' chunks, mapped and never read whole.

    It is computed once and kept next to the labels, if that folder is writable.

    Args:
        store: Store with labels.
        chunk: Frames per chunk; the last one of an utterance may have fewer.

    Raises:
        StoreError: A file of the index cannot be mapped.
    """
    assert store.labels_path is not None
    paths = [_index_of(store.labels_path, name, chunk) for name in ChunkIndex._fields]
    if not all(path.exists() for path in paths):
        index = _counted(store, chunk)
        try:
            for path, array in zip(paths, index, strict=True):
                save_array(path, array)
        except OSError:  # where others keep their alignments
            return index
    places, rows = paths
    return ChunkIndex(*map(np.asarray, (_mapped(places, 2), _mapped(rows, 1))))


def _counted(store: FrameStore, chunk: int) -> ChunkIndex:
    positions = np.flatnonzero(store.labelled)
    first, last = np.asarray(store.spans)[positions].T
    counts = -((first - last) // chunk)
    before = np.cumsum(counts) - counts
    rows = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
    return ChunkIndex(np.stack([before, positions, first, last], axis=1), rows)


def _index_of(labels: Path, name: str, chunk: int | str) -> Path:
    return labels.with_name(f"{labels.stem}.{name}-{chunk}.npy")


def write_labels(
    path: Path, store: FrameStore, alignments: Iterable[tuple[str, np.ndarray]]
) -> int:
    """Writes the labels of a store's utterances, whole or not at all.

    Args:
        path: File to write, for example `labels.npy`.
        store: Store whose frames are labelled.
        alignments: Utterance and labels [frames], in any order; the frames of
            utterances that do not occur get IGNORE.

    Returns:
        The number of labelled frames.

    Raises:
        KeyError: An utterance is not in the store.
        ValueError: An utterance has more or fewer labels than frames.
        OSError: The disk is full; it names the file.
    """
    present = np.zeros(len(store), bool)
    # Not into a mapping: on a full disk that ends the process.
    with bytes_written_whole(path) as file:
        begin = _lay_out(file, store.num_frames)
        for utterance, values in alignments:
            position = store.position(utterance)
            start, end = (int(frame) for frame in store.spans[position])
            if len(values) != end - start:
                raise ValueError(
                    f"{utterance}: expected {end - start} labels, one per frame, "
                    f"got {len(values)}"
                )
            file.seek(begin + start * _LABEL.itemsize)
            file.write(np.asarray(values, _LABEL).tobytes())
            present[position] = True
        for name in ChunkIndex._fields:
            for outdated in path.parent.glob(_index_of(path, name, "*").name):
                outdated.unlink()
        save_array(_present(path), present)
    return int((store.spans[present, 1] - store.spans[present, 0]).sum())


def _lay_out(file: BinaryIO, num_frames: int) -> int:
    """Writes an array of labels without any; returns the byte at which they begin."""
    told = {"descr": _LABEL.str, "fortran_order": False, "shape": (num_frames,)}
    write_array_header_1_0(file, told)
    begin = file.tell()
    for at in range(0, num_frames, _BLOCK):
        file.write(np.full(min(_BLOCK, num_frames - at), IGNORE, _LABEL).tobytes())
    return begin
