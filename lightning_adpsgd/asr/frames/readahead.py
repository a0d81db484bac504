"""Read-ahead of a mapped file in stretches, for scattered access.

A page of a mapped file that is not in memory is read when it is touched. If earlier
accesses had no order, it is read alone while the process waits. Shuffled chunks lie in
blocks of neighbours, so the other chunks of a stretch will soon be needed after the
first. The system is asked to read the whole stretch, and all of a batch at once.
"""

import mmap
from typing import Protocol

import numpy as np

_STRETCH_BITS = 16
STRETCH = 1 << _STRETCH_BITS  # bytes: a fast read, and not much more than a block's
_NUM_REMEMBERED = 1 << 18  # of which a window of shuffled blocks needs some 3,000


class Advisable(Protocol):
    """The interface of Python's `mmap`."""

    def madvise(self, option: int, start: int, length: int, /) -> None:
        """Tells the system the intended use of a part of the mapping."""
        ...

    def __len__(self) -> int: ...


class ReadAhead:
    """Requests each stretch once, while it is remembered.

    Args:
        mapping: Memory map of the file.
    """

    def __init__(self, mapping: Advisable) -> None:
        self._mapping = mapping
        # The last stretch of each remainder: of one size, however large the file.
        self._asked = np.full(_NUM_REMEMBERED, -1, np.int32)

    def want(self, places: np.ndarray) -> None:
        """Announces that these bytes will be read soon; returns without waiting."""
        stretches = places >> _STRETCH_BITS
        is_new = self._asked[stretches & (_NUM_REMEMBERED - 1)] != stretches
        for stretch in sorted(set(stretches[is_new].tolist())):
            self._asked[stretch & (_NUM_REMEMBERED - 1)] = stretch
            start = stretch * STRETCH
            length = min(STRETCH, len(self._mapping) - start)
            self._mapping.madvise(mmap.MADV_WILLNEED, start, length)
