"""Sections of the weights, against the owner of each single element."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_adpsgd.weights.sections import (
    Range,
    Section,
    even_ranges,
    row_ranges,
    sections_of,
)

Shapes = list[tuple[int, ...]]
Owners = dict[tuple[int, int], int]


def owners_of(owned: list[list[Range]]) -> Owners:
    """The owner of each element, by vector and number."""
    return {
        (one.vector, element): place
        for place, ranges in enumerate(owned)
        for one in ranges
        for element in range(one.begin, one.end)
    }


def test_two_learners_and_four_meet_in_quarters() -> None:
    found = sections_of([even_ranges([8], size) for size in (2, 4)])
    assert found == [
        Section((0, 0), (Range(0, 0, 2),)),
        Section((0, 1), (Range(0, 2, 4),)),
        Section((1, 2), (Range(0, 4, 6),)),
        Section((1, 3), (Range(0, 6, 8),)),
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equal_sizes_have_one_section_for_each_place(size: int) -> None:
    lengths = [6, 12]
    owned = even_ranges(lengths, size)
    expected = [Section((n, n, n), tuple(own)) for n, own in enumerate(owned)]
    assert sections_of([owned] * 3) == expected


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(
        st.lists(st.integers(1, 7), min_size=1, max_size=2).map(tuple),
        min_size=1,
        max_size=4,
    ),
)
def test_each_element_is_in_the_section_of_its_owners(
    sizes: list[int], shapes: Shapes
) -> None:
    owned = [row_ranges(shapes, size) for size in sizes]
    by_element = [owners_of(one) for one in owned]
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for section in sections_of(owned):
        for vector, begin, end in section.ranges:
            for element in range(begin, end):
                assert (vector, element) not in found
                found[vector, element] = section.owners
    elements = {
        (v, e)
        for v, shape in enumerate(shapes)
        for e in range(torch.Size(shape).numel())
    }
    assert found == {e: tuple(owner[e] for owner in by_element) for e in elements}


@given(st.integers(1, 9), st.integers(1, 6))
def test_rows_are_those_of_torch_chunk(num_rows: int, size: int) -> None:
    weights = torch.arange(num_rows * 2).view(num_rows, 2)
    owned = row_ranges([(num_rows, 2)], size)
    pieces = [weights.view(-1)[b:e] for ranges in owned for _, b, e in ranges]
    expected = [piece.flatten() for piece in weights.chunk(size)]
    for piece, other in itertools.zip_longest(pieces, expected):
        assert torch.equal(piece, other)


def test_an_owner_finds_a_section_in_its_own_part() -> None:
    vectors = [torch.arange(8), torch.arange(10, 14)]
    owned = [even_ranges([8, 4], size) for size in (2, 4)]
    section = sections_of(owned)[3]
    whole = section.views(vectors)
    for places, size in zip(owned, (2, 4), strict=True):
        mine = places[section.owners[0] if size == 2 else section.owners[1]]
        part = [vectors[v][b:e] for v, b, e in mine]
        views = section.seen_by(mine).views(part)
        assert [v.tolist() for v in views] == [v.tolist() for v in whole]
    assert [v.tolist() for v in whole] == [[6, 7], [13]]
