"""Threads that keep an island among the others meet errors that nobody foresaw."""

import logging
import threading
from contextlib import suppress
from typing import Any

import pytest
from typing_extensions import override

from lightning_adpsgd.islands.membership import Membership
from lightning_adpsgd.islands.rendezvous import Rendezvous
from lightning_adpsgd.islands.service import MOST_ERRORS, ServiceThread, TrainingWatch
from tests.helpers import PATIENCE_S, random_rows, until
from tests.islands.archipelago import archipelago, rendezvous


class Service(ServiceThread):
    """A thread that is never started: the test takes its turns."""

    @override
    def _take_turn(self) -> None: ...

    @override
    def _rest(self) -> None: ...


def fails() -> None:
    raise KeyError("unforeseen")


def test_a_turn_that_fails_is_logged_with_its_trace_and_the_next_one_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = list[BaseException]()
    service = Service("a thread", "unused", ended.append)
    assert service.take(fails)
    assert service.has_just_failed
    assert service.take(lambda: None)
    assert not service.has_just_failed
    assert service.num_errors == 1
    assert ended == []
    (told,) = caplog.records
    assert "a thread met an unexpected error" in told.message
    assert told.exc_info is not None


def test_one_that_fails_on_and_on_ends_the_learner_with_its_cause() -> None:
    ended = list[BaseException]()
    service = Service("a thread", "unused", ended.append)
    turns = [service.take(fails) for _ in range(MOST_ERRORS)]
    assert turns == [True] * (MOST_ERRORS - 1) + [False]
    (error,) = ended
    assert "a thread has failed 20 times in a row: KeyError('unforeseen')" in str(error)
    assert isinstance(error.__cause__, KeyError)


def test_one_that_is_stopped_in_its_turn_does_not_rest_once_more() -> None:
    """Whoever stops it would wait for the rest, too."""
    service: Any = Service("a thread", "unused", lambda error: None)

    def is_stopped() -> None:
        service._ending = True

    service._take_turn, service._rest = is_stopped, fails
    assert service._work()
    assert service._num_turns == 1


def test_one_that_has_failed_for_good_neither_rests_nor_goes_on() -> None:
    ended = list[BaseException]()
    service: Any = Service("a thread", "unused", ended.append)
    rests = list[int]()
    service._take_turn, service._rest = fails, lambda: rests.append(1)
    assert not service._work()
    assert (len(ended), len(rests)) == (1, MOST_ERRORS - 1)


def test_a_flood_of_errors_fills_no_disk(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    service = Service("a thread", "unused", lambda error: None)
    for number in range(1000):
        service.take(fails if number % 2 else lambda: None)
    assert len(caplog.records) == 9


def test_an_unforeseen_error_of_the_membership_is_survived_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rendezvous() as server, archipelago(server, random_rows(2)) as (one, other):
        left, visit = [3], Membership._visit

        def fail_at_times(membership: Membership, store: Any) -> None:
            if membership is one.membership and left[0]:
                left[0] -= 1
                raise AttributeError("unforeseen")
            visit(membership, store)

        monkeypatch.setattr(Membership, "_visit", fail_at_times)
        until(lambda: one.service_errors == 3, "the errors")
        assert one.membership.refresh(PATIENCE_S)
        until(lambda: set(one.listed) == set(other.listed) == {0, 1}, "both")
        assert other.service_errors == 0


def test_a_membership_that_fails_on_and_on_ends_its_learner_loudly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(threading.enumerate())
    with rendezvous() as server, archipelago(server, random_rows(1)) as (one,):
        monkeypatch.setattr(Membership, "_visit", lambda *_: fails())

        def has_ended() -> bool:
            with suppress(RuntimeError):
                one.step()
                return False
            return True

        until(has_ended, "the end")
        with pytest.raises(RuntimeError, match="keeps the member list has failed 20"):
            one.step()
    until(lambda: set(threading.enumerate()) <= before, "the end of all threads")


@pytest.mark.parametrize("beat", ["", "nonsense", "1", "1 x", "-1 5", "9" * 999 + " 1"])
def test_a_malformed_heartbeat_is_silence_of_that_member_alone(beat: str) -> None:
    with rendezvous() as server, archipelago(server, random_rows(3)) as trained:
        until(lambda: all(len(one.listed) == 3 for one in trained), "three")
        client = Rendezvous(server.address, answer_s=PATIENCE_S)
        key = f"heartbeat/{trained[1].membership.member.incarnation}"
        for _ in range(20):
            client.ask(lambda store: store.set(key, beat))
            assert trained[0].membership.refresh(PATIENCE_S)
        client.close()
        assert all({0, 2} <= set(one.listed) for one in trained)
        assert [one.service_errors for one in trained] == [0] * 3


@pytest.mark.parametrize("key", ["members", "version", "next"])
def test_nonsense_under_any_key_is_put_right(key: str) -> None:
    with rendezvous() as server, archipelago(server, random_rows(2)) as trained:
        until(lambda: all(len(one.listed) == 2 for one in trained), "two")
        client = Rendezvous(server.address, answer_s=PATIENCE_S)
        for text in ("nonsense", "[[[", "[1, [[[]]]]", "\U0001f30a"):
            words = {key: text, "version": text}.items()
            client.ask(lambda store, words=words: [store.set(*both) for both in words])
        late = archipelago(server, random_rows(1))
        with late as (joiner,):
            assert set(joiner.listed) >= {0, 1}
            until(lambda: all(len(o.listed) == 3 for o in trained), "three")
        client.close()
        assert [one.service_errors for one in trained] == [0] * 2


def test_a_jump_of_the_steps_makes_no_stops_of_all_slow_turns_after_it() -> None:
    """An island that rejoins goes on at the steps of the others."""
    steps = 0
    watch = TrainingWatch(lambda: steps)
    for more, now in ((5, 100.0), (12_000, 100.5), (37, 104.2)):
        steps += more
        watch.begin_turn(now)
    steps += 1
    assert not watch.goes_on(107.4)
    steps += 31
    assert watch.goes_on(107.4)


@pytest.mark.parametrize("later", range(12))
@pytest.mark.parametrize(("more", "seconds"), [(12_000, 0.5), (1, 0.001)])
def test_neither_a_jump_nor_a_turn_cut_short_makes_a_stop_of_the_next_slow_turn(
    more: int, seconds: float, later: int
) -> None:
    steps, now = 0, 100.0
    watch = TrainingWatch(lambda: steps)
    for made, passed in (*[(5, 0.5)] * 12, (more, seconds), *[(5, 0.5)] * later):
        steps, now = steps + made, now + passed
        watch.begin_turn(now)
    steps += 32
    assert watch.goes_on(now + 3.2)


@pytest.mark.parametrize("later", range(12))
def test_a_few_steps_after_a_stop_are_no_training_where_some_turns_have_none(
    later: int,
) -> None:
    steps, now = 0, 100.0
    watch = TrainingWatch(lambda: steps)
    for turn in range(20 + later):
        steps, now = steps + turn % 2, now + 0.5
        watch.begin_turn(now)
    steps += 3
    assert not watch.goes_on(now + 100)
