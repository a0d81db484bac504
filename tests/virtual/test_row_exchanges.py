"""Exchanges of rows, by hand: what they read, however late it is looked at."""

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.gossip.codecs import Lattice
from lightning_adpsgd.reference import synchronous
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.virtual.row_exchanges import CommunicationSide, RowExchanges
from lightning_adpsgd.virtual.row_rounds import RowMixer
from lightning_adpsgd.virtual.timeline import SimulatedExchange
from tests.helpers import mixing_of, random_rows, take_first

BEGIN = ([1.0, 2.0], [5.0, -2.0], [0.0, 8.0])
WIRES = (None, torch.bfloat16)  # both hold these numbers


def make_sides() -> tuple[list[Tensor], list[CommunicationSide]]:
    weights = [torch.tensor(values) for values in BEGIN]
    return weights, [CommunicationSide([w], "step_then_average") for w in weights]


def shown(side: CommunicationSide) -> list[float]:
    return read(side).tolist()


def read(side: CommunicationSide) -> Tensor:
    """x of a side of one part."""
    (part,) = side.parts
    part.read(into := torch.empty(len(part), dtype=part.dtype))
    return into


@pytest.mark.parametrize("wire_dtype", WIRES)
def test_an_exchange_that_ends_first_changes_nothing_of_what_another_has_read(
    wire_dtype: torch.dtype | None,
) -> None:
    _, sides = make_sides()
    exchanges = RowExchanges(sides, wire_dtype)
    first, second = SimulatedExchange(0, 1, 0.5), SimulatedExchange(1, 2, 0.5)
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
    exchanges = RowExchanges(sides, wire_dtype)
    exchanges.begin(exchange := SimulatedExchange(0, 1, 0.5))
    exchanges.before_change(0)
    weights[0].add_(100.0)
    sides[0].after_update()
    exchanges.end(exchange)
    assert shown(sides[0]) == [103.0, 100.0]
    assert shown(sides[1]) == [3.0, 0.0]
    assert [side.tally.exchanges for side in sides] == [1, 1, 0]


def test_both_ends_know_how_many_steps_the_asker_has_made_since_either_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = list[int]()
    monkeypatch.setattr(Lattice, "begin", lambda self, steps: begun.append(steps))
    _, sides = make_sides()
    exchanges = RowExchanges(sides, torch.int8)
    for asker, asked, *steps in ((0, 1, 3, 1), (1, 0, 5, 2), (0, 1, 7, 4)):
        for side, number in zip(sides, steps, strict=False):
            side.replica.step += number
        exchanges.begin(exchange := SimulatedExchange(asker, asked, 0.5))
        exchanges.end(exchange)
    assert begun == [3, 3, 2, 2, 7, 7]


@pytest.mark.parametrize("topology", ["ring", "random_pairs", "complete"])
@pytest.mark.parametrize("hidden", [False, True])
def test_rounds_of_long_rows_are_matrix_products(topology: str, hidden: bool) -> None:
    rows = random_rows(8, 40_001)
    matrix = rows.clone()
    schedule = Schedule(find_topology(topology), 8, 0.75)
    mixer = RowMixer([matrix], schedule, hidden)
    for _ in range(3):
        mixer.take_snapshot()
        mixer.mix()
        mixer.finish()
        for row in range(8):
            mixer.take_in(row)
    oracle = synchronous(rows, lambda w, k: w, mixing_of(topology, 8, 0.75), lr=0.0)
    expected = take_first(oracle, 3)[-1]
    torch.testing.assert_close(matrix, expected, atol=1e-13, rtol=0)


def test_what_an_exchange_gives_its_ends_is_opposite_to_the_last_bit() -> None:
    weights = [row.float() for row in random_rows(2, 1000)]
    given = 0.3 * (weights[1] - weights[0])
    sides = [CommunicationSide([w], "step_then_average") for w in weights]
    exchanges = RowExchanges(sides, None)
    exchanges.begin(exchange := SimulatedExchange(0, 1, 0.3))
    exchanges.end(exchange)
    for weight in weights:
        weight.zero_()  # what is shown then is what was given
    assert torch.equal(read(sides[0]), given)
    assert torch.equal(read(sides[1]), -given)


def test_the_parts_of_a_vector_begin_with_it() -> None:
    """Beside another of its dtype, as complex weights are once they are real."""
    length, stretch = 1 << 20, 1 << 18
    sides = [
        CommunicationSide(
            [torch.full((n,), x) for n in (5, length)], "step_then_average"
        )
        for x in (0.0, 2.0)
    ]
    exchanges = RowExchanges(sides, None)
    exchanges.begin(exchange := SimulatedExchange(0, 1, 0.5))
    exchanges.end(exchange)
    for begin in range(0, length, stretch):
        sides[0].add_awaiting(into := torch.zeros(stretch), 1, begin)
        assert torch.equal(into, torch.ones(stretch))
