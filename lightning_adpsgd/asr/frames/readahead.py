"""Has a mapped file read in stretches, though it is looked at here and there.

A page of a mapped file that is not in memory is read when it is touched: alone, while
the process waits, if what was touched before had no order. Shuffled chunks lie in
blocks of neighbours, so with the first chunk of a stretch the others will soon be
needed as well; the system is asked for the whole stretch, and for all of a batch at
once.
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
        """Tell the system what will be done with a part of the mapping."""
        ...

    def __len__(self) -> int: ...


class ReadAhead:
    """Asks for each stretch once, as long as it remembers.

    Args:
        mapping: Memory map of the file.
    """

    def __init__(self, mapping: Advisable) -> None:
        self._mapping = mapping
        # The last stretch of each remainder: of one size, however large the file.
        self._asked = np.full(_NUM_REMEMBERED, -1, np.int32)

    def want(self, places: np.ndarray) -> None:
        """These bytes of the file will be read soon; returns without waiting."""
        stretches = places >> _STRETCH_BITS
        is_new = self._asked[stretches & (_NUM_REMEMBERED - 1)] != stretches
        for stretch in sorted(set(stretches[is_new].tolist())):
            self._asked[stretch & (_NUM_REMEMBERED - 1)] = stretch
            start = stretch * STRETCH
            length = min(STRETCH, len(self._mapping) - start)
            self._mapping.madvise(mmap.MADV_WILLNEED, start, length)
