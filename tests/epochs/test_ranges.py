"""Ranges are sets of positions."""

from itertools import chain, pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_adpsgd.epochs.ranges import (
    Ranges,
    as_ranges,
    common,
    count,
    numbers,
    split,
    take,
    union,
    without,
)

SETS = st.sets(st.integers(0, 20))


@st.composite
def disjoint_ranges(draw: st.DrawFn) -> Ranges:
    cuts = draw(st.lists(st.integers(0, 60), unique=True, max_size=8).map(sorted))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))


@settings(deadline=None)
@given(disjoint_ranges(), st.integers(0, 70), st.integers(0, 70))
def test_take_is_a_slice_of_the_positions(
    ranges: Ranges, start: int, stop: int
) -> None:
    assert numbers(take(ranges, start, stop)) == numbers(ranges)[start:stop]


@settings(deadline=None)
@given(disjoint_ranges(), st.integers(1, 9))
def test_split_parts_differ_by_one_at_most(ranges: Ranges, num: int) -> None:
    parts = split(ranges, num)
    assert list(chain.from_iterable(map(numbers, parts))) == numbers(ranges)
    sizes = [count(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(disjoint_ranges(), st.randoms())
def test_a_union_keeps_positions_and_leaves_no_neighbours(
    ranges: Ranges, random: Any
) -> None:
    pieces = [(position, position + 1) for position in numbers(ranges)]
    random.shuffle(pieces)
    result = union(pieces)
    assert numbers(result) == numbers(ranges)
    assert all(a[1] < b[0] for a, b in pairwise(result))


@given(one=SETS, other=SETS)
def test_ranges_are_sets_of_positions(one: set[int], other: set[int]) -> None:
    a, b = as_ranges(one), as_ranges(other)
    assert numbers(a) == sorted(one)
    assert numbers(union(a, b)) == sorted(one | other)
    assert numbers(common(a, b)) == sorted(one & other)
    assert numbers(without(a, b)) == sorted(one - other)
    assert union(a) == a
