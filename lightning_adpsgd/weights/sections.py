"""Sections of the weights, which super-learners of different sizes exchange.

docs/concepts.md, "Super-learners of different sizes", has a picture. A section has one
owner in each super-learner, and these owners exchange it with one another. With equal
sizes there is one section for each place in a super-learner. Only `views` handles
tensors; all else is pure.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor


class Range(NamedTuple):
    """Elements `begin` to `end` - 1 of a vector."""

    vector: int
    begin: int
    end: int


class Section(NamedTuple):
    """Ranges with one owner in each super-learner.

    Attributes:
        owners: place of the owner in each super-learner.
        ranges: ranges in ascending order, with gaps between them.
    """

    owners: tuple[int, ...]
    ranges: tuple[Range, ...]

    def seen_by(self, owned: Iterable[Range]) -> "Section":
        """The same section, counted from the start of an owner's part of each vector.

        Args:
            owned: everything that the owner owns, at most one range of each vector.
        """
        first = {one.vector: one.begin for one in owned}
        moved = (Range(v, b - first[v], e - first[v]) for v, b, e in self.ranges)
        return Section(self.owners, tuple(moved))

    def views(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Views of the elements in its ranges."""
        return [vectors[vector][begin:end] for vector, begin, end in self.ranges]


Owned = Sequence[Sequence[Range]]
"""What each learner of one super-learner owns."""


def even_ranges(lengths: Sequence[int], size: int) -> list[list[Range]]:
    """Cuts vectors into `size` equal parts, for learners that hold all weights.

    Args:
        lengths: lengths of the vectors, multiples of `size`.
    """
    return [
        [
            Range(number, length * place // size, length * (place + 1) // size)
            for number, length in enumerate(lengths)
            if length
        ]
        for place in range(size)
    ]


def row_ranges(shapes: Sequence[Sequence[int]], size: int) -> list[list[Range]]:
    """Cuts vectors by rows like `torch.chunk` and FSDP2: the last parts may be smaller.

    Args:
        shapes: shapes of the whole weights, each of which is a vector.
    """
    owned: list[list[Range]] = [[] for _ in range(size)]
    for number, (num_rows, *row) in enumerate(shapes):
        rows_each, width = -(-num_rows // size), math.prod(row)
        for place, mine in enumerate(owned):
            begin, end = (
                min((place + n) * rows_each, num_rows) * width for n in (0, 1)
            )
            if begin < end:
                mine.append(Range(number, begin, end))
    return owned


def sections_of(super_learners: Sequence[Owned]) -> list[Section]:
    """Cuts vectors into sections wherever the owner in any super-learner changes.

    Args:
        super_learners: ranges that the learners of each own. They cover each element of
            each vector once, as those of `even_ranges` and `row_ranges` do.

    Returns:
        Sections in ascending order of their owners.
    """
    found: dict[tuple[int, ...], list[Range]] = {}
    by_vector = [_by_vector(one) for one in super_learners]
    for vector in sorted(by_vector[0]) if by_vector else ():
        rows = [owners[vector] for owners in by_vector]
        ends = sorted({one.end for row in rows for one, _ in row})
        begin = 0
        for end in ends:
            owners = tuple(_owner_at(row, begin) for row in rows)
            found.setdefault(owners, []).append(Range(vector, begin, end))
            begin = end
    return [Section(owners, tuple(found[owners])) for owners in sorted(found)]


_Row = list[tuple[Range, int]]


def _by_vector(owned: Owned) -> dict[int, _Row]:
    """The ranges of each vector, with their owners."""
    rows: dict[int, _Row] = {}
    for place, ranges in enumerate(owned):
        for one in ranges:
            rows.setdefault(one.vector, []).append((one, place))
    return rows


def _owner_at(row: _Row, element: int) -> int:
    return next(place for one, place in row if one.begin <= element < one.end)
