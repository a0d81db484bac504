"""Chunks cover every labelled frame once and see what the whole utterance would see."""

import itertools
import pickle
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from lightning_adpsgd.asr.frames.data import Chunk, ChunkDataset, SpeechData
from lightning_adpsgd.asr.frames.store import IGNORE, FrameStore, write_labels
from lightning_adpsgd.asr.frames.writing import FrameWriter
from lightning_adpsgd.asr.sound.features import (
    CONTEXT,
    add_differences,
    with_differences,
)

LENGTHS = [60, 21, 5, 1, 100, 42]
UNALIGNED = 4


def write_store(folder: Path, labels: Path) -> FrameStore:
    ids = [f"u{i}" for i in range(len(LENGTHS))]
    writer = FrameWriter(folder, ids, LENGTHS, 2, "float32")
    writer.create()
    generator = np.random.default_rng(0)
    for i, length in enumerate(LENGTHS):
        writer.put(i, generator.standard_normal((length, 2)).astype(np.float32))
    writer.finish()
    labels.parent.mkdir(parents=True, exist_ok=True)
    # the label of a frame is its place in the array
    spans = FrameStore(folder).spans
    aligned = [(ids[i], np.arange(*spans[i])) for i in range(6) if i != UNALIGNED]
    write_labels(labels, FrameStore(folder), aligned)
    return FrameStore(folder, labels)


@pytest.fixture
def store(tmp_path: Path) -> FrameStore:
    return write_store(tmp_path / "train", tmp_path / "align/train/labels.npy")


@pytest.mark.parametrize("chunk", [1, 4, 21, 200])
def test_every_labelled_frame_occurs_exactly_once(store: FrameStore, chunk: int):
    dataset = ChunkDataset(store, chunk)
    labels = torch.cat([dataset[i].labels for i in range(len(dataset))])
    found = labels[labels != IGNORE].tolist()
    wanted = [range(*store.spans[i]) for i in range(len(store)) if i != UNALIGNED]
    assert found == list(itertools.chain(*wanted))


def test_the_number_of_chunks_rounds_up_per_utterance(store: FrameStore):
    assert len(ChunkDataset(store, 21)) == 3 + 1 + 1 + 1 + 2


@pytest.mark.parametrize("chunk", [1, 4, 21, 200])
def test_differences_of_a_chunk_are_those_of_the_utterance(
    store: FrameStore, chunk: int
):
    whole = torch.zeros(store.num_frames, 6)
    for i, (start, end) in enumerate(store.spans):
        whole[start:end] = with_differences(store.frames(i))
    for frames, labels in map(ChunkDataset(store, chunk).__getitem__, range(5)):
        valid = labels != IGNORE
        assert frames.shape == (chunk + 2 * CONTEXT, 2)
        torch.testing.assert_close(add_differences(frames)[valid], whole[labels[valid]])


@pytest.mark.parametrize("chunk", [1, 4, 21, 200])
def test_a_batch_gathered_at_once_is_that_of_single_chunks(
    store: FrameStore, chunk: int
):
    dataset = ChunkDataset(store, chunk)
    indices = [*range(len(dataset)), 0, len(dataset) - 1, 2]
    batch = dataset.__getitems__(indices)
    singles = [dataset[index] for index in indices]
    assert torch.equal(batch.frames, torch.stack([one.frames for one in singles]))
    assert torch.equal(batch.labels, torch.stack([one.labels for one in singles]))


def test_beyond_an_utterance_its_outermost_frames_are_repeated(store: FrameStore):
    frames, _ = ChunkDataset(store, 21)[3]  # the second utterance, of 21 frames
    own = store.frames(1)
    assert torch.equal(frames[:CONTEXT], own[:1].expand(CONTEXT, 2))
    assert torch.equal(frames[CONTEXT:-CONTEXT], own)
    assert torch.equal(frames[-CONTEXT:], own[-1:].expand(CONTEXT, 2))


def test_the_index_of_chunks_is_kept_and_mapped(store: FrameStore):
    assert store.labels_path is not None
    before = len(ChunkDataset(store, 21))
    places, rows = (
        store.labels_path.with_name(f"labels.{name}-21.npy")
        for name in ("places", "rows")
    )
    first, last = np.asarray(store.spans)[[0, 1, 2, 3, 5]].T
    found = np.load(places).T.tolist()
    assert found[:2] == [[0, 3, 4, 5, 6], [0, 1, 2, 3, 5]]
    assert found[2:] == [first.tolist(), last.tolist()]
    assert np.load(rows).tolist() == [0, 0, 0, 1, 2, 3, 4, 4]
    np.save(rows, np.load(rows)[:4])  # so that it shows whether it is read
    assert (before, len(ChunkDataset(store, 21))) == (8, 4)


def test_other_labels_make_the_index_anew(store: FrameStore):
    assert store.labels_path is not None
    assert len(ChunkDataset(store, 21)) == 8
    write_labels(store.labels_path, store, [("u2", np.arange(5))])
    assert len(ChunkDataset(FrameStore(store.folder, store.labels_path), 21)) == 1


def test_an_index_that_cannot_be_kept_is_counted_each_time(
    store: FrameStore, monkeypatch: pytest.MonkeyPatch
):
    def refuse(path: Path, array: np.ndarray) -> None:
        raise PermissionError(path)

    monkeypatch.setattr("lightning_adpsgd.asr.frames.store.save_array", refuse)
    assert [len(ChunkDataset(store, 21)) for _ in range(2)] == [8, 8]


def test_a_data_set_pickles_without_its_frames(store: FrameStore):
    dataset = ChunkDataset(store, 21)
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[1].frames, dataset[1].frames)


def test_the_filling_of_the_last_chunk_is_ignored(store: FrameStore):
    frames, labels = ChunkDataset(store, 21)[2]
    assert labels.tolist() == [*range(42, 60), IGNORE, IGNORE, IGNORE]
    assert torch.equal(frames[-4], store.frames(0)[-1])


@pytest.mark.parametrize("index", [-1, 8])
def test_a_chunk_that_is_not_there_is_refused(store: FrameStore, index: int):
    with pytest.raises(IndexError, match=r"`index` must be below 8"):
        ChunkDataset(store, 21)[index]


def test_a_store_without_any_labels_is_refused(store: FrameStore, tmp_path: Path):
    path = tmp_path / "none.npy"
    write_labels(path, FrameStore(store.folder), [])
    with pytest.raises(ValueError, match=r"none\.npy: no utterance has labels"):
        ChunkDataset(FrameStore(store.folder, path))


def test_the_loaders_give_batches_in_an_order_of_the_seed(tmp_path: Path):
    for split in ("train", "dev"):
        write_store(tmp_path / split, tmp_path / f"align/{split}/labels.npy")

    def order(seed: int) -> list[int]:
        data = SpeechData(tmp_path, tmp_path / "align", batch_size=3, seed=seed)
        batches = list(data.train_dataloader())
        assert all(isinstance(batch, Chunk) for batch in batches)
        assert batches[0].frames.shape == (3, 21 + 2 * CONTEXT, 2)
        return torch.cat([batch.labels[:, 0] for batch in batches]).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))


class Counter(L.LightningModule):
    """Notes which chunks it was given; learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []
        self.validated: list[int] = []

    def training_step(self, batch: Chunk) -> torch.Tensor:
        self.seen += batch.labels[:, 0].tolist()
        return self.weight * batch.frames.mean()

    def validation_step(self, batch: Chunk) -> None:
        self.validated += batch.labels[:, 0].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_lightning_trains_on_every_chunk_once_an_epoch(tmp_path: Path):
    for split in ("train", "dev"):
        write_store(tmp_path / split, tmp_path / f"align/{split}/labels.npy")
    model = Counter()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = SpeechData(tmp_path, tmp_path / "align", batch_size=3)
    trainer.fit(model, datamodule=data)
    assert sorted(model.seen) == model.validated
    assert len(model.seen) == 8


def test_processes_that_load_give_the_same_batches(tmp_path: Path):
    for split in ("train", "dev"):
        write_store(tmp_path / split, tmp_path / f"align/{split}/labels.npy")

    def labels(num_workers: int) -> list[torch.Tensor]:
        data = SpeechData(tmp_path, tmp_path / "align", num_workers=num_workers)
        return [batch.labels for batch in data.train_dataloader()]

    for alone, ahead in zip(labels(0), labels(1), strict=True):
        assert torch.equal(alone, ahead)
