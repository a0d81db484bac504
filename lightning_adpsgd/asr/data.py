"""Short chunks of long utterances, as views of stored frames, for training.

An utterance is cut into chunks of 21 frames one after the other. The last one is filled
up by repeating the last frame, with labels that the loss ignores: dropping it instead
would lose up to 20 frames of every utterance, and always the sounds that end one. Each
chunk brings the CONTEXT frames on both sides from which the model takes differences;
beyond the ends of the utterance they repeat its first and last frame, so that a chunk's
differences are those of the whole utterance. What speaker adaptation adds to a frame
comes from `streams` and is joined to it by the model.
"""

from pathlib import Path
from typing import NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_adpsgd.asr.features import CONTEXT
from lightning_adpsgd.asr.store import IGNORE, FrameStore
from lightning_adpsgd.asr.streams import Streams


class Chunk(NamedTuple):
    """One training example, or a batch of them.

    Attributes:
        frames: [(batch,) chunk + 2 · CONTEXT, dims], in the type of the store.
        labels: int64 [(batch,) chunk]; IGNORE where there is none.
    """

    frames: Tensor
    labels: Tensor


class AdaptedChunk(NamedTuple):
    """A chunk with the streams beside it, or a batch of them.

    Attributes:
        frames: As of a `Chunk`.
        labels: As of a `Chunk`.
        fmllr: [(batch,) chunk, dims]; no dims where there is no such stream.
        ivector: [(batch,) dims], that of the first frame; no dims where there is none.
    """

    frames: Tensor
    labels: Tensor
    fmllr: Tensor
    ivector: Tensor


class Place(NamedTuple):
    """Where a chunk begins.

    Attributes:
        position: Of its utterance in the store.
        start: Its first frame, counted from the start of the utterance.
    """

    position: int
    start: int


class ChunkDataset(Dataset[Chunk]):
    """All chunks of the utterances of a store that have labels.

    Args:
        store: Frames with labels.
        chunk: Frames per chunk.
    """

    def __init__(self, store: FrameStore, chunk: int = 21) -> None:
        if chunk < 1:
            raise ValueError(f"`chunk` must be at least 1, got {chunk}")
        self.store = store
        self.chunk = chunk
        self._positions = np.flatnonzero(store.labelled)
        self._spans = np.asarray(store.spans)[self._positions]
        if not len(self._spans):
            raise ValueError(f"{store.labels_path}: no utterance has labels")
        lengths = self._spans[:, 1] - self._spans[:, 0]
        self._ends = np.cumsum(-(-lengths // chunk))

    def __len__(self) -> int:
        return int(self._ends[-1])

    @override
    def __getitem__(self, index: int) -> Chunk:
        row, start = self._locate(index)
        first, last = (int(frame) for frame in self._spans[row])
        start += first
        return Chunk(self._frames(start, first, last), self._labels(start, last))

    def place(self, index: int) -> Place:
        """Where the chunk of that index begins."""
        row, start = self._locate(index)
        return Place(int(self._positions[row]), start)

    def _locate(self, index: int) -> tuple[int, int]:
        """Row of the utterance in `_spans`, and where in the utterance it begins."""
        if not 0 <= index < len(self):
            raise IndexError(f"`index` must be below {len(self)}, got {index}")
        row = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[row - 1]) if row else 0
        return row, (index - before) * self.chunk

    def _frames(self, start: int, first: int, last: int) -> Tensor:
        begin, end = start - CONTEXT, start + self.chunk + CONTEXT
        if begin >= first and end <= last:
            return self.store.frame_range(begin, end)
        whole = self.store.frame_range(max(begin, first), min(end, last))
        wanted = torch.arange(begin, end).clamp(first, last - 1)
        return whole[wanted - max(begin, first)]

    def _labels(self, start: int, last: int) -> Tensor:
        labels = torch.full((self.chunk,), IGNORE, dtype=torch.int64)
        end = min(start + self.chunk, last)
        labels[: end - start] = self.store.label_range(start, end)
        return labels


class AdaptedChunkDataset(Dataset[AdaptedChunk]):
    """The chunks of a dataset with what streams say about their speakers.

    Args:
        chunks: Of the utterances that the streams are aligned on.
        streams: fMLLR, i-vectors or both.
    """

    def __init__(self, chunks: ChunkDataset, streams: Streams) -> None:
        self.chunks = chunks
        self.streams = streams

    def __len__(self) -> int:
        return len(self.chunks)

    @override
    def __getitem__(self, index: int) -> AdaptedChunk:
        beside = self.streams.chunk(*self.chunks.place(index), self.chunks.chunk)
        return AdaptedChunk(*self.chunks[index], *beside)


class SpeechData(L.LightningDataModule):
    """Loaders of training and held-out chunks.

    Lightning gives every learner its own share of the chunks; there is no sampler here.

    Args:
        features: Folder with the stores `train` and `dev`.
        labels: Folder with `train/labels.npy` and `dev/labels.npy`.
        batch_size: Chunks per learner and step.
        chunk: Frames per chunk.
        seed: Of the order of the chunks when there is one learner only.
        num_workers: Processes that load, per learner; 0 loads in the training process.
        streams: Folder with `train` and `dev`, each with streams; None for none.
    """

    def __init__(
        self,
        features: Path,
        labels: Path,
        *,
        batch_size: int = 64,
        chunk: int = 21,
        seed: int = 0,
        num_workers: int = 0,
        streams: Path | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}")
        self.features = features
        self.labels = labels
        self.batch_size = batch_size
        self.chunk = chunk
        self.seed = seed
        self.num_workers = num_workers
        self.streams = streams

    def dataset(self, split: str) -> ChunkDataset:
        """The chunks of one split, without streams."""
        labels = self.labels / split / "labels.npy"
        return ChunkDataset(FrameStore(self.features / split, labels), self.chunk)

    def _adapted(self, split: str) -> ChunkDataset | AdaptedChunkDataset:
        chunks = self.dataset(split)
        if self.streams is None:
            return chunks
        return AdaptedChunkDataset(chunks, Streams(self.streams / split, chunks.store))

    @override
    def train_dataloader(self) -> DataLoader[Chunk | AdaptedChunk]:
        order = torch.Generator().manual_seed(self.seed)
        return self._loader("train", shuffle=True, generator=order)

    @override
    def val_dataloader(self) -> DataLoader[Chunk | AdaptedChunk]:
        return self._loader("dev", shuffle=False, generator=None)

    def _loader(
        self, split: str, shuffle: bool, generator: torch.Generator | None
    ) -> DataLoader[Chunk | AdaptedChunk]:
        return DataLoader(
            self._adapted(split),
            self.batch_size,
            shuffle=shuffle,
            generator=generator,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )
