"""Streams beside stored frames: found by utterance and frame, joined in the model."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_adpsgd.asr.frames.data import (
    AdaptedChunk,
    AdaptedChunkDataset,
    ChunkDataset,
    SpeechData,
)
from lightning_adpsgd.asr.frames.store import (
    IGNORE,
    FrameStore,
    StoreError,
    write_labels,
)
from lightning_adpsgd.asr.frames.streams import RowStore, RowWriter, Streams
from lightning_adpsgd.asr.frames.writing import FrameWriter
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.sound.features import CONTEXT, with_differences
from tests.asr.small_disk import on_a_small_disk

LENGTHS = [60, 5, 21]
DIMS, FMLLR, IVECTOR = 2, 4, 3
STATES = 7


def _write_frames(folder: Path, dims: int, ids: list[str], lengths: list[int]) -> None:
    writer = FrameWriter(folder, ids, lengths, dims, "float32")
    writer.create()
    for i, length in enumerate(lengths):
        random = np.random.default_rng(i)
        writer.put(i, random.standard_normal((length, dims)).astype(np.float32))
    writer.finish()


def _ids(lengths: list[int]) -> list[str]:
    return [f"u{i}" for i in range(len(lengths))]


def _rows(num: int) -> np.ndarray:
    return np.random.default_rng(9).standard_normal((num, IVECTOR)).astype(np.float32)


def _write_rows(folder: Path, rows: np.ndarray, first: list[int], period: int) -> None:
    writer = RowWriter(folder, np.array(first), len(rows), IVECTOR, period)
    for row in range(len(rows) - 1, -1, -1):
        writer.put(row, rows[row : row + 1])
    writer.finish()


def _split(root: Path, split: str, period: int = 10, fmllr: bool = True) -> FrameStore:
    """A split with both streams; its second utterance has no labels."""
    _write_frames(root / "base" / split, DIMS, _ids(LENGTHS), LENGTHS)
    if fmllr:
        _write_frames(root / "beside" / split / "fmllr", FMLLR, _ids(LENGTHS), LENGTHS)
    first, num = ([0, 6, 7], 10) if period else ([0, 1, 0], 2)
    _write_rows(root / "beside" / split / "ivector", _rows(num), first, period)
    store = FrameStore(root / "base" / split)
    labels = root / "align" / split / "labels.npy"
    labels.parent.mkdir(parents=True, exist_ok=True)
    aligned = [(f"u{i}", np.full(LENGTHS[i], i)) for i in (0, 2)]
    write_labels(labels, store, aligned)
    return FrameStore(root / "base" / split, labels)


def _chunks(store: FrameStore, streams: Streams) -> AdaptedChunkDataset:
    return AdaptedChunkDataset(ChunkDataset(store, 21), streams)


def _at(rows: RowStore, position: int, frame: int) -> torch.Tensor:
    return rows.at(np.array([position]), np.array([frame]))[0]


def test_a_row_is_that_of_its_frame(tmp_path: Path):
    _split(tmp_path, "train")
    rows = RowStore(tmp_path / "beside/train/ivector")
    expected = torch.from_numpy(_rows(10))
    assert torch.equal(_at(rows, 0, 0), expected[0])
    assert torch.equal(_at(rows, 0, 59), expected[5])
    assert torch.equal(_at(rows, 2, 20), expected[9])
    along = rows.along(2, 21)
    assert torch.equal(along, expected[[7] * 10 + [8] * 10 + [9]])


def test_utterances_of_one_side_share_a_row(tmp_path: Path):
    _split(tmp_path, "train", period=0)
    rows = RowStore(tmp_path / "beside/train/ivector")
    assert torch.equal(_at(rows, 0, 59), _at(rows, 2, 0))
    assert torch.equal(rows.along(1, 5), torch.from_numpy(_rows(2))[[1] * 5])


@pytest.mark.parametrize("period", [0, 10])
def test_chunks_bring_the_streams_of_their_frames(tmp_path: Path, period: int):
    store = _split(tmp_path, "train", period)
    streams = Streams(tmp_path / "beside/train", store)
    dataset = _chunks(store, streams)
    assert len(dataset) == 4
    starts = [(0, 0), (0, 21), (0, 42), (2, 0)]
    for index, (position, start) in enumerate(starts):
        chunk = dataset[index]
        valid = int((chunk.labels != IGNORE).sum())
        whole = streams.utterance(position)
        assert torch.equal(chunk.fmllr[:valid], whole.fmllr[start : start + valid])
        assert torch.equal(chunk.fmllr[valid:], whole.fmllr[-1:].repeat(21 - valid, 1))
        assert torch.equal(chunk.ivector, whole.ivector[start])


def test_an_absent_stream_has_no_dims(tmp_path: Path):
    store = _split(tmp_path, "train", fmllr=False)
    streams = Streams(tmp_path / "beside/train", store)
    assert streams.dims == IVECTOR
    dataset = _chunks(store, streams)
    batch = dataset.__getitems__([0, 1])
    assert batch.fmllr.shape == (2, 21, 0)
    assert batch.ivector.shape == (2, IVECTOR)
    assert streams.utterance(1).fmllr.shape == (5, 0)


def _model(input_size: int) -> AcousticModel:
    torch.manual_seed(0)
    return AcousticModel(
        STATES, input_size=input_size, num_layers=1, hidden_size=5, bottleneck_size=4
    )


def test_the_model_joins_deltas_fmllr_and_the_repeated_ivector(tmp_path: Path):
    store = _split(tmp_path, "train")
    streams = Streams(tmp_path / "beside/train", store)
    dataset = _chunks(store, streams)
    batch = dataset.__getitems__([0, 1, 3])
    model = _model(3 * DIMS + streams.dims)
    logits, _ = model._evaluate(batch)
    for row, (position, start) in enumerate([(0, 0), (0, 21), (2, 0)]):
        beside = streams.utterance(position)
        own = slice(start, start + 21)
        parts = [
            with_differences(store.frames(position))[own],
            beside.fmllr[own],
            beside.ivector[start].repeat(21, 1),
        ]
        expected = model(torch.cat(parts, dim=1)[None])[0]
        torch.testing.assert_close(logits[row], expected)


def test_an_utterance_of_one_window_is_what_its_chunk_is_in_training(tmp_path: Path):
    store = _split(tmp_path, "train")
    streams = Streams(tmp_path / "beside/train", store)
    model = _model(3 * DIMS + streams.dims)
    batch = _chunks(store, streams).__getitems__([3])
    expected = model._evaluate(batch)[0][0].log_softmax(-1)
    found = model.log_posteriors(store.frames(2), *streams.utterance(2))
    torch.testing.assert_close(found, expected)


def test_a_window_takes_the_ivector_of_its_first_frame(tmp_path: Path):
    store = _split(tmp_path, "train", fmllr=False)
    streams = Streams(tmp_path / "beside/train", store)
    model = _model(3 * DIMS + IVECTOR)
    _, ivectors = streams.utterance(0)
    changed = ivectors.clone()
    changed[59] = 100.0  # no window begins at the last frame
    frames = store.frames(0)
    found = model.log_posteriors(frames, None, ivectors)
    torch.testing.assert_close(model.log_posteriors(frames, None, changed), found)
    assert not torch.equal(model.log_posteriors(frames, None, ivectors * 2), found)


def test_the_papers_input_is_260_and_its_model_trains_on_it(tmp_path: Path):
    dims = {"fmllr": 40, "ivector": 100, "base": 40}
    random = torch.Generator().manual_seed(0)
    batch = AdaptedChunk(
        torch.randn(2, 21 + 2 * CONTEXT, dims["base"], generator=random),
        torch.zeros(2, 21, dtype=torch.int64),
        torch.randn(2, 21, dims["fmllr"], generator=random),
        torch.randn(2, dims["ivector"], generator=random),
    )
    model = _model(260)
    logits, _ = model._evaluate(batch)
    assert logits.shape == (2, 21, STATES)
    logits.sum().backward()
    gradient = dict(model.named_parameters())["lstm.weight_ih_l0"].grad
    assert gradient is not None
    assert bool((gradient.abs().sum(0) > 0).all())  # every one of the 260 is used


def test_another_width_than_the_models_is_refused():
    chunk = torch.zeros(1, 29, 2), torch.zeros(1, 21), torch.zeros(1, 21, 5)
    with pytest.raises(ValueError, match=r"`input_size` 12 .* less the 8 of streams"):
        _model(12)._evaluate((*chunk, torch.zeros(1, 3)))


def test_the_loaders_give_batches_with_streams(tmp_path: Path):
    for split in ("train", "dev"):
        _split(tmp_path, split)
    data = SpeechData(
        tmp_path / "base",
        tmp_path / "align",
        batch_size=4,
        streams=tmp_path / "beside",
    )
    (batch,) = data.val_dataloader()
    assert isinstance(batch, AdaptedChunk)
    assert batch.fmllr.shape == (4, 21, FMLLR)
    assert batch.ivector.shape == (4, IVECTOR)


def test_streams_are_pickled_as_their_paths(tmp_path: Path):
    store = _split(tmp_path, "train")
    dataset = _chunks(store, Streams(tmp_path / "beside/train", store))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 3000
    assert torch.equal(pickle.loads(pickled)[2].ivector, dataset[2].ivector)


def test_streams_of_other_utterances_are_refused(tmp_path: Path):
    store = _split(tmp_path, "train")
    folder = tmp_path / "beside/train/fmllr"
    _write_frames(folder, FMLLR, ["u0", "u2", "u1"], LENGTHS)
    with pytest.raises(StoreError, match=r"fmllr: expected the utterances of"):
        Streams(tmp_path / "beside/train", store)


def test_streams_of_other_lengths_are_refused(tmp_path: Path):
    store = _split(tmp_path, "train")
    folder = tmp_path / "beside/train/fmllr"
    _write_frames(folder, FMLLR, _ids(LENGTHS), [60, 6, 21])
    with pytest.raises(StoreError, match=r"u1 has 6 frames, in .* 5; adapt again"):
        Streams(tmp_path / "beside/train", store)


@pytest.mark.parametrize(
    ("first", "num_rows", "problem"),
    [([0, 6], 10, "for 3 utterances"), ([0, 6, 7], 9, "expected 10 rows, found 9")],
)
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, first, num_rows, problem):
    store = _split(tmp_path, "train")
    _write_rows(tmp_path / "beside/train/ivector", _rows(num_rows), first, 10)
    with pytest.raises(StoreError, match=problem):
        Streams(tmp_path / "beside/train", store)


def test_rows_that_are_not_finite_or_too_many_are_refused(tmp_path: Path):
    writer = RowWriter(tmp_path, np.array([0]), 3, 2, 0)
    for beyond in (np.nan, 1e39):  # the second is finite, but not as it is written
        with pytest.raises(ValueError, match="rows from 1 on must be finite"):
            writer.put(1, np.full((1, 2), beyond))
    with pytest.raises(ValueError, match=r"of 2 values and end at row 3, got .*2, 2"):
        writer.put(2, np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"of 2 values and end at row 3, got .*1, 1"):
        writer.put(2, np.zeros((1, 1)))


def test_a_full_disk_is_named_when_rows_are_written(tmp_path: Path):
    def write() -> None:
        writer = RowWriter(tmp_path / "disk", np.array([0]), 40_000, 1, 1)
        writer.put(0, np.ones((40_000, 1)))

    error = on_a_small_disk(tmp_path / "disk", write).error
    assert "No space left on device: " in error
    assert "disk/.rows.partial.npy" in error


def test_rows_that_are_not_finished_are_not_there(tmp_path: Path):
    RowWriter(tmp_path, np.array([0]), 3, 2, 0).put(0, np.ones((3, 2)))
    with pytest.raises(StoreError, match=r"rows\.npy: expected an array"):
        RowStore(tmp_path)


def test_a_writer_of_no_rows_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"`num_rows`.* got 0, 2 and 0"):
        RowWriter(tmp_path / "none", np.array([0]), 0, 2, 0)
    assert not (tmp_path / "none").exists()


def test_a_missing_file_is_named(tmp_path: Path):
    store = _split(tmp_path, "train")
    (tmp_path / "beside/train/ivector/rows.npy").unlink()
    with pytest.raises(StoreError, match=r"rows\.npy: expected an array"):
        Streams(tmp_path / "beside/train", store)
