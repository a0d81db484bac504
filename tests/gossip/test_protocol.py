"""The rules of asynchronous exchange."""

import pytest

from lightning_adpsgd.gossip.protocol import UnderWay, due_round, exchange_weight


def test_a_round_is_due_after_every_third_step() -> None:
    assert [due_round(step, 3) for step in range(1, 8)] == [
        None, None, 1, None, None, 2, None,
    ]  # fmt: skip


def test_exchanges_that_overlap_weigh_as_an_average_of_all() -> None:
    assert exchange_weight(1.0, 1, 1) == 1 / 2
    assert exchange_weight(1.0, 2, 1) == exchange_weight(1.0, 1, 2) == 1 / 3
    assert exchange_weight(0.6, 2, 2) == pytest.approx(0.2)


def test_no_learner_asks_a_peer_that_it_is_exchanging_with() -> None:
    under_way = UnderWay()
    assert under_way.enter(4) == 1
    assert under_way.enter(4) == 0
    assert under_way.enter(5) == 2
    assert under_way.enter(4, asked=True) == 3
    under_way.leave(4)
    assert under_way.enter(4) == 0  # one of the two is left
    under_way.leave(4)
    assert under_way.total() == 1
    assert under_way.enter(4) == 2
