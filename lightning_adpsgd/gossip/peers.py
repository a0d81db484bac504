"""The peers of one learner, and the two threads that talk to each.

One thread (`Asker`) requests an exchange when the schedule says so and it is the peer's
turn. The other admits the peer as soon as this learner has no other exchange under way,
and answers at once when it asks, whatever training is doing (`protocol.UnderWay`).
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from datetime import timedelta

import torch

from lightning_adpsgd.gossip.account import Account
from lightning_adpsgd.gossip.exchange import (
    ADMIT,
    ALIVE,
    ASKS,
    DECLINE,
    LEAVE,
    PULL,
    REQUEST,
    Lane,
    Lanes,
)
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.pacing import Traffic
from lightning_adpsgd.gossip.pairing import WORDS, Pairing, Word
from lightning_adpsgd.gossip.protocol import Pulled
from lightning_adpsgd.transport.background import in_background
from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.weights.streams import side_stream

_LONGEST_SILENCE_S = 10.0
# How often one that waits for weights looks whether they still come.
_LOOK_S = 0.5


def silence_s(timeout: timedelta) -> float:
    """The seconds within which an end of a lane must send a sign of life again."""
    return min(_LONGEST_SILENCE_S, timeout.total_seconds() / 4)


class Threads:
    """The communication threads of one learner, and the error that ends them.

    All of them are daemons, and each queues its work on a stream of its own. `state`
    guards `_threads`, which are those that run, and `_error`, which the first thread
    that fails writes and the training thread reads. A failure wakes all waiters.

    Args:
        on_error: function called once, by the thread whose error ends the learner, with
            what it did: it lost a peer, or "raised" an error.
        gives_way: whether they give way to training, because it never waits for them.

    Attributes:
        leaving: event that is set when the learner ends and asks nothing any more.
    """

    def __init__(
        self,
        device: torch.device,
        state: threading.Condition,
        on_error: Callable[[str], None],
        gives_way: bool = True,
    ) -> None:
        self._device, self.state, self._on_error = device, state, on_error
        self._scheduled = in_background if gives_way else nullcontext
        self.leaving = threading.Event()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a thread has met an error that ends the learner."""
        return self._error is not None

    @property
    def is_over(self) -> bool:
        """Whether the learner is ending, for whatever reason."""
        return self.leaving.is_set() or self.has_failed

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Starts a thread that ends with its work."""
        thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        thread.name = f"adpsgd-{name}"
        with self.state:
            self._threads = [one for one in self._threads if one.is_alive()]
            # Started first: the thread that ends the learner may join all of these at
            # any time, and the system may refuse to start one more.
            thread.start()
            self._threads.append(thread)

    def fail(self, error: BaseException) -> None:
        """Ends the learner with an error of a communication thread."""
        with self.state:
            first = not self.is_over
            if first:
                self._error = error
            self.state.notify_all()
        if first:
            is_loss = isinstance(error, PeerLost)
            raised = f"raised {type(error).__name__}: {error}".removesuffix(": ")
            self._on_error(str(error) if is_loss else raised)

    def end_with(self, error: BaseException) -> None:
        """Ends the learner with an error that its own threads did not meet."""
        with self.state:
            self._error = self._error or error
            self.state.notify_all()

    def raise_if_failed(self) -> None:
        """Raises the error of a communication thread, in the calling thread."""
        if self._error is not None:
            raise self._error

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for a condition; returns whether it holds in time, raises failures."""
        with self.state:
            done = self.state.wait_for(lambda: condition() or self.has_failed, seconds)
        self.raise_if_failed()
        return done

    def join(self, deadline: float) -> list[str]:
        """Waits until a deadline of `time.perf_counter`; names those that are left."""
        with self.state:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.perf_counter()))
        return [thread.name for thread in threads if thread.is_alive()]

    @torch.no_grad()
    def _run(self, work: Callable[[], None]) -> None:
        try:
            with self._scheduled(), side_stream(self._device):
                work()
        except BaseException as error:
            self.fail(error)


class Pull(Future[Pulled]):
    """A wait for the weights of one section of a peer; any thread may cancel it.

    Attributes:
        share: share of the weights that has come.
        moved_at: when a piece of them came last, or the wait began (`time.monotonic`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.share, self.moved_at = 0.0, time.monotonic()

    def result_while_it_moves(
        self, seconds: float, watch: Callable[[float], None]
    ) -> Pulled:
        """The weights, however long they take, if pieces of them keep coming.

        Args:
            seconds: longest time without a piece.
            watch: function called every half second with the share that has come; its
                exceptions end the wait.

        Raises:
            TimeoutError: No piece has come for so many seconds.
        """
        while (left := self.moved_at + seconds - time.monotonic()) > 0:
            with suppress(TimeoutError):
                return self.result(min(left, _LOOK_S))
            watch(self.share)
        return self.result(0)


class Asker:
    """The work of the thread that asks a peer, and its controls for other threads.

    `_state` guards `_pulls` and `_words`. Words are sent in order, before any exchange.
    Any thread may set the events `called` and `_due` (an exchange is due).

    Attributes:
        called: event that is set when there is something to do, or to end.
        gone: event that the peer is no longer to be asked, nor its loss reported.
        ended: event that is set when the thread has sent its last word.
    """

    def __init__(
        self,
        peer: int,
        lane: Lane,
        traffic: Traffic,
        threads: Threads,
        section: int,
        requests: bool = True,
    ) -> None:
        # In pairs both have agreed before.
        self._requests = requests
        self._peer, self._lane, self._state = peer, lane, threads.state
        self._traffic, self._threads, self._section = traffic, threads, section
        # The peer would take a longer silence for a loss.
        self._silence_s = silence_s(lane.channel.timeout)
        self.called, self._due = threading.Event(), threading.Event()
        self.gone, self.ended = threading.Event(), threading.Event()
        self._words, self._pulls = deque[int](), deque[Pull]()

    def say(self, word: int) -> None:
        """Queues a word for the peer; the caller holds the engine's lock."""
        self._words.append(word)
        self.called.set()

    def call(self) -> None:
        """Wakes the thread for a due exchange, or for the end of the learner."""
        self._due.set()
        self.called.set()

    def pull(self) -> Pull:
        """Asks for the peer's weights, until the result is cancelled."""
        pull = Pull()
        with self._state:
            self._pulls.append(pull)
            self._state.notify_all()
        self.called.set()
        return pull

    def drop(self) -> None:
        """Stops asking the peer; an exchange under way is completed."""
        with self._state:
            self.gone.set()
            self._state.notify_all()
        self.called.set()

    def run(self) -> None:
        """Asks, until the peer is dropped or lost or the learner ends."""
        while self._goes_on():
            self._wait_and_ask()
        self._lane.say(LEAVE, int(self._threads.leaving.is_set()))

    def give_up(self) -> None:
        """Fails all pulls that are still waiting for the peer's weights."""
        lost = PeerLost(self._peer, "pulling its weights", "the connection has ended")
        while (pull := self._take_pull()) is not None:
            pull.set_exception(lost)
        self.ended.set()

    def _goes_on(self) -> bool:
        return not self.gone.is_set() and not self._threads.is_over

    def _wait_and_ask(self) -> None:
        if self.called.wait(self._may_be_silent_s()):
            self.called.clear()
        self._pull_all()
        while self._words:
            self._lane.say(self._words.popleft())
        has_turn = self._has_turn()
        if not self._goes_on():
            return
        if has_turn:
            self._ask()
        elif not self._may_be_silent_s():
            self._lane.say(ALIVE)

    def _may_be_silent_s(self) -> float:
        """The seconds until the peer must hear a word.

        Exchanges that the peer asks for are no word: they use another connection.
        """
        return max(0.0, self._lane.said_at + self._silence_s - time.monotonic())

    def _has_turn(self) -> bool:
        """Whether an exchange is due, and its turn comes before a word must be said."""
        # Cleared only if seen, or a call at the end of the pause would be lost.
        if not self._due.is_set():
            return False
        self._due.clear()
        turn = self._traffic.await_turn(
            self._peer,
            lambda: self.gone.is_set() or self._has_pulls(),
            self._section,
            self._may_be_silent_s(),
        )
        if turn == "not yet":
            self.call()
        elif turn == "come":  # calls in the meantime mean the same exchange
            self._due.clear()
        return turn == "come"

    def _ask(self) -> None:
        if not self._requests or self._traffic.hurry.is_set():
            self._make(admitted=False)
            return
        with self._traffic.requesting(self._peer, self._section):
            self._lane.request()
        if not self._make(admitted=True):
            self._lane.say(DECLINE)
            has_been_met = self._traffic.has_been_met(self._peer, self._section)
            if not (has_been_met or self._traffic.is_paused):
                self.call()

    def _make(self, admitted: bool) -> bool:
        return self._traffic.make(
            self._peer,
            lambda number: self._lane.ask(
                number, self._traffic.step_seconds, self._traffic.cores.are_idle
            ),
            section=self._section,
            admitted=admitted,
        )

    def _pull_all(self) -> None:
        while self._has_pulls() and self._goes_on():
            pulled = self._lane.pull(self._note_piece)
            # The one that has asked for them may have given up, and another has not.
            if (pull := self._take_pull()) is not None:
                pull.set_result(pulled)

    def _has_pulls(self) -> bool:
        """Whether anyone waits for the peer's weights and has not given up."""
        with self._state:
            while self._pulls and self._pulls[0].cancelled():
                self._pulls.popleft()
            return bool(self._pulls)

    def _take_pull(self) -> Pull | None:
        """Takes the first wait that has not been given up, for the caller to end."""
        with self._state:
            while self._pulls:
                pull = self._pulls.popleft()
                if pull.set_running_or_notify_cancel():
                    return pull
        return None

    def _note_piece(self, share: float) -> None:
        with self._state:
            for pull in self._pulls:
                pull.share, pull.moved_at = share, time.monotonic()


class Peers:
    """The peers with which a learner exchanges one section; for any thread.

    `_state` guards `pairing` and, by peer, `_askers`, which control the asking threads,
    and `_forgotten`, whose events are set once the loss of a peer is known. Single
    operations change `_answering`, the lanes on which peers are answered.

    Args:
        pairing: agreement on pairs that meet at step boundaries; None: exchanges begin
            at any time.
        section: number of the section.
    """

    def __init__(
        self,
        members: Members,
        lanes: Lanes,
        traffic: Traffic,
        account: Account,
        threads: Threads,
        pairing: Pairing | None = None,
        section: int = 0,
    ) -> None:
        self.pairing, self._section = pairing, section
        self._members, self._lanes, self._traffic = members, lanes, traffic
        self._account, self._threads, self._state = account, threads, threads.state
        self._askers: dict[int, Asker] = {}
        self._forgotten: dict[int, threading.Event] = {}
        self._answering = dict[int, Lane]()

    def add(self, peer: int) -> None:
        """Starts the asking thread of a peer; does nothing if it has one.

        Raises:
            RuntimeError: The system refuses a thread; then the peer has none.
        """
        with self._state:
            if peer in self._askers:
                return
            lane = self._lanes.asking(peer)
            asker = Asker(
                *(peer, lane, self._traffic, self._threads, self._section),
                requests=self.pairing is None,
            )
            # Started first: the system may refuse a thread, and not the next time.
            self._threads.start(f"ask-{peer}", lambda: self._ask_all(peer, asker))
            self._askers[peer] = asker
            self._account.open(peer)

    def answer(self, peer: int) -> None:
        """Starts the thread that answers a peer until it leaves or is lost."""
        self._answering[peer] = lane = self._lanes.answering(peer)
        work = functools.partial(self._answer_all, peer, lane)
        with self._state:
            if (before := self._forgotten.get(peer)) is not None:
                before.set()  # the peer itself has replaced the lane of that thread
            self._forgotten[peer] = forgotten = threading.Event()
        self._threads.start(
            f"answer-{peer}", lambda: self._until_lost(peer, work, forgotten)
        )

    def drop(self, peer: int) -> threading.Event:
        """Stops asking a peer; an exchange under way is completed if possible.

        Returns:
            An event that is set when the asking thread has ended.
        """
        with self._state:
            self._account.close(peer)
            if (asker := self._askers.pop(peer, None)) is not None:
                asker.drop()
                return asker.ended
        (ended := threading.Event()).set()
        return ended

    def forget(self, peer: int) -> None:
        """Stops asking a peer, and does not report its loss."""
        with self._state:
            if (forgotten := self._forgotten.pop(peer, None)) is not None:
                forgotten.set()
        self.drop(peer)

    def pull(self, peer: int) -> Pull:
        """Asks an added peer for its weights; it fails with `PeerLost`."""
        with self._state:
            if (asker := self._askers.get(peer)) is not None:
                return asker.pull()
        pull = Pull()
        pull.set_exception(PeerLost(peer, "pulling its weights", "not connected"))
        return pull

    def say(self, words: Iterable[Word]) -> None:
        """Queues words for peers, in order; the caller holds the engine's lock."""
        for peer, word in words:
            if (asker := self._askers.get(peer)) is not None:
                asker.say(word)

    def call(self, numbers: Iterable[int]) -> None:
        """Calls for exchanges with these peers."""
        for peer in numbers:
            if (asker := self._askers.get(peer)) is not None:
                asker.call()

    def call_all(self) -> None:
        """Calls for exchanges with all peers, or wakes their threads for the end."""
        self.call(list(self._askers))

    def go_on_from(self, step: int) -> None:
        """Continues counting as if the last exchanges had been at this step."""
        self._lanes.go_on_from(step)

    def awaited_since(self) -> dict[int, float]:
        """The times, by peer, since which its next message is awaited (`Channel`)."""
        lanes = list(self._answering.items())
        return {peer: lane.channel.waits_since for peer, lane in lanes}

    def _answer_all(self, peer: int, lane: Lane) -> None:
        try:
            while (word := lane.hear()) != LEAVE:
                self._answer_word(peer, lane, word)
        except PeerLost:
            lane.channel.bound.hang_up()  # or who asks may wait for an answer
            raise
        finally:
            self._traffic.declined_by(peer, self._section)
            self._answering.pop(peer, None)
        if self._members.on_left is not None:
            lane.channel.bound.hang_up()
            self._members.on_left(peer, lane.heard_number > 0)

    def _answer_word(self, peer: int, lane: Lane, word: int) -> None:
        pairing = self.pairing
        if word == PULL:
            lane.give(self._members.position)
        elif word == REQUEST:
            self._traffic.admit(peer, silence_s(self._lanes.timeout), self._section)
            lane.say(ADMIT)
        elif word == DECLINE:
            self._traffic.declined_by(peer, self._section)
        elif word in ASKS:
            if pairing is not None:
                self._await_partner(peer, lane, pairing)
            self._traffic.make(peer, lane.answer, asked=True, section=self._section)
        elif word in WORDS and pairing is not None:
            with self._state:
                self.say(pairing.hear(peer, word))
                self._state.notify_all()

    def _await_partner(self, peer: int, lane: Lane, pairing: Pairing) -> None:
        # The other end may know first that all learners of both have agreed. This end's
        # weights must rest before they are read.
        seconds = self._lanes.timeout.total_seconds()
        try:
            has_come = self._threads.wait_for(lambda: pairing.partner == peer, seconds)
        except BaseException:
            lane.say(LEAVE, 1)  # it waits for an answer, also when it ends
            raise
        if not has_come:
            raise PeerLost(
                peer,
                "pairing with it",
                f"this end did not come to its step boundary within {seconds:g} s",
            )

    def _ask_all(self, peer: int, asker: Asker) -> None:
        try:
            self._until_lost(peer, asker.run, asker.gone)
        finally:
            with self._state:
                if self._askers.get(peer) is asker:
                    del self._askers[peer]
            asker.give_up()

    def _until_lost(
        self, peer: int, work: Callable[[], None], is_known: threading.Event
    ) -> None:
        try:
            work()
        except PeerLost as error:
            if not (is_known.is_set() or self._threads.leaving.is_set()):
                self._members.on_lost(peer, error)
