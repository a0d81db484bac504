"""The two threads of a peer, without threads: whom they ask, and when they end."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from lightning_adpsgd.gossip import account as account_module
from lightning_adpsgd.gossip import peers as peers_module
from lightning_adpsgd.gossip import waiting as waiting_module
from lightning_adpsgd.gossip.account import Account
from lightning_adpsgd.gossip.exchange import ALIVE, DECLINE, LEAVE, PULL, REQUEST
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.pacing import Traffic, Turn
from lightning_adpsgd.gossip.peers import Asker, Peers, Threads
from lightning_adpsgd.gossip.protocol import BEGINNING, Outcome, Pulled
from lightning_adpsgd.gossip.waiting import Waiting
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.weights.replica import Replica
from tests.helpers import PATIENCE_S, until


class PlayedLane:
    """A lane whose peer hears all, until it is lost."""

    def __init__(self) -> None:
        self.num_hung_up = 0
        bound = SimpleNamespace(hang_up=self._hang_up)
        self.channel = SimpleNamespace(timeout=timedelta(seconds=4), bound=bound)
        self.heard: list[tuple[int, ...]] = []
        self.is_lost = False
        self.said_at = time.monotonic()

    def _hang_up(self) -> None:
        self.num_hung_up += 1

    def request(self) -> None:
        self.say(REQUEST)

    def hear(self) -> int:
        self.say()
        return LEAVE

    def pull(self, on_piece: Callable[[float], None]) -> Pulled:
        self.say(PULL)
        return Pulled(BEGINNING, [])

    def say(self, *words: int) -> None:
        if self.is_lost:
            raise PeerLost(1, "a test", "it is gone")
        self.heard.append(words)
        self.said_at = time.monotonic()


class Played:
    def __init__(self) -> None:
        self.lane, self.state = PlayedLane(), threading.Condition()
        self.threads: Any = SimpleNamespace(
            leaving=threading.Event(),
            is_over=False,
            start=lambda *_: None,
            state=self.state,
        )
        self.traffic: Any = SimpleNamespace(declined_by=lambda *_: None)
        lane: Any = self.lane
        self.asker = Asker(1, lane, self.traffic, self.threads, 0)
        self.replica = Replica([[torch.zeros(4)]], 1 << 20, self.state)
        members = self.members = Members.fixed(Schedule(find_topology("ring"), 4), 0)
        self.noted = list[Outcome]()
        note = lambda outcome, section: self.noted.append(outcome)  # noqa: E731
        quarantine: Any = SimpleNamespace(note=note, num_reloads=0)
        self.account = Account(members, self.replica, quarantine, self.state)
        lanes: Any = SimpleNamespace(
            asking=lambda peer: self.lane,
            answering=lambda peer: self.lane,
            timeout=timedelta(seconds=4),
        )
        self.peers = Peers(members, lanes, self.traffic, self.account, self.threads)


@pytest.fixture
def played() -> Played:
    return Played()


def test_the_loss_of_a_peer_that_was_dropped_is_no_news(played: Played) -> None:
    played.lane.is_lost = True
    played.asker.drop()
    played.peers._ask_all(1, played.asker)


def test_the_loss_of_another_is_raised(played: Played) -> None:
    played.lane.is_lost = played.threads.is_over = True
    with pytest.raises(PeerLost):
        played.peers._ask_all(1, played.asker)


def test_a_lane_that_its_peer_replaces_is_no_loss(played: Played) -> None:
    """A late report of it would end the new one."""
    threads = list[Callable[[], None]]()
    played.threads.start = lambda name, work: threads.append(work)
    played.peers.answer(1)
    played.peers.answer(1)
    played.lane.is_lost = True
    threads[0]()
    with pytest.raises(PeerLost):
        threads[1]()


def test_a_peer_that_is_forgotten_is_asked_no_more_and_its_loss_is_no_news(
    played: Played,
) -> None:
    threads = list[Callable[[], None]]()
    played.threads.start = lambda name, work: threads.append(work)
    played.peers.answer(1)
    played.peers.add(1)
    asker = played.peers._askers[1]
    played.peers.forget(1)
    assert asker.gone.is_set()
    played.lane.is_lost = True
    for work in threads:
        work()


def test_a_peer_has_one_asking_thread(played: Played) -> None:
    threads = list[str]()
    played.threads.start = lambda name, work: threads.append(name)
    for _ in range(2):
        played.peers.add(1)
    assert threads == ["ask-1"]


def test_a_thread_that_ends_leaves_the_one_that_has_followed(played: Played) -> None:
    """Its peer was dropped in the middle of an exchange, and is asked again."""
    played.peers.add(1)
    old = played.peers._askers[1]
    played.peers.drop(1)
    played.peers.add(1)
    new = played.peers._askers[1]
    played.peers._ask_all(1, old)
    assert played.peers._askers == {1: new}


@pytest.mark.parametrize("is_lost", [False, True])
def test_who_ends_or_declines_keeps_nobody_waiting(
    played: Played, is_lost: bool
) -> None:
    """A learner stays free for one that it has admitted."""
    declined, lane = list[tuple[int, int]](), played.lane
    played.traffic.declined_by = lambda *who: declined.append(who)
    played.peers._answer_word(1, lane, DECLINE)  # pyright: ignore
    assert declined == [(1, 0)]
    lane.is_lost = is_lost
    with pytest.raises(PeerLost) if is_lost else nullcontext():
        played.peers._answer_all(1, lane)  # pyright: ignore[reportArgumentType]
    assert declined == [(1, 0)] * 2
    # Who has left asks again after a pause, where members are fixed.
    assert lane.num_hung_up == is_lost


def test_what_is_asked_of_an_asker_wakes_it(played: Played) -> None:
    asker = played.asker
    acts = [asker.call, asker.pull, asker.drop, lambda: asker.say(ALIVE)]
    for act in acts:
        asker.called.clear()
        act()
        assert asker.called.is_set()


def test_an_asker_whose_thread_cannot_start_is_none(played: Played) -> None:
    """Or the next attempt would find it, and nobody would ask that peer."""
    threads, tries = list[str](), iter([RuntimeError("can't start new thread"), None])

    def start(name: str, work: Callable[[], None]) -> None:
        if (error := next(tries)) is not None:
            raise error
        threads.append(name)

    played.threads.start = start
    with pytest.raises(RuntimeError, match="can't start new thread"):
        played.peers.add(1)
    assert isinstance(played.peers.pull(1).exception(0), PeerLost)
    assert played.peers.drop(1).is_set()
    assert played.account.peers_by_age() == []
    played.peers.add(1)
    assert threads == ["ask-1"]


@pytest.mark.parametrize("for_good", [False, True])
def test_a_peer_hears_whether_this_end_leaves_for_good(
    played: Played, for_good: bool
) -> None:
    played.threads.is_over = True
    if for_good:
        played.threads.leaving.set()
    played.asker.run()
    assert played.lane.heard == [(LEAVE, int(for_good))]


def test_a_peer_is_silent_for_at_most_a_quarter_of_the_timeout(played: Played) -> None:
    assert played.asker._silence_s == 1.0


def test_a_peer_that_is_silent_for_too_long_is_told_of_until_something_comes(
    played: Played, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its host is cut off, say: its loss is known only after `timeout`."""
    clock, told = SimpleNamespace(now=100.0), list[int]()
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(waiting_module, "time", clock)
    of_learner = played.members, played.threads, played.peers
    waiting = Waiting(*of_learner, timedelta(seconds=4), create_autospec(Replica))
    played.peers.answer(1)
    for now, waits_since in (
        *((101.9, 100.0), (102.1, 100.0), (103.0, 100.0)),  # 4 s are the timeout
        *((104.0, 103.9), (105.0, math.inf), (106.0, 103.9)),
    ):
        clock.now, played.lane.channel.waits_since = now, waits_since
        waiting.warn_of_silence()
        told.append(len(caplog.messages))
    assert told == [0, 1, 1, 1, 1, 2]
    assert "nothing has come from super-learner 1 for 2 s" in caplog.messages[0]
    assert "Training ends if nothing comes for 4 s" in caplog.messages[0]
    played.lane.is_lost = True
    with pytest.raises(PeerLost):
        played.peers._answer_all(1, played.lane)  # pyright: ignore[reportArgumentType]
    clock.now += 60.0
    waiting.warn_of_silence()
    assert len(caplog.messages) == 2


def test_training_waits_for_an_exchange_of_which_messages_keep_coming(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout` is the longest silence, however long the whole exchange takes."""
    clock, replica = SimpleNamespace(now=100.0), create_autospec(Replica)
    clock.monotonic = lambda: clock.now
    replica.landed_at = 0.0
    monkeypatch.setattr(waiting_module, "time", clock)
    lands, threads = [103.0, 107.0, 114.0, 121.0], create_autospec(Threads)

    def look(condition: Callable[[], bool], seconds: float) -> bool:
        clock.now += seconds
        replica.landed_at = max([0.0, *(at for at in lands if at <= clock.now)])
        return condition()

    threads.wait_for = look
    waiting = Waiting(played.members, threads, None, timedelta(seconds=4), replica)
    waiting.until(lambda: clock.now >= 125.0, "its end")
    with pytest.raises(RuntimeError, match="waited 8 s for what does not come"):
        waiting.until(lambda: False, "what does not come")
    assert clock.now == 125.0 + 8  # from the beginning of the wait
    clock.now = 100.0
    with pytest.raises(RuntimeError, match="waited 8 s for what does not come"):
        waiting.until(lambda: False, "what does not come")
    assert clock.now == 121.0 + 8  # from the last message


class Waits:
    """Turns that do not come, with the seconds that a learner would wait for each."""

    def __init__(self, played: Played, turn: Turn) -> None:
        self.asker, self.seconds = played.asker, list[float]()
        self.turn: Turn = turn

    def await_turn(self, peer: int, unless: Any, section: int, seconds: float) -> Turn:
        self.seconds.append(seconds)
        self.asker.call()  # training steps on
        return self.turn


@pytest.mark.parametrize("turn", ["not yet", "met"])
def test_a_peer_hears_from_a_learner_whose_turn_never_comes(
    played: Played, turn: Turn
) -> None:
    """Because of `cpu_share`, or because the peer always asks first."""
    played.asker._traffic = waits = Waits(played, turn)  # pyright: ignore
    played.asker.call()
    for passed_s, expected in ((0.5, 0), (1.5, 1), (0.5, 0), (1.5, 1)):
        played.lane.heard.clear()
        played.lane.said_at = time.monotonic() - passed_s
        played.asker._wait_and_ask()
        assert played.lane.heard == [(ALIVE,)] * expected
    assert played.asker._due.is_set()  # an exchange is still due
    assert all(0 <= seconds <= 0.5 for seconds in waits.seconds)


def test_weights_are_pulled_before_an_exchange_that_waits_for_its_turn(
    played: Played,
) -> None:
    lane, traffic = played.lane, Traffic(played.account, played.state, cpu_share=0.05)
    traffic.cores.merged(60.0)  # an exchange may begin in a minute
    played.asker._traffic = traffic
    played.asker.call()
    asking = threading.Thread(target=played.asker._wait_and_ask, daemon=True)
    asking.start()
    until(lambda: traffic._under_way[0].in_line == [1], "the wait for its turn")
    pulled = played.asker.pull()
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    assert lane.heard == []  # no request
    traffic.hurry_on()
    traffic.make = lambda *_, **__: lane.say(REQUEST)  # pyright: ignore
    played.asker._wait_and_ask()
    assert pulled.result(0) == Pulled(BEGINNING, [])
    # The exchange is still due, and follows.
    assert lane.heard == [(PULL,), (REQUEST,)]


def test_weights_that_nobody_waits_for_any_more_are_not_asked_for(
    played: Played,
) -> None:
    """Over a link that is too slow for them, they would hold up all exchanges."""
    given_up = [played.asker.pull() for _ in range(3)]
    for one in given_up[:2]:
        one.cancel()
    played.asker._wait_and_ask()
    assert played.lane.heard == [(PULL,)]
    assert given_up[2].result(0) == Pulled(BEGINNING, [])


def test_weights_on_their_way_are_for_the_one_that_still_waits(played: Played) -> None:
    pulls = [played.asker.pull()]
    pull = played.lane.pull

    def takes_long(on_piece: Callable[[float], None]) -> Pulled:
        pulls[0].cancel()
        pulls.append(played.asker.pull())
        return pull(on_piece)

    played.lane.pull = takes_long  # pyright: ignore[reportAttributeAccessIssue]
    played.asker._wait_and_ask()
    assert played.lane.heard == [(PULL,)]
    assert pulls[1].result(0) == Pulled(BEGINNING, [])


class Trickle:
    """Weights of which a piece comes every 15 s of a played clock, then no more."""

    def __init__(self, played: Played, patch: pytest.MonkeyPatch, pieces: int) -> None:
        self.now, self.pieces, self.seen = 100.0, pieces, list[float]()
        patch.setattr(peers_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(peers_module, "_LOOK_S", 0.0)
        self.asker, self.pull = played.asker, played.asker.pull()

    def watch(self, share: float) -> None:
        self.seen.append(share)
        self.now += 15.0
        if len(self.seen) <= self.pieces:
            self.asker._note_piece(len(self.seen) / 10)
        if len(self.seen) == 10:
            self.pull.set_result(Pulled(BEGINNING, []))


def test_weights_that_still_come_are_waited_for(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    trickle = Trickle(played, monkeypatch, pieces=10)
    found = trickle.pull.result_while_it_moves(20.0, trickle.watch)
    assert found == Pulled(BEGINNING, [])
    assert trickle.seen == [number / 10 for number in range(10)]


def test_weights_of_which_no_piece_comes_any_more_are_not_waited_for(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    trickle = Trickle(played, monkeypatch, pieces=3)
    with pytest.raises(TimeoutError):
        trickle.pull.result_while_it_moves(20.0, trickle.watch)
    assert trickle.seen == [0.0, 0.1, 0.2, 0.3, 0.3]


def test_a_loss_is_told_to_those_that_still_wait(played: Played) -> None:
    given_up, waits = played.asker.pull(), played.asker.pull()
    given_up.cancel()
    played.asker.give_up()
    assert isinstance(waits.exception(0), PeerLost)


def test_one_that_is_asked_is_dropped_once_and_any_other_at_once(
    played: Played,
) -> None:
    assert played.peers.drop(1).is_set()
    played.peers.add(1)
    asker = played.peers._askers[1]
    ended = played.peers.drop(1)
    assert asker.gone.is_set()
    assert not ended.is_set()
    asker.give_up()
    assert ended.is_set()
    assert played.peers.drop(1) is not ended
    assert played.account.peers_by_age() == []


def test_the_peer_that_was_heard_of_last_is_the_first_by_age(played: Played) -> None:
    for peer in (1, 2, 3):
        played.account.open(peer)
    outcome = Outcome(finite=True, bytes_sent=1, first_step=0)
    for peer in (2, 3, 1):
        played.replica.step += 1
        played.account.exchanged(peer, outcome)
    assert played.account.peers_by_age() == [1, 3, 2]
    played.account.exchanged(9, outcome)  # it asks, and is not asked
    assert played.account.peers_by_age() == [1, 3, 2]


def test_who_has_diverged_asks_one_last_that_it_refuses_itself(played: Played) -> None:
    """Weights that are far too large are finite, and would be taken."""
    refused = Outcome(finite=True, bytes_sent=1, first_step=0, near=False)
    for peer, outcome in ((1, refused._replace(is_to_blame=True)), (2, refused)):
        played.replica.step += 1
        played.account.open(peer)
        played.account.exchanged(peer, outcome)
        played.account.warn_of(peer, outcome)
    assert played.account.peers_by_age() == [1, 2]


def test_a_peer_that_is_refused_again_after_an_average_is_warned_of_again(
    played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    refused = Outcome(finite=False, bytes_sent=1, first_step=0)
    for outcome in (refused, refused, refused._replace(finite=True), refused):
        played.account.warn_of(1, outcome)
    assert [text[-15:] for text in caplog.messages] == ["infinite or NaN"] * 2


def test_no_age_is_below_zero_where_training_goes_on_from_an_earlier_step(
    played: Played,
) -> None:
    played.replica.step = 1000
    played.account.open(1)
    played.replica.step = 10
    played.account.go_on_from(10)
    played.replica.step += 3
    assert played.account.statistics(0.0).peer_ages == {1: 3}
    assert played.account.steps_alone == 3


def test_no_staleness_is_below_zero_where_training_goes_on_from_an_earlier_step(
    played: Played,
) -> None:
    outcome = Outcome(finite=True, bytes_sent=1, first_step=1000)
    played.replica.step = 1000
    played.account.exchanged(1, outcome)  # and no merge follows before the load
    played.replica.step = 10
    played.account.go_on_from(10)
    played.account.exchanged(1, outcome)  # an island exchanges meanwhile
    played.account.exchanged(1, outcome._replace(first_step=10))
    played.account.merged(steps_late=0)
    assert played.account.statistics(0.0).staleness == {0: 1}
    assert [one.first_step for one in played.noted] == [1000, 10]


@pytest.mark.parametrize(
    ("has_been_met", "is_paused", "again"),
    [(False, False, True), (True, False, False), (False, True, False)],
)
def test_who_is_not_free_any_more_declines_and_requests_again_unless_they_have_met(
    played: Played, has_been_met: bool, is_paused: bool, again: bool
) -> None:
    """Nor in a pause, in which the request would only be declined again and again."""
    played.traffic.hurry, played.traffic.is_paused = threading.Event(), is_paused
    played.traffic.requesting = lambda peer, section: nullcontext()
    played.traffic.make = lambda *arguments, **more: False
    played.traffic.has_been_met = lambda peer, section: has_been_met
    played.asker._ask()
    assert played.lane.heard == [(REQUEST,), (DECLINE,)]
    assert played.asker.called.is_set() is again


def test_an_exchange_that_is_waited_for_is_not_requested(played: Played) -> None:
    played.traffic.hurry = threading.Event()
    played.traffic.hurry.set()
    made = list[bool]()
    played.traffic.make = lambda *_, admitted, **more: made.append(admitted)
    played.asker._ask()
    assert (made, played.lane.heard) == ([False], [])


def test_the_lock_is_not_held_while_a_warning_is_written(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log may take long to write, and training waits for the lock."""
    state: Any = played.state
    held = list[bool]()
    noted = lambda *_: held.append(state._is_owned())  # noqa: E731
    monkeypatch.setattr(account_module._log, "warning", noted)
    refused = Outcome(finite=False, bytes_sent=1, first_step=0)
    Traffic(played.account, state, cpu_share=1.0).make(1, lambda number: refused)
    assert held == [False]


# --- threads


def threads_of(said: list[str]) -> Threads:
    return Threads(torch.device("cpu"), threading.Condition(), said.append)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PeerLost(1, "a test", "it is gone"), "lost super-learner 1 while a test"),
        (KeyError(3), "raised KeyError: 3"),
        (MemoryError(), "raised MemoryError"),
    ],
)
def test_the_others_hear_the_type_of_an_error_but_for_a_loss(
    error: Exception, said: str
) -> None:
    threads = threads_of(heard := list[str]())
    threads.fail(error)
    assert heard[0].startswith(said)
    assert not heard[0].endswith(": ")


def test_threads_that_have_ended_are_not_kept() -> None:
    """Islands come and go for weeks."""
    threads = threads_of([])
    for _ in range(3):
        threads.start("ask-1", lambda: None)
        threads.join(time.perf_counter() + PATIENCE_S)
    assert len(threads._threads) == 1


def test_a_thread_that_the_system_refuses_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = threads_of([])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threads.start("ask-1", lambda: None)
    assert threads.join(time.perf_counter()) == []
