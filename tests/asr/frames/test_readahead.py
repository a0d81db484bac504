"""Stretches of a file are asked for whole, once, and within the file."""

import mmap
from pathlib import Path

import numpy as np

from lightning_adpsgd.asr.frames.readahead import STRETCH, ReadAhead


class Records:
    """Writes down which bytes it was asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[tuple[int, int]] = []

    def madvise(self, option: int, start: int, length: int) -> None:
        assert option == mmap.MADV_WILLNEED
        self.asked.append((start, start + length))

    def __len__(self) -> int:
        return self.size


def test_a_stretch_is_asked_for_whole_and_once() -> None:
    mapping = Records(10 * STRETCH)
    ahead = ReadAhead(mapping)
    ahead.want(np.array([5 * STRETCH + 7, 3, 5 * STRETCH, 9]))
    ahead.want(np.array([STRETCH - 1, 5 * STRETCH + 100]))
    assert mapping.asked == [(0, STRETCH), (5 * STRETCH, 6 * STRETCH)]


def test_the_last_stretch_ends_with_the_file() -> None:
    mapping = Records(STRETCH + 100)
    ReadAhead(mapping).want(np.array([STRETCH + 99]))
    assert mapping.asked == [(STRETCH, STRETCH + 100)]


def test_what_was_forgotten_is_asked_for_again() -> None:
    mapping = Records(1 << 62)
    ahead = ReadAhead(mapping)
    far = STRETCH << 18  # has the same place in its memory as 0
    for place in (0, far, 0):
        ahead.want(np.array([place]))
    assert [start for start, _ in mapping.asked] == [0, far, 0]


def test_the_system_takes_the_advice(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100_000))
    array = np.load(tmp_path / "a.npy", mmap_mode="r")
    ReadAhead(array._mmap).want(np.array([128, 700_000]))
    assert array[-1] == 99_999
