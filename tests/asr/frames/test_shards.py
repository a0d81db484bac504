"""Frames in several files are those of one file; a bad file is named."""

import gc
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_adpsgd.asr.frames.data import ChunkDataset
from lightning_adpsgd.asr.frames.shards import Shards
from lightning_adpsgd.asr.frames.store import (
    FrameStore,
    StoreError,
    stored_frames,
    write_labels,
)
from lightning_adpsgd.asr.frames.writing import FrameWriter, is_stored
from lightning_adpsgd.asr.parallel import fork_map

LENGTHS = [9_000, 20_000, 1, 30_000, 500]  # the second and fourth are in two files
SHARD_BYTES = 200_000  # of 12 bytes a frame: 16,384 frames a file
NUM_SHARDS = 4


def _frames(position: int) -> np.ndarray:
    generator = np.random.default_rng(position)
    return generator.standard_normal((LENGTHS[position], 3)).astype(np.float32)


def _writer(folder: Path, shard_bytes: int = SHARD_BYTES) -> FrameWriter:
    ids = [f"u{position}" for position in range(len(LENGTHS))]
    return FrameWriter(folder, ids, LENGTHS, 3, "float32", shard_bytes)


def _written(folder: Path, shard_bytes: int = SHARD_BYTES) -> Path:
    writer = _writer(folder, shard_bytes)
    writer.create()
    for position in reversed(range(len(LENGTHS))):
        writer.put(position, _frames(position))
    writer.finish()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FrameStore:
    return FrameStore(_written(tmp_path_factory.mktemp("whole"), 1 << 30))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _written(tmp_path / "shards")


def _mapped_files() -> str:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not tell what is mapped")
    return maps.read_text()


def test_files_are_of_bounded_size_and_hold_all(folder: Path):
    sizes = [path.stat().st_size for path in sorted(folder.glob("frames.*.bin"))]
    assert len(sizes) == NUM_SHARDS
    assert sizes[:-1] == [16_384 * 12] * 3
    assert sum(sizes) == sum(LENGTHS) * 12
    assert not (folder / "frames.npy").exists()


def test_a_file_is_a_multiple_of_the_pages_of_all_systems():
    for dims in (1, 3, 13, 40, 100):
        for dtype in ("float16", "float32"):
            shards = Shards.of(10**9, dims, np.dtype(dtype), 10**6)
            assert shards.size(0) % 65_536 == 0
            assert sum(map(shards.size, range(shards.num_shards))) == (
                10**9 * dims * np.dtype(dtype).itemsize
            )


def test_the_frames_are_those_of_one_file(folder: Path, whole: FrameStore):
    store = FrameStore(folder)
    assert (len(store), store.num_frames, store.dims) == (5, sum(LENGTHS), 3)
    for position in range(len(LENGTHS)):
        assert torch.equal(store.frames(position), whole.frames(position))
    starts = np.arange(-5, store.num_frames + 5, 7)
    np.testing.assert_array_equal(
        store.frame_windows(starts, 29), whole.frame_windows(starts, 29)
    )
    np.testing.assert_array_equal(store.frames_at(starts), whole.frames_at(starts))


def test_batches_are_those_of_one_file(folder: Path, whole: FrameStore, tmp_path: Path):
    labels = tmp_path / "labels.npy"
    all_labelled = [(f"u{i}", np.arange(n)) for i, n in enumerate(LENGTHS)]
    write_labels(labels, whole, all_labelled)
    batches = [
        ChunkDataset(FrameStore(where, labels)).__getitems__(list(range(0, 2800, 3)))
        for where in (folder, whole.folder)
    ]
    assert torch.equal(batches[0].frames, batches[1].frames)
    assert torch.equal(batches[0].labels, batches[1].labels)


def test_processes_write_into_the_same_files(tmp_path: Path, whole: FrameStore):
    writer = _writer(tmp_path)
    writer.create()
    positions = range(len(LENGTHS))
    work = [(writer.place(position), position) for position in positions]
    list(fork_map(lambda job: job[0].put(_frames(job[1])), work, 2))
    writer.finish()
    found = FrameStore(tmp_path).frame_range(0, sum(LENGTHS))
    assert torch.equal(found, whole.frame_range(0, sum(LENGTHS)))


def test_an_interrupted_writing_goes_on(tmp_path: Path, whole: FrameStore):
    first, second = _writer(tmp_path), _writer(tmp_path)
    first.create()
    for position in (0, 1, 4):
        first.put(position, _frames(position))
    assert second.is_begun()
    assert not is_stored(tmp_path)
    second.create()
    for position in (2, 3):
        second.put(position, _frames(position))
    second.finish()
    assert stored_frames(tmp_path) == sum(LENGTHS)
    assert torch.equal(FrameStore(tmp_path).frames(1), whole.frames(1))


def test_writing_for_another_size_begins_anew(tmp_path: Path):
    _writer(tmp_path).create()
    assert not _writer(tmp_path, SHARD_BYTES * 2).is_begun()


def test_a_store_of_one_file_takes_the_place_of_shards(folder: Path):
    assert FrameStore(_written(folder, 1 << 30)).num_frames == sum(LENGTHS)
    assert not (folder / "frames.json").exists()


def test_a_lost_shard_is_named(folder: Path):
    (folder / "frames.0002.bin").unlink()
    with pytest.raises(StoreError, match=r"frames\.0002\.bin: shard 2 of 4 cannot be"):
        FrameStore(folder)


def test_a_truncated_shard_is_named_with_its_sizes(folder: Path):
    path = folder / "frames.0001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    expected = r"frames\.0001\.bin: .* expected 196608 bytes, found 196607"
    with pytest.raises(StoreError, match=expected):
        FrameStore(folder)


def test_a_shard_that_is_lost_after_opening_is_named(folder: Path):
    store = FrameStore(folder)
    (folder / "frames.0003.bin").unlink()
    with pytest.raises(StoreError, match=r"frames\.0003\.bin: cannot be opened"):
        store.frames(0)


@pytest.mark.parametrize(
    "plan",
    [
        "[",
        "[]",
        "{}",
        {"num_rows": 0, "dims": 3, "dtype": "float32", "rows_per_shard": 16_384},
        {"num_rows": 9, "dims": 3, "dtype": "float32", "rows_per_shard": 0},
        {"num_rows": 9, "dims": 3, "dtype": "float32", "rows_per_shard": 5},
        {"num_rows": 9, "dims": 3, "dtype": "number", "rows_per_shard": 16_384},
    ],
)
def test_a_damaged_plan_is_refused(folder: Path, plan: str | dict):
    text = plan if isinstance(plan, str) else json.dumps(plan)
    (folder / "frames.json").write_text(text)
    with pytest.raises(StoreError, match=r"frames\.json: "):
        FrameStore(folder)


def test_files_are_opened_when_a_frame_is_asked_for(folder: Path):
    store = FrameStore(folder)
    assert "frames.0000.bin" not in _mapped_files()
    store.frames(0)
    maps = _mapped_files()
    assert all(f"frames.{number:04d}.bin" in maps for number in range(NUM_SHARDS))


def test_frames_outlive_their_store_and_are_freed_after_it(
    folder: Path, whole: FrameStore
):
    frames = FrameStore(folder).frames(1)
    gc.collect()
    assert torch.equal(frames, whole.frames(1))
    del frames
    gc.collect()
    assert "frames.0000.bin" not in _mapped_files()


def test_a_pickled_store_holds_paths_and_no_data(folder: Path, whole: FrameStore):
    store = FrameStore(folder)
    store.frames(0)
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert torch.equal(pickle.loads(data).frames(3), whole.frames(3))
