"""Super-learners of different sizes as threads of one process, for tests."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.transport.base import Transport
from lightning_adpsgd.weights.sections import (
    Range,
    even_ranges,
    row_ranges,
    sections_of,
)
from tests.helpers import ThreadSuperLearner
from tests.threads import ThreadTransport

SIZES = ((2, 4), (1, 3), (3, 1, 2))
# Rows and columns of three weights: their rows do not divide by the sizes.
SHAPES = ((5, 2), (4, 1), (7, 1))
NUM_ELEMENTS = 24  # more than all of these have; a multiple of all sizes


class Learner(NamedTuple):
    """One learner: what it holds, and how it reaches the others.

    Attributes:
        number: number of its super-learner.
        vectors: weights that it holds.
        owned: ranges of the whole weights that it alone exchanges.
    """

    number: int
    vectors: list[Tensor]
    owned: list[Range]
    transport: Transport
    further: Sequence[Transport]
    group: Any


def learners_of(
    rows: Tensor,
    sizes: tuple[int, ...],
    holds_all: bool,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> list[Learner]:
    """The learners of super-learners, each of which begins with one of the rows.

    Args:
        rows: weights of each super-learner.
        sizes: N of each.
        holds_all: whether learners hold the whole row, or their rows of the weights.
        shapes: rows and columns of the weights.
    """
    wholes = [[row.clone()] if holds_all else _weights(row, shapes) for row in rows]
    lengths = [len(vector) for vector in wholes[0]]
    owned = [
        even_ranges(lengths, size) if holds_all else row_ranges(shapes, size)
        for size in sizes
    ]
    sections = sections_of(owned)
    across = [ThreadTransport.connect(len(rows)) for _ in sections]
    found = []
    for s, size in enumerate(sizes):
        by_learner = [[x for x in sections if x.owners[s] == n] for n in range(size)]
        if not holds_all:
            by_learner = [
                [section.seen_by(ranges) for section in of]
                for of, ranges in zip(by_learner, owned[s], strict=True)
            ]
        groups = ThreadSuperLearner.connect(size, holds_all, by_learner)
        for n, group in enumerate(groups):
            mine = [k for k, section in enumerate(sections) if section.owners[s] == n]
            transport, *further = (across[k][s] for k in mine)
            ranges = owned[s][n]
            held = [v.clone() for v in wholes[s]]
            if not holds_all:
                places = {v: slice(b, e) for v, b, e in ranges}
                # A learner may have none of a weight's rows.
                none = slice(0)
                held = [v[places.get(k, none)].clone() for k, v in enumerate(held)]
            found.append(Learner(s, held, ranges, transport, further, group))
    return found


def rows_of(learners: list[Learner], sizes: tuple[int, ...]) -> Tensor:
    """The weights of each super-learner, in which its learners must agree."""
    rows = []
    for ranks in Partition(sizes).all_ranks:
        held = [learners[rank] for rank in ranks]
        if held[0].group.holds_all:
            whole = held[0].vectors[0]
            assert all(torch.equal(one.vectors[0], whole) for one in held)
        else:
            pieces = [
                (part, one.vectors[part[0]]) for one in held for part in one.owned
            ]
            in_order = sorted(pieces, key=lambda piece: piece[0])
            whole = torch.cat([vector for _, vector in in_order])
        rows.append(whole)
    return torch.stack(rows)


def num_elements(holds_all: bool) -> int:
    """The length of a row."""
    return NUM_ELEMENTS if holds_all else sum(r * c for r, c in SHAPES)


def _weights(row: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    return list(row.split([rows * columns for rows, columns in shapes]))
