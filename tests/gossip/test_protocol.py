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
    assert under_way.wait_s(1, 11.0) == 5.0
    under_way.leave(2, 11.5)
    assert under_way.wait_s(1, 11.5) == 0.0


def test_an_exchange_holds_up_another_for_twice_the_time_that_one_takes() -> None:
    under_way = lined_up(1)
    met(under_way, 1, 0.0, 3.0)
    under_way.enter(2, now=10.0)
    assert under_way.wait_s(1, 15.0) == 1.0
    assert under_way.wait_s(1, 16.0) == 0.0


@pytest.mark.parametrize("admitted", [False, True])
def test_a_slow_peer_holds_up_no_other_however_often_that_one_is_met(
    admitted: bool,
) -> None:
    under_way = lined_up(1, 2)
    met(under_way, 2, 0.0, 1.0)
    if admitted:
        under_way.admit(1, 10.0)
    else:
        under_way.enter(1, asked=True, now=10.0)
    for now in (12.0, 15.0, 18.0):  # two seconds after the last one began
        assert under_way.wait_s(2, now) == 0.0
        met(under_way, 2, now, now + 1.0)
        under_way.line_up(2)
    assert under_way.wait_s(1, 18.0) == math.inf


def test_a_peer_that_is_being_met_is_asked_after_that() -> None:
    under_way = lined_up(1)
    met(under_way, 1, 0.0, 3.0)
    under_way.enter(1, asked=True, now=10.0)
    assert under_way.wait_s(1, 100.0) == math.inf
    under_way.leave(1, 101.0)
    assert under_way.wait_s(1, 101.0) == 0.0


def test_who_was_never_met_waits_for_twice_what_the_longest_exchange_took() -> None:
    under_way = lined_up(2)
    under_way.enter(1, now=10.0)
    assert under_way.wait_s(2, 100.0) == math.inf
    under_way.leave(1, 14.0)
    under_way.enter(3, now=20.0)
    assert under_way.wait_s(2, 21.0) == 7.0


# --- requests


def requested(own: int, *peers: int) -> UnderWay:
    """A learner of which peers request exchanges."""
    under_way = UnderWay(lambda: own)
    for peer in peers:
        under_way.requested_by(peer)
    return under_way


def test_one_is_requested_at_a_time() -> None:
    under_way = lined_up(1, 2)
    met(under_way, 1, 0.0, 1.0)
    met(under_way, 2, 2.0, 5.0)
    under_way.step_out(1)
    under_way.request(1, 10.0)
    assert under_way.wait_s(2, 11.0) == 5.0
    under_way.answered_by(1)
    assert under_way.wait_s(2, 11.0) == 0.0


def test_who_is_free_admits_the_one_met_longest_ago_and_stays_free_for_it() -> None:
    under_way = requested(0, 1, 2)
    met(under_way, 2, 0.0, 1.0)
    met(under_way, 1, 2.0, 4.0)
    assert [under_way.admission_wait_s(p, 5.0) for p in (1, 2)] == [math.inf, 0.0]
    under_way.admit(2, 5.0)
    assert under_way.requests == [1]
    assert under_way.admission_wait_s(1, 5.5) == 3.5
    under_way.declined_by(2)
    assert under_way.admission_wait_s(1, 5.5) == 0.0


def test_who_exchanges_admits_afterwards() -> None:
    under_way = requested(0, 1)
    met(under_way, 1, 0.0, 3.0)
    under_way.admit(2, 4.0)
    under_way.enter(2, asked=True, now=5.0)
    assert under_way.admission_wait_s(1, 6.0) == 5.0
    under_way.leave(2, 6.0)
    assert under_way.admission_wait_s(1, 6.0) == 0.0


@pytest.mark.parametrize(
    ("own", "peer", "target", "wait_s"),
    [
        (0, 1, 2, 5.0),
        (1, 0, 2, 0.0),
        (1, 2, 0, 0.0),
        (2, 0, 1, 0.0),
        (0, 1, 1, math.inf),
        (1, 0, 0, 0.0),
    ],
)
def test_only_one_whose_number_is_smaller_than_both_lets_a_peer_wait_for_its_request(
    own: int, peer: int, target: int, wait_s: float
) -> None:
    """So that no cycle of requests waits for itself; nor do two of each other."""
    under_way = requested(own, peer)
    met(under_way, peer, 0.0, 3.0)
    under_way.request(target, 10.0)
    assert under_way.admission_wait_s(peer, 11.0) == wait_s
    if peer != target:
        assert under_way.admission_wait_s(peer, 16.0) == 0.0
    under_way.answered_by(target)
    assert under_way.admission_wait_s(peer, 11.0) == 0.0


def test_what_has_begun_meanwhile_is_what_was_requested() -> None:
    under_way = requested(0, 1)
    under_way.enter(1, now=2.0)
    assert under_way.admission_wait_s(1, 2.0) == 0.0


def test_who_waits_for_a_request_does_not_hold_up_those_behind() -> None:
    under_way = requested(1, 2, 0)
    under_way.request(2, 1.0)
    assert under_way.admission_wait_s(0, 1.0) == 0.0
    assert under_way.admission_wait_s(2, 1.0) == math.inf


def test_who_does_not_answer_a_request_holds_up_no_other_for_long() -> None:
    """It is stopped, say, after it has requested in turn."""
    under_way = requested(0, 1, 2)
    met(under_way, 1, 5.0, 8.0)
    under_way.request(2, 10.0)
    assert under_way.admission_wait_s(2, 11.0) == math.inf
    assert under_way.admission_wait_s(1, 11.0) == 5.0
    assert under_way.admission_wait_s(1, 16.0) == 0.0


def test_who_has_begun_another_declines_but_not_for_ever() -> None:
    under_way = lined_up(1)
    met(under_way, 2, 0.0, 3.0)
    under_way.request(1, 4.0)
    assert under_way.may_begin(1, 4.0)
    under_way.admit(2, 4.0)
    assert not under_way.may_begin(1, 4.0)
    under_way.enter(2, asked=True, now=4.0)
    assert not under_way.may_begin(1, 9.0)
    assert under_way.may_begin(1, 10.0)


def test_who_has_admitted_the_peer_in_turn_declines() -> None:
    """Or the two would exchange twice at the same time."""
    under_way = lined_up(1)
    under_way.request(1, 1.0)
    under_way.admit(1, 1.0)
    assert under_way.wait_s(1, 100.0) == math.inf
    assert not under_way.may_begin(1, 2.0)
    under_way.declined_by(1)
    assert under_way.may_begin(1, 2.0)


def test_who_has_met_the_peer_meanwhile_declines() -> None:
    under_way = lined_up(1)
    assert not under_way.has_been_met(1)
    under_way.step_out(1)
    under_way.request(1, 1.0)
    met(under_way, 1, 2.0, 3.0)
    assert under_way.has_been_met(1)
    assert not under_way.may_begin(1, 3.0)
    under_way.line_up(1)
    assert not under_way.has_been_met(1)
