"""How often: the share of the training's time that exchanges take."""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_adpsgd.gossip import pacing
from lightning_adpsgd.gossip.account import Account
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.pacing import CoreShare, Traffic, Turn, crowding
from lightning_adpsgd.gossip.protocol import Outcome, UnderWay
from lightning_adpsgd.gossip.quarantine import Quarantine
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.weights.replica import Replica
from tests.helpers import PATIENCE, until


class Clock:
    """Stands in for `time` and for what the system says of waiting threads."""

    def __init__(self) -> None:
        self.now = self.worked = self.waited = 100.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.worked

    def run(self, seconds: float, work: float = 0.0, waiting: float = 0.0) -> None:
        """Lets time pass, with the work of this thread and the waiting of others."""
        self.now += seconds
        self.worked += work
        self.waited += waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    monkeypatch.setattr(pacing, "waiting_s", lambda: clock.waited)
    return clock


@pytest.fixture
def cores(clock: Clock) -> CoreShare:
    return CoreShare(share=0.1)


def waited(cores: CoreShare, clock: Clock) -> float:
    """Seconds until the next exchange may begin."""
    begin = clock.now
    while pause_s := cores.pause_s():
        clock.run(pause_s)
    return clock.now - begin


def test_beside_idle_cores_exchanges_are_free(clock: Clock, cores: CoreShare) -> None:
    for _ in range(5):
        assert cores.pause_s() == 0.0
        with cores.exchange():
            clock.run(1.0, work=0.5, waiting=0.0)
    assert cores.bound_s == 0


def test_cores_are_idle_if_nobody_waited_during_the_last_exchange(
    clock: Clock, cores: CoreShare
) -> None:
    assert not cores.are_idle
    for waiting, idle in ((0.1, True), (0.9, False), (0.0, True)):
        with cores.exchange():
            clock.run(2.0, work=0.01, waiting=waiting)
        assert cores.are_idle == idle


def test_without_a_bound_cores_count_as_idle(clock: Clock) -> None:
    cores = CoreShare(share=1.0)
    assert cores.are_idle
    with cores.exchange():
        clock.run(2.0, work=0.01, waiting=2.0)
    assert cores.are_idle


@pytest.mark.parametrize("waiting", [0.25, 1.0])
def test_where_threads_wait_for_a_core_exchanges_keep_to_their_share(
    clock: Clock, cores: CoreShare, waiting: float
) -> None:
    """As much of their work counts as the share of time in which threads waited."""
    assert cores.pause_s() == 0.0
    with cores.exchange():
        clock.run(2.0, work=0.01, waiting=2 * waiting)
    assert waited(cores, clock) == pytest.approx(0.01 * waiting / 0.1)
    assert cores.bound_s == pytest.approx(0.01 * waiting / 0.1)


def test_seconds_in_which_several_wait_for_the_bound_count_once(
    clock: Clock, cores: CoreShare
) -> None:
    for _ in range(2):
        cores.merged(0.1)
        assert [cores.pause_s() for _ in range(2)] == pytest.approx([1.0, 1.0])
        clock.run(0.5)
        cores.pause_s()
        clock.run(9.5)
    assert cores.bound_s == pytest.approx(2.0)


def test_beside_idle_cores_of_a_gpu_exchanges_are_charged_by_steps(
    clock: Clock,
) -> None:
    traffic = course(cpu_share=0.1, on_gpu=True).traffic
    for step in range(12):
        if step > 5:
            traffic.make(1, lambda number: work(clock))
        clock.run(1.0 if step < 6 else 1.5)
        traffic.stepped()
    clock.run(1000.0)  # all is paid for
    traffic.make(1, lambda number: work(clock))
    assert waited(traffic.cores, clock) == pytest.approx(0.5 / 0.1)


def work(clock: Clock) -> Outcome:
    """An exchange within a step, of which all is work."""
    clock.worked += 10.0
    return Outcome(True, 4, 1)


def test_merges_keep_to_the_share_as_well(clock: Clock, cores: CoreShare) -> None:
    for _ in range(3):
        cores.merged(0.05)
    assert waited(cores, clock) == pytest.approx(0.15 / 0.1)
    clock.run(10.0)  # what was not taken is not saved up
    cores.merged(0.05)
    assert waited(cores, clock) == pytest.approx(0.05 / 0.1)


def test_of_several_that_wait_only_one_begins(clock: Clock, cores: CoreShare) -> None:
    """Each pays beforehand, and what it then takes is not counted twice."""
    assert cores.pause_s() == 0.0
    cores.spent(0.01)
    assert [waited(cores, clock) for _ in range(3)] == pytest.approx(3 * [0.1])
    for _ in range(3):
        cores.spent(0.01)
    assert waited(cores, clock) == pytest.approx(0.1)


@given(st.lists(st.floats(1e-4, 0.05), min_size=1, max_size=20))
def test_all_that_exchanges_take_is_paid_for(taken: list[float]) -> None:
    """However long each takes beside the one before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pacing, "time", clock := Clock())
        cores, begin = CoreShare(share=0.1), clock.now
        for seconds in taken:
            waited(cores, clock)
            cores.spent(seconds)
        waited(cores, clock)
        owed, ahead = sum(taken) / 0.1, max(taken) / 0.1
        # What is paid ahead for the exchange that may begin now, and no more.
        assert owed - 1e-6 <= clock.now - begin + 1e-9 <= owed + ahead + 1e-6


def test_no_pause_is_longer_than_a_minute(clock: Clock, cores: CoreShare) -> None:
    cores.spent(1000.0)
    assert waited(cores, clock) == pytest.approx(60.0)


def test_an_exchange_that_fails_is_paid_for(clock: Clock, cores: CoreShare) -> None:
    def fail() -> None:
        with cores.exchange():
            clock.run(1.0, work=0.01, waiting=1.0)
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        fail()
    assert waited(cores, clock) == pytest.approx(0.1)


def test_a_whole_share_is_no_bound(clock: Clock) -> None:
    cores = CoreShare(share=1.0)
    cores.spent(1000.0)
    cores.merged(1000.0)
    assert cores.pause_s() == 0.0


@pytest.mark.parametrize("text", [None, "", "masked\n", "\u2205"])
def test_a_system_that_does_not_tell_is_taken_to_be_crowded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(pacing, "_PRESSURE", path := tmp_path / "cpu")
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert pacing.waiting_s() is None
    assert crowding(None, None, 1.0) == 1.0
    assert crowding(3.0, 3.5, 2.0) == 0.25
    assert crowding(3.0, 9.0, 2.0) == 1.0


@pytest.mark.skipif(pacing.waiting_s() is None, reason="the system does not tell")
def test_the_system_says_for_how_long_threads_have_waited() -> None:
    first = pacing.waiting_s()
    second = pacing.waiting_s()
    assert first is not None
    assert second is not None
    assert 0 < first <= second


# --- one after the other


class Course(NamedTuple):
    """The exchanges of one learner, and what they change."""

    traffic: Traffic
    replica: Replica


def course(cpu_share: float, on_gpu: bool = False) -> Course:
    state = threading.Condition()
    replica = Replica([[torch.zeros(4)]], 4, state)
    members = Members.fixed(Schedule(find_topology("ring"), 2), 0)
    quarantine = Quarantine(members, [], SuperLearnerGroup(), replica, PATIENCE)
    account = Account(members, replica, quarantine, state)
    return Course(Traffic(account, state, cpu_share, on_gpu=on_gpu), replica)


@pytest.fixture
def traffic() -> Traffic:
    return course(cpu_share=1.0).traffic


def test_a_peer_that_has_asked_meanwhile_is_not_asked(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, turns = traffic._under_way[0], list[Turn]()
    monkeypatch.setattr(under_way, "wait_s", lambda peer, now: 60.0)
    ask = threading.Thread(
        target=lambda: turns.append(traffic.await_turn(1, lambda: False))
    )
    ask.start()
    until(lambda: under_way.in_line == [1], "its place in the line")
    traffic.make(1, lambda number: Outcome(True, 4, 0), asked=True)
    ask.join(PATIENCE.total_seconds())
    assert turns == ["met"]


def test_a_turn_that_does_not_come_is_awaited_for_the_given_time(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic.cores, "pause_s", lambda: 3600.0)
    begin = time.monotonic()
    assert traffic.await_turn(1, lambda: False, seconds=0.2) == "not yet"
    assert time.monotonic() - begin >= 0.2
    assert traffic._under_way[0].in_line == []


def test_who_leaves_the_line_late_does_not_end_who_has_followed_for_the_same_peer(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An island was lost and is reached again: two threads ask it for a moment."""
    under_way = traffic._under_way[0]
    under_way.enter(2, now=time.monotonic())
    waits = list[float]()

    def leave(seconds: float) -> None:
        waits.append(seconds)
        under_way.step_out(1)

    monkeypatch.setattr(traffic._state, "wait", leave)
    assert traffic.await_turn(1, lambda: False, seconds=0.01) == "not yet"
    assert len(waits) == 1  # it lines up again at once, or it would wait for nothing


def test_a_learner_that_waits_for_an_exchange_takes_no_turns(traffic: Traffic) -> None:
    traffic._under_way[0].enter(2, now=time.monotonic())
    traffic._under_way[0]._took[1] = 3600.0
    traffic.hurry_on()
    assert traffic.await_turn(1, lambda: False) == "come"


def test_a_learner_that_does_not_get_free_admits_after_the_given_time(
    traffic: Traffic,
) -> None:
    under_way = traffic._under_way[0]
    under_way.enter(2, now=time.monotonic())
    begin = time.monotonic()
    traffic.admit(1, seconds=0.2)
    assert time.monotonic() - begin >= 0.2
    assert under_way.requests == []
    traffic.hurry_on()
    traffic.admit(3, seconds=3600.0)  # at once


def test_a_request_that_fails_holds_up_nothing(traffic: Traffic) -> None:
    under_way = traffic._under_way[0]
    seen = list[bool]()

    def request() -> None:
        with traffic.requesting(1):
            seen.append(bool(under_way._requested))
            raise PeerLost(1, "a test", "it is gone")

    with pytest.raises(PeerLost):
        request()
    assert (seen, under_way._requested) == ([True], {})


@pytest.mark.parametrize("paused", [False, True])
def test_an_admitted_learner_begins_unless_exchanges_pause(
    traffic: Traffic, paused: bool
) -> None:
    assert traffic.await_turn(1, lambda: False) == "come"
    with traffic.requesting(1):
        pass
    if paused:
        traffic.pause()
    made = traffic.make(1, lambda number: Outcome(True, 4, 0), admitted=True)
    assert made is not paused
    assert not traffic._under_way[0]._requested


def test_after_a_pause_turns_are_awaited_as_before(traffic: Traffic) -> None:
    traffic.pause()
    assert traffic.hurry.is_set()
    assert not traffic.make(1, lambda number: Outcome(True, 4, 0))
    traffic.resume()
    assert not traffic.hurry.is_set()
    assert traffic.make(1, lambda number: Outcome(True, 4, 0))


@pytest.mark.parametrize("ends", ["declines", "fails", "is made"])
def test_the_end_of_what_was_waited_for_wakes_who_waits(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    waits, state = list[float | None](), traffic._state
    under_way, now = traffic._under_way[0], time.monotonic()
    end: dict[str, Callable[[], object]] = {
        "declines": lambda: traffic.declined_by(2),
        "fails": lambda: fail_to_request(traffic, 2),
        "is made": lambda: traffic.make(2, lambda number: Outcome(True, 4, 0)),
    }

    def wait(seconds: float | None = None) -> bool:
        waits.append(seconds)
        told.clear()
        under_way.admit(2, now)
        end[ends]()
        assert told
        under_way.declined_by(2)
        return True

    told = list[bool]()
    monkeypatch.setattr(state, "wait", wait)
    monkeypatch.setattr(state, "notify_all", lambda: told.append(True))
    under_way.admit(2, now)
    traffic.await_turn(1, lambda: False)
    assert len(waits) == 1


class Waits:
    """Waits for a learner's lock, in the first of which something happens.

    `seconds` has how long each would take at most. The second ends by itself.
    """

    def __init__(
        self, traffic: Traffic, patch: pytest.MonkeyPatch, act: Callable[[], None]
    ) -> None:
        self.seconds, self.told, self._act = list[float](), list[bool](), act
        self._traffic = traffic
        patch.setattr(traffic._state, "wait", self._wait)
        patch.setattr(traffic._state, "notify_all", lambda: self.told.append(True))

    def _wait(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.told.clear()
        if len(self.seconds) == 1:
            self._act()
            assert self.told
        else:
            self._traffic.hurry.set()


def test_who_is_in_line_behind_one_that_is_admitted_is_told(
    clock: Clock, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wait had no end. It is now twice as long as its last exchange."""
    under_way = after_an_exchange(traffic, clock)
    under_way.line_up(2)
    admit = lambda: traffic.admit(2, seconds=60.0)  # noqa: E731
    waits = Waits(traffic, monkeypatch, admit)
    traffic.await_turn(1, lambda: False)
    assert waits.seconds == pytest.approx([60.0, 6.0])


def test_who_is_in_line_behind_one_that_begins_as_asked_is_told(
    clock: Clock, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, told = after_an_exchange(traffic, clock), list[bool]()
    under_way.line_up(1)
    under_way.line_up(2)
    monkeypatch.setattr(traffic._state, "notify_all", lambda: told.append(True))
    seen = list[tuple[int, float]]()

    def exchange(number: int) -> Outcome:
        seen.append((len(told), under_way.wait_s(1, clock.now)))
        return Outcome(True, 4, 0)

    assert under_way.wait_s(1, clock.now) == math.inf
    traffic.make(2, exchange, asked=True)
    assert seen == [(1, pytest.approx(6.0))]


def test_who_requests_behind_one_that_is_requested_is_told(
    clock: Clock, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_an_exchange(traffic, clock).requested_by(2)

    def request() -> None:
        with traffic.requesting(2):
            assert waits.told

    waits = Waits(traffic, monkeypatch, request)
    traffic.admit(1, seconds=60.0)
    assert waits.seconds == pytest.approx([60.0, 6.0])


def after_an_exchange(traffic: Traffic, clock: Clock) -> UnderWay:
    """With peer 1, of three seconds."""
    under_way = traffic._under_way[0]
    under_way.enter(1, now=clock.now - 3.0)
    under_way.leave(1, clock.now)
    return under_way


def fail_to_request(traffic: Traffic, peer: int) -> None:
    with suppress(PeerLost), traffic.requesting(peer):
        raise PeerLost(peer, "a test", "it is gone")


def test_a_step_lasts_as_the_last_ones_did(clock: Clock, traffic: Traffic) -> None:
    assert traffic.step_seconds == math.inf
    for seconds in (9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0):
        clock.run(seconds)
        traffic.stepped()
    assert traffic.step_seconds == pytest.approx(6 / 5)


# --- one line at the end of the first minute


def a_minute_of(
    traffic: Traffic, replica: Replica, clock: Clock, num_steps: int, num_exchanges: int
) -> None:
    for step in range(num_steps):
        replica.step += 1
        if step < num_exchanges:
            traffic.await_turn(1, lambda: True)
            traffic.make(1, lambda number: Outcome(True, 4, replica.step))
        clock.run(70.0 / num_steps)
        traffic.report_rate()


@pytest.mark.parametrize(
    ("num_exchanges", "cost_s", "told"),
    [(9, 3.0, 1), (9, 1.0, 0), (30, 3.0, 0), (9, 0.0, 0)],
)
def test_rare_exchanges_are_reported_once_with_the_rate_and_the_option(
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    num_exchanges: int,
    cost_s: float,
    told: int,
) -> None:
    """Only if the option is the reason, and not a cable that was out meanwhile."""
    traffic, replica = course(cpu_share=0.05)
    traffic.cores.merged(cost_s)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            a_minute_of(traffic, replica, clock, 100, num_exchanges)
    texts = [r.getMessage() for r in caplog.records if "cpu_share" in r.getMessage()]
    assert len(texts) == told
    if texts:
        assert "0.1 times per step" in texts[0]
        assert "`cpu_share=0.05`" in texts[0]
