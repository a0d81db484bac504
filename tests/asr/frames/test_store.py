"""The frame store: what goes in comes out, whole or not at all, without being read."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_adpsgd.asr.frames.store import (
    IGNORE,
    FrameStore,
    StoreError,
    write_labels,
)
from lightning_adpsgd.asr.frames.writing import FrameWriter, save_array
from tests.asr.small_disk import on_a_small_disk

LENGTHS = {"a": 30, "b": 1, "c": 45}


def _frames(name: str) -> np.ndarray:
    generator = np.random.default_rng(ord(name))
    return generator.standard_normal((LENGTHS[name], 3)).astype(np.float32)


@pytest.fixture
def store(tmp_path: Path) -> FrameStore:
    writer = FrameWriter(tmp_path, list(LENGTHS), list(LENGTHS.values()), 3, "float32")
    writer.create()
    for position, name in reversed(list(enumerate(LENGTHS))):
        writer.put(position, _frames(name))
    writer.finish()
    return FrameStore(tmp_path)


def test_frames_come_back_by_position_and_name(store: FrameStore):
    assert (len(store), store.num_frames, store.dims) == (3, 76, 3)
    for name in LENGTHS:
        found = store.frames(store.position(name))
        np.testing.assert_array_equal(found.numpy(), _frames(name))
    assert "a" in store
    assert "z" not in store


def test_frames_are_views_of_the_mapped_file(store: FrameStore):
    whole = store.frame_range(0, store.num_frames)
    part = store.frames(2)
    assert part.data_ptr() == whole.data_ptr() + 31 * 3 * 4


def test_nothing_is_there_before_the_end(tmp_path: Path):
    writer = FrameWriter(tmp_path, ["a"], [30], 3)
    writer.create()
    writer.put(0, _frames("a"))
    with pytest.raises(StoreError, match=r"frames\.npy: expected an array"):
        FrameStore(tmp_path)


def test_an_interrupted_writing_goes_on(tmp_path: Path):
    first, second = (
        FrameWriter(tmp_path, ["a", "c"], [30, 45], 3, "float32") for _ in range(2)
    )
    first.create()
    first.put(0, _frames("a"))
    second.create()
    second.put(1, _frames("c"))
    second.finish()
    np.testing.assert_array_equal(FrameStore(tmp_path).frames(0), _frames("a"))


def test_a_lost_utterance_leaves_a_gap(tmp_path: Path):
    writer = FrameWriter(tmp_path, ["a", "b", "c"], [30, 1, 45], 3, "float32")
    writer.create()
    writer.put(0, _frames("a"))
    writer.put(2, _frames("c"))
    writer.finish([True, False, True])
    store = FrameStore(tmp_path)
    assert list(store.ids) == ["a", "c"]
    np.testing.assert_array_equal(store.frames(1), _frames("c"))


def test_frames_of_another_number_are_refused(tmp_path: Path):
    writer = FrameWriter(tmp_path, ["a"], [29], 3)
    writer.create()
    with pytest.raises(
        ValueError, match=r"a: expected frames \(29, 3\), got \(30, 3\)"
    ):
        writer.put(0, _frames("a"))


def test_frames_that_are_not_finite_are_refused(tmp_path: Path):
    writer = FrameWriter(tmp_path, ["a"], [30], 3)
    writer.create()
    frames = _frames("a")
    frames[3, 1] = np.nan
    with pytest.raises(ValueError, match="a: `frames` must be finite"):
        writer.put(0, frames)


def test_frames_beyond_the_largest_half_precision_number_are_refused(tmp_path: Path):
    writer = FrameWriter(tmp_path, ["a"], [2], 1)
    writer.create()
    writer.put(0, np.full((2, 1), 65_504.0))
    with pytest.raises(ValueError, match="a: `frames` must be finite in float16"):
        writer.put(0, np.full((2, 1), 65_520.0))


def test_a_full_disk_is_named_when_frames_are_written(tmp_path: Path):
    def write() -> None:
        writer = FrameWriter(tmp_path / "disk", ["a"], [40_000], 2)
        writer.create()
        writer.put(0, np.ones((40_000, 2)))

    error = on_a_small_disk(tmp_path / "disk", write).error
    assert "No space left on device: " in error
    assert "disk/.frames.partial.npy" in error


def test_an_array_that_is_being_laid_out_is_not_begun(tmp_path: Path):
    writer = FrameWriter(tmp_path, ["a"], [30], 3)
    partial = tmp_path / ".frames.partial.npy"
    for found in (b"", b"\x93NUMPY"):
        partial.write_bytes(found)
        assert not writer.is_begun()
    writer.create()
    assert writer.is_begun()


def test_an_utterance_without_frames_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="must be at least 1, got -3 of b"):
        FrameWriter(tmp_path, ["a", "b", "c"], [30, -3, 0], 3)


@pytest.mark.parametrize("lengths", [[], [3, 0], [3]])
def test_lengths_that_do_not_fit_are_refused(tmp_path: Path, lengths: list[int]):
    with pytest.raises(ValueError, match="length"):
        FrameWriter(tmp_path, ["a", "b"][: max(1, len(lengths) + 1)], lengths, 3)


@pytest.mark.parametrize("left", [-40, 20, 0])
def test_a_truncated_array_is_refused_with_its_path(store: FrameStore, left: int):
    path = store.folder / "frames.npy"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(StoreError, match=r"frames\.npy: broken or truncated"):
        FrameStore(store.folder)


def test_labels_lie_beside_the_frames(store: FrameStore, tmp_path: Path):
    path = tmp_path / "labels.npy"
    alignments = [("c", np.arange(45)), ("a", np.full(30, 7))]
    assert write_labels(path, store, alignments) == 75
    labelled = FrameStore(store.folder, path)
    assert labelled.labels(0).tolist() == [7] * 30
    assert labelled.labels(1).tolist() == [IGNORE]
    assert labelled.labels(2).tolist() == list(range(45))
    assert labelled.labelled.tolist() == [True, False, True]


@pytest.mark.parametrize("num_labels", [0, 40_000])
def test_a_full_disk_is_named_when_labels_are_written(tmp_path: Path, num_labels: int):
    writer = FrameWriter(tmp_path / "store", ["a"], [40_000], 1)
    writer.create()
    writer.finish()
    labels = [("a", np.ones(num_labels, int))] if num_labels else []

    def write() -> None:
        write_labels(tmp_path / "disk/labels.npy", FrameStore(writer.folder), labels)

    error = on_a_small_disk(tmp_path / "disk", write).error
    assert "No space left on device: " in error
    assert "disk/labels.npy" in error


def test_labels_of_another_number_than_frames_are_refused(
    store: FrameStore, tmp_path: Path
):
    with pytest.raises(
        ValueError, match="a: expected 30 labels, one per frame, got 29"
    ):
        write_labels(tmp_path / "labels.npy", store, [("a", np.zeros(29, int))])
    assert not (tmp_path / "labels.npy").exists()


def test_labels_of_another_store_are_refused(store: FrameStore, tmp_path: Path):
    writer = FrameWriter(tmp_path / "other", ["a"], [30], 3)
    writer.create()
    writer.finish()
    write_labels(tmp_path / "labels.npy", FrameStore(tmp_path / "other"), [])
    with pytest.raises(StoreError, match="expected 76 labels, one per frame, found 30"):
        FrameStore(store.folder, tmp_path / "labels.npy")


def test_a_pickled_store_holds_paths_and_no_data(store: FrameStore):
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert torch.equal(pickle.loads(data).frames(0), store.frames(0))


def test_opening_reads_no_frames(tmp_path: Path):
    # 400 GB that exist as a hole only: reading them would end the test's time.
    writer = FrameWriter(tmp_path, ["a", "b"], [5 * 10**9, 8], 40, "float16")
    writer.create()
    writer.finish()
    store = FrameStore(tmp_path)
    assert store.num_frames == 5 * 10**9 + 8
    assert torch.equal(store.frames(1), torch.zeros(8, 40, dtype=torch.float16))


@pytest.mark.parametrize("length", [1, 9, 76, 80])
def test_windows_within_utterances_repeat_their_outermost_frames(
    store: FrameStore, length: int
):
    """In an array that is shorter than a window, too."""
    whole = store.frame_range(0, store.num_frames).numpy()
    first, last = np.repeat(np.asarray(store.spans), 30, axis=0).T
    begin = first + np.tile(np.arange(-10, 20), len(store))
    found = store.frames_within(begin, length, first, last)
    rows = (begin[:, None] + np.arange(length)).clip(first[:, None], last[:, None] - 1)
    np.testing.assert_array_equal(found, whole[rows])


def test_an_array_may_be_saved_by_two_machines_at_once(tmp_path, monkeypatch):
    """Their processes have one number where each is the first of a container."""
    path, array, save = tmp_path / "rows.npy", np.arange(9), np.save

    def saves_beside_another(file, values):
        save(file, values)
        monkeypatch.setattr(np, "save", save)
        save_array(path, array)

    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(np, "save", saves_beside_another)
    save_array(path, array)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    np.testing.assert_array_equal(np.load(path), array)


def test_a_full_disk_is_named_when_an_array_is_saved(tmp_path: Path):
    path = tmp_path / "disk/rows.npy"
    error = on_a_small_disk(path.parent, lambda: save_array(path, np.ones(40_000)))
    assert f"No space left on device: '{path}'" in error.error
