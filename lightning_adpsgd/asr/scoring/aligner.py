"""The alignment of reference and hypothesis by NIST's costs, ties broken as by sclite.

A substitution costs 4, a deletion or insertion 3, a missing optional word 2 and a
missing nothing (`@`) 0.001. Among paths of equal cost, seen from the end, a match or
substitution is preferred to an insertion, and an insertion to a deletion. Among
alternatives, the first written one is preferred. Costs are added in single precision,
as sclite does, because the thousandths decide ties.
"""

import operator
import struct
from collections.abc import Sequence
from typing import NamedTuple

from lightning_adpsgd.asr.scoring.errors import Errors
from lightning_adpsgd.asr.scoring.words import Network, Word, is_same

CORRECT, SUBSTITUTED, DELETED, INSERTED = "CSDI"


class Pair(NamedTuple):
    """A place of an alignment.

    Attributes:
        kind: `C`, `S`, `D` or `I`.
        reference: None for an inserted word, and beside an optional one.
        hypothesis: None for a deleted word, and beside an optional one.
    """

    kind: str
    reference: Word | None
    hypothesis: Word | None


def count(pairs: Sequence[Pair]) -> Errors:
    """The errors of one aligned segment."""
    kinds = [pair.kind for pair in pairs]
    substituted, deleted, inserted = (kinds.count(kind) for kind in "SDI")
    is_wrong = substituted + deleted + inserted > 0
    num_words = len(kinds) - inserted
    return Errors(num_words, substituted, deleted, inserted, 1, int(is_wrong))


_Cell = tuple[float, int, int]
"""The cost of the cheapest path to a pair of words, and the previous pair on it."""

_Table = list[list[_Cell]]
_cost_of = operator.itemgetter(0)


def align(reference: Network, hypothesis: Network) -> list[Pair]:
    """The cheapest alignment."""
    table = _fill(reference, hypothesis)
    places = [(mine, its) for mine in reference.ends for its in hypothesis.ends]
    place = min(places, key=lambda p: table[p[0]][p[1]][0])
    pairs = []
    while place != (0, 0):
        _, *before = table[place[0]][place[1]]
        pair = _pair(reference, hypothesis, place, (before[0], before[1]))
        pairs += [pair] if pair is not None else []
        place = (before[0], before[1])
    return pairs[::-1]


def _fill(reference: Network, hypothesis: Network) -> _Table:
    """The cheapest way to every pair of a reference and a hypothesis word."""
    insertions = [_cost_alone(word) for word in hypothesis.words]
    table: _Table = []
    for mine, one in enumerate(reference.words):
        row: list[_Cell] = []
        table.append(row)
        deletion = _cost_alone(one)
        for its, other in enumerate(hypothesis.words):
            match = _cost(one, other)
            mine_before, its_before = reference.before[mine], hypothesis.before[its]
            # in the order of preference: of equal costs `min` takes the first
            ways = [
                _added(_least(table, mine_before, its_before), match),
                _added(_least(table, (mine,), its_before), insertions[its]),
                _added(_least(table, mine_before, (its,)), deletion),
            ]
            row.append(min(ways, key=_cost_of) if mine or its else _ORIGIN)
    return table


_ORIGIN: _Cell = (0.0, 0, 0)
_NOWHERE: _Cell = (float("inf"), 0, 0)


def _least(table: _Table, rows: Sequence[int], columns: Sequence[int]) -> _Cell:
    """The cheapest of some pairs, the first of equal ones."""
    best = _NOWHERE
    for row in rows:
        for column in columns:
            if table[row][column][0] < best[0]:
                best = (table[row][column][0], row, column)
    return best


def _added(cell: _Cell, cost: float) -> _Cell:
    total = cell[0] + cost
    if not total.is_integer() and total < float("inf"):
        total = struct.unpack("f", struct.pack("f", total))[0]
    return total, cell[1], cell[2]


_OF_NOTHING: float = struct.unpack("f", struct.pack("f", 0.001))[0]


def _cost(one: Word | None, other: Word | None) -> float:
    if one is None or other is None:
        return float("inf")
    if one.is_nothing and other.is_nothing:
        return 1.0
    return 0.0 if is_same(one, other) else 4.0


def _cost_alone(word: Word | None) -> float:
    if word is None:
        return 0.0
    if word.is_nothing:
        return _OF_NOTHING
    return 2.0 if word.is_optional else 3.0


def _pair(
    reference: Network,
    hypothesis: Network,
    place: tuple[int, int],
    before: tuple[int, int],
) -> Pair | None:
    """The pair of the step to `place`; None if the step consumes no word."""
    one = reference.words[place[0]] if before[0] != place[0] else None
    other = hypothesis.words[place[1]] if before[1] != place[1] else None
    if all(word is None or word.is_nothing for word in (one, other)):
        return None
    if one is not None and other is not None:
        return Pair(CORRECT if is_same(one, other) else SUBSTITUTED, one, other)
    alone = one or other
    if alone is not None and alone.is_optional:
        return Pair(CORRECT, one, other)
    return Pair(DELETED if other is None else INSERTED, one, other)
