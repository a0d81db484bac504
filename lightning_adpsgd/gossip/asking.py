"""Asking one peer for exchanges, when the schedule says so, and for its weights."""

import threading
from collections import deque
from concurrent.futures import Future
from datetime import timedelta

from lightning_adpsgd.gossip.exchange import ALIVE, LEAVE, Lane, Pulled
from lightning_adpsgd.gossip.threads import Threads
from lightning_adpsgd.gossip.traffic import Traffic
from lightning_adpsgd.transport.base import PeerLost

_LONGEST_SILENCE_S = 10.0


class Asker:
    """What the thread that asks a peer does, and how others tell it to.

    `_pulls`, which are to be answered with the peer's weights, is guarded by `_state`.
    The events are set by any thread: `_due`, an exchange is to be asked for; `_gone`,
    the peer is not to be asked any more.

    Args:
        peer: Who is asked.
        traffic: Says which exchange may begin.
        threads: Tell whether the learner ends.
        state: The engine's lock.
        timeout: After which the peer would take this end's silence for its loss.

    Attributes:
        called: There is something to do, or to end.
        ended: The thread has said its last.
    """

    def __init__(
        self,
        peer: int,
        traffic: Traffic,
        threads: Threads,
        state: threading.Condition,
        timeout: timedelta,
    ) -> None:
        self.peer, self._state = peer, state
        self._traffic, self._threads = traffic, threads
        self._silence_s = min(_LONGEST_SILENCE_S, timeout.total_seconds() / 4)
        self.called, self._due = threading.Event(), threading.Event()
        self._gone, self.ended = threading.Event(), threading.Event()
        self._pulls: deque[Future[Pulled]] = deque()

    def call(self) -> None:
        """An exchange is due, or the learner ends."""
        self._due.set()
        self.called.set()

    def pull(self) -> "Future[Pulled]":
        """The peer's weights are asked for; before it has given up."""
        future: Future[Pulled] = Future()
        with self._state:
            self._pulls.append(future)
            self._state.notify_all()
        self.called.set()
        return future

    def drop(self) -> None:
        """The peer is asked no more; an exchange under way is made to its end."""
        with self._state:
            self._gone.set()
            self._state.notify_all()
        self.called.set()

    def run(self, lane: Lane) -> None:
        """Asks, until the peer is dropped or lost or the learner ends.

        Raises:
            PeerLost: It was, without having been dropped.
        """
        try:
            while self._asks():
                self._wait_and_ask(lane)
            lane.say(LEAVE, int(self._threads.leaving.is_set()))
        except PeerLost:
            # Of one that was dropped everybody knows.
            if not self._gone.is_set():
                raise

    def give_up(self) -> None:
        """Tells those who wait for the peer's weights that there will be none."""
        lost = PeerLost(self.peer, "pulling its weights", "the connection has ended")
        with self._state:
            pulls, self._pulls = self._pulls, deque()
        for future in pulls:
            future.set_exception(lost)
        self.ended.set()

    def _asks(self) -> bool:
        return not self._gone.is_set() and not self._threads.is_over

    def _wait_and_ask(self, lane: Lane) -> None:
        if called := self.called.wait(self._silence_s):
            self.called.clear()
        self._pull_all(lane)
        # Cleared only if seen, or a call at the end of the pause would be lost.
        if due := self._due.is_set():
            self._traffic.rest(lambda: self._gone.is_set() or bool(self._pulls))
            self._due.clear()
        if not self._asks():
            return
        if not called:
            lane.say(ALIVE)
        elif due:
            self._ask(lane)

    def _ask(self, lane: Lane) -> None:
        pacer, hurry = self._traffic.pacer, self._traffic.hurry
        self._traffic.make(self.peer, lambda number: lane.ask(number, pacer, hurry))

    def _pull_all(self, lane: Lane) -> None:
        while self._pulls and self._asks():
            # It stays in the queue meanwhile, from which it is told of a loss.
            self._pulls[0].set_result(lane.pull())
            self._pulls.popleft()
