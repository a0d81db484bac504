"""Short chunks of long utterances, gathered in batches from mapped frames.

An utterance is cut into consecutive chunks of 21 frames. The last one is padded by
repeating the last frame, with labels that the loss ignores. Dropping it instead would
lose up to 20 frames of every utterance, and always the sounds at its end. Each chunk
includes CONTEXT frames on both sides, from which the model computes differences. Beyond
the ends of the utterance they repeat its first and last frame, so that a chunk's
differences equal those of the whole utterance. Features from speaker adaptation come
from `streams`, and the model concatenates them.

Memory does not grow with the corpus: frames, labels and the index of chunks are
memory-mapped, and the order of an epoch is computed (`block_sampler`).
"""

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_adpsgd.asr.frames.block_sampler import BlockSampler
from lightning_adpsgd.asr.frames.store import IGNORE, FrameStore, chunk_index
from lightning_adpsgd.asr.frames.streams import Streams
from lightning_adpsgd.asr.sound.features import CONTEXT


class Chunk(NamedTuple):
    """One training example, or a batch of them.

    Attributes:
        frames: [(batch,) chunk + 2 · CONTEXT, dims], in the type of the store.
        labels: int64 [(batch,) chunk]; IGNORE for frames without a label.
    """

    frames: Tensor
    labels: Tensor


class AdaptedChunk(NamedTuple):
    """A chunk with its streams, or a batch of them.

    Attributes:
        frames: Frames, as in a `Chunk`.
        labels: Labels, as in a `Chunk`.
        fmllr: [(batch,) chunk, dims]; zero dims without this stream.
        ivector: [(batch,) dims] of the first frame; zero dims without this stream.
    """

    frames: Tensor
    labels: Tensor
    fmllr: Tensor
    ivector: Tensor


class ChunkDataset(Dataset[Chunk]):
    """All chunks of the utterances of a store that have labels.

    A loader over it needs `collate_fn=as_it_is`, because batches are gathered whole.

    Args:
        store: Frames with labels.
        chunk: Number of frames per chunk.

    Raises:
        ValueError: `chunk` is below 1, or no utterance has labels.
    """

    def __init__(self, store: FrameStore, chunk: int = 21) -> None:
        if chunk < 1:
            raise ValueError(f"`chunk` must be at least 1, got {chunk}")
        self.store = store
        self.chunk = chunk
        self._places, self._rows = chunk_index(store, chunk)
        if not len(self):
            raise ValueError(f"{store.labels_path}: no utterance has labels")

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array would be pickled with all its contents.
        return {"store": self.store, "chunk": self.chunk}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitem__(self, index: int) -> Chunk:
        batch = self.__getitems__([index])
        return Chunk(batch.frames[0], batch.labels[0])

    def __getitems__(self, indices: list[int]) -> Chunk:
        """A whole batch; what loaders call."""
        chunks = self._checked(indices)
        before, _, first, last = np.take(self._places, self._rows[chunks], axis=0).T
        start = first + (chunks - before) * self.chunk
        length = self.chunk + 2 * CONTEXT
        frames = self.store.frames_within(start - CONTEXT, length, first, last)
        labels = self._labels(start, last)
        return Chunk(torch.from_numpy(frames), torch.from_numpy(labels))

    def _checked(self, indices: list[int]) -> np.ndarray:
        chunks = np.array(indices, np.int64)
        beyond = chunks.view(np.uint64) >= len(self)  # negative ones become huge
        if beyond.any():
            raise IndexError(
                f"`index` must be below {len(self)}, got {chunks[beyond][0]}"
            )
        return chunks

    def begins(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The utterance of each chunk, and the chunk's first frame within it."""
        before, position, _, _ = self._places[self._rows[chunks]].T
        return position, (chunks - before) * self.chunk

    def _labels(self, start: np.ndarray, last: np.ndarray) -> np.ndarray:
        """The labels of chunks from `start` on, with IGNORE beyond their utterances."""
        labels = self.store.label_windows(start, self.chunk)
        is_own = np.arange(self.chunk) < (last - start)[:, None]
        return np.where(is_own, labels, np.int64(IGNORE))


class AdaptedChunkDataset(Dataset[AdaptedChunk]):
    """The chunks of a dataset with streams about their speakers.

    Args:
        chunks: Chunks of the utterances to which the streams are aligned.
        streams: fMLLR, i-vectors or both.
    """

    def __init__(self, chunks: ChunkDataset, streams: Streams) -> None:
        self.chunks = chunks
        self.streams = streams

    def __len__(self) -> int:
        return len(self.chunks)

    @override
    def __getitem__(self, index: int) -> AdaptedChunk:
        return AdaptedChunk(*(part[0] for part in self.__getitems__([index])))

    def __getitems__(self, indices: list[int]) -> AdaptedChunk:
        """A whole batch; what loaders call."""
        batch = self.chunks.__getitems__(indices)
        position, start = self.chunks.begins(np.asarray(indices))
        beside = self.streams.chunks(position, start, self.chunks.chunk)
        return AdaptedChunk(*batch, *beside)


def as_it_is(batch: Any) -> Any:
    """A collate function for loaders of batches that are gathered whole."""
    return batch


class SpeechData(L.LightningDataModule):
    """A data module with loaders of training and held-out chunks.

    Every learner gets its share of the training chunks from a `BlockSampler`, whose
    memory does not depend on their number. Lightning deals the held-out chunks.

    Args:
        features: Folder with the stores `train` and `dev`.
        labels: Folder with `train/labels.npy` and `dev/labels.npy`.
        batch_size: Number of chunks per learner and step.
        chunk: Number of frames per chunk.
        seed: Seed of the order of the chunks.
        num_workers: Number of loader processes per learner; 0 loads in the training
            process.
        pin_memory: Whether batches are in pinned memory, for asynchronous copies to a
            GPU.
        streams: Folder with the streams of `train` and `dev`; None for no streams.

    Raises:
        ValueError: `batch_size` is below 1.
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
        pin_memory: bool = False,
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
        self.pin_memory = pin_memory
        self.streams = streams

    @override
    def prepare_data(self) -> None:
        """Indexes the chunks, once on each machine before the learners need them."""
        for split in ("train", "dev"):
            self.dataset(split)

    def dataset(self, split: str) -> ChunkDataset:
        """The chunks of one split, without streams."""
        labels = self.labels / split / "labels.npy"
        return ChunkDataset(FrameStore(self.features / split, labels), self.chunk)

    @override
    def train_dataloader(self) -> DataLoader[Chunk | AdaptedChunk]:
        chunks = self.dataset("train")
        place = self.trainer.distributed_sampler_kwargs if self.trainer else None
        sampler = BlockSampler(chunks, **(place or {}), seed=self.seed)
        return self._loader("train", chunks, sampler)

    @override
    def val_dataloader(self) -> DataLoader[Chunk | AdaptedChunk]:
        return self._loader("dev", self.dataset("dev"), None)

    def _loader(
        self, split: str, chunks: ChunkDataset, sampler: BlockSampler | None
    ) -> DataLoader[Chunk | AdaptedChunk]:
        # The seed of worker processes, which draw nothing, is not drawn from the common
        # generator: a continued training starts them at another place in its draws.
        own = torch.Generator().manual_seed(self.seed) if self.num_workers else None
        return DataLoader(
            self._adapted(split, chunks),
            self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=as_it_is,
            pin_memory=self.pin_memory,
            persistent_workers=self.num_workers > 0,
            generator=own,
        )

    def _adapted(
        self, split: str, chunks: ChunkDataset
    ) -> ChunkDataset | AdaptedChunkDataset:
        if self.streams is None:
            return chunks
        return AdaptedChunkDataset(chunks, Streams(self.streams / split, chunks.store))
