"""Sets of positions as ranges, so that a few numbers describe millions of samples."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

Ranges = tuple[tuple[int, int], ...]
"""Positions from each first up to, but not including, each second number."""


def count(ranges: Ranges) -> int:
    """The number of positions."""
    return sum(last - first for first, last in ranges)


def numbers(ranges: Ranges) -> list[int]:
    """The positions, one by one."""
    return [position for first, last in ranges for position in range(first, last)]


def as_ranges(positions: Iterable[int]) -> Ranges:
    """Converts positions, in any order, into ranges."""
    return union([(position, position + 1) for position in positions])


def take(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The positions from the `start`-th up to, but not including, the `stop`-th."""
    taken, offset = [], 0
    for first, last in ranges:
        begin, end = first + max(start - offset, 0), min(first + stop - offset, last)
        if begin < end:
            taken.append((begin, end))
        offset += last - first
    return tuple(taken)


def split(ranges: Ranges, num: int) -> list[Ranges]:
    """Splits into consecutive parts whose sizes differ by at most one."""
    total = count(ranges)
    cuts = [total * place // num for place in range(num + 1)]
    return [take(ranges, start, stop) for start, stop in pairwise(cuts)]


def union(*ranges: Sequence[tuple[int, int]]) -> Ranges:
    """The positions in any of the sets, in as few ranges as possible."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(one for rows in ranges for one in rows):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    """The positions of the first set that are not in the second, both ascending."""
    left = []
    for first, last in ranges:
        for begin, end in taken:
            if begin < last and end > first:
                left.append((first, begin))
                first = end
        left.append((first, last))
    return tuple((first, last) for first, last in left if first < last)


def common(one: Ranges, other: Ranges) -> Ranges:
    """The positions in both sets."""
    return without(one, without(one, other))


def from_rows(rows: Iterable[Iterable[int]]) -> Ranges:
    """Reads ranges from JSON rows; a ValueError if they are not in ascending order."""
    found = tuple((int(first), int(last)) for first, last in rows)
    ends = [end for row in found for end in row]
    if ends != sorted(ends) or min(ends, default=0) < 0:
        raise ValueError(f"ranges must be in ascending order from 0, got {found[:4]}")
    return found
