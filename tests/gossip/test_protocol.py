"""The rules of asynchronous exchange."""

import math

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


def lined_up(*peers: int) -> UnderWay:
    under_way = UnderWay()
    for peer in peers:
        under_way.line_up(peer)
    return under_way


def met(under_way: UnderWay, peer: int, begin: float, end: float) -> None:
    under_way.enter(peer, now=begin)
    under_way.leave(peer, end)


def test_the_peer_that_was_met_longest_ago_is_asked_first() -> None:
    under_way = lined_up(1, 2, 3)
    met(under_way, 1, 0.0, 1.0)
    met(under_way, 3, 1.0, 2.0)
    waits = [under_way.wait_s(peer, 2.0) for peer in (1, 2, 3)]
    assert waits == [math.inf, 0.0, math.inf]
    under_way.step_out(2)
    assert [under_way.wait_s(peer, 2.0) for peer in (1, 3)] == [0.0, math.inf]


def test_exchanges_follow_one_another() -> None:
    under_way = lined_up(1)
    met(under_way, 1, 0.0, 3.0)
    under_way.enter(2, asked=True, now=10.0)
    assert under_way.wait_s(1, 11.0) == 2.0
    under_way.leave(2, 11.5)
    assert under_way.wait_s(1, 11.5) == 0.0


def test_an_exchange_that_takes_long_holds_up_another_as_long_as_that_takes() -> None:
    under_way = lined_up(1)
    met(under_way, 1, 0.0, 3.0)
    under_way.enter(2, now=10.0)
    assert under_way.wait_s(1, 13.0) == 0.0
    assert UnderWay().began_at(1) == -math.inf


def test_a_peer_that_is_being_met_is_asked_after_that() -> None:
    under_way = lined_up(1)
    met(under_way, 1, 0.0, 3.0)
    under_way.enter(1, asked=True, now=10.0)
    assert under_way.wait_s(1, 100.0) == math.inf
    under_way.leave(1, 101.0)
    assert under_way.wait_s(1, 101.0) == 0.0


def test_who_was_never_met_waits_as_long_as_the_longest_exchange_took() -> None:
    under_way = lined_up(2)
    under_way.enter(1, now=10.0)
    assert under_way.wait_s(2, 100.0) == math.inf
    under_way.leave(1, 14.0)
    under_way.enter(3, now=20.0)
    assert under_way.wait_s(2, 21.0) == 3.0
