"""Exchanges of rows, by hand: what they read, however late it is looked at."""

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.virtual.row_averaging import Exchanges, Side
from lightning_adpsgd.virtual.timeline import Exchange

BEGIN = ([1.0, 2.0], [5.0, -2.0], [0.0, 8.0])
WIRES = (None, torch.bfloat16)  # both hold these numbers


def make_sides() -> tuple[list[Tensor], dict[int, Side]]:
    weights = [torch.tensor(values) for values in BEGIN]
    sides = {i: Side([w], "step_then_average") for i, w in enumerate(weights)}
    return weights, sides


def shown(side: Side) -> list[float]:
    return side.shown()[0].tolist()


@pytest.mark.parametrize("wire_dtype", WIRES)
def test_an_exchange_that_ends_first_changes_nothing_of_what_another_has_read(
    wire_dtype: torch.dtype | None,
) -> None:
    _, sides = make_sides()
    exchanges = Exchanges(sides, wire_dtype, torch.device("cpu"))
    first, second = Exchange(0, 1, 0.5), Exchange(1, 2, 0.5)
    exchanges.begin(first)
    exchanges.begin(second)
    exchanges.end(first)
    exchanges.end(second)
    # d_1 = (x_0 - x_1) / 2 + (x_2 - x_1) / 2, of the x at the beginning.
    assert shown(sides[0]) == [3.0, 0.0]
    assert shown(sides[1]) == [0.5, 5.0]
    assert shown(sides[2]) == [2.5, 3.0]


@pytest.mark.parametrize("wire_dtype", WIRES)
def test_a_step_in_the_meantime_changes_nothing_of_what_was_read(
    wire_dtype: torch.dtype | None,
) -> None:
    weights, sides = make_sides()
    exchanges = Exchanges(sides, wire_dtype, torch.device("cpu"))
    exchanges.begin(exchange := Exchange(0, 1, 0.5))
    exchanges.before_change(0)
    weights[0].add_(100.0)
    sides[0].after_update()
    exchanges.end(exchange)
    assert shown(sides[0]) == [103.0, 100.0]
    assert shown(sides[1]) == [3.0, 0.0]
    assert [side.tally.exchanges for side in sides.values()] == [1, 1, 0]


def test_a_dropped_exchange_changes_nothing_and_its_memory_is_used_again() -> None:
    _, sides = make_sides()
    exchanges = Exchanges(sides, None, torch.device("cpu"))
    exchanges.begin(exchange := Exchange(0, 1, 0.5))
    exchanges.before_change(1)
    exchanges.drop(exchange)
    assert [shown(side) for side in sides.values()] == list(map(list, BEGIN))
    exchanges.begin(again := Exchange(0, 1, 0.5))
    exchanges.end(again)
    assert shown(sides[0]) == shown(sides[1]) == [3.0, 0.0]
