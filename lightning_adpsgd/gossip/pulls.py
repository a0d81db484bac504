"""Pulls: waits for all weights of a peer, and the share of them that has come."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from lightning_adpsgd.gossip.protocol import Pulled

_LOOK_S = 0.5


class Pull(Future[Pulled]):
    """A wait for the weights of one section of a peer; any thread may cancel it.

    Attributes:
        share: share of the weights that has come.
        moved_at: time of `time.monotonic` at which a piece of them came last, or the
            wait began.
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


class Pulls:
    """The waits of all threads for one peer's weights, in the order of asking.

    `_state` guards them, and is notified of each new one.
    """

    def __init__(self, state: threading.Condition) -> None:
        self._state, self._waits = state, deque[Pull]()

    def add(self) -> Pull:
        """Begins a wait."""
        pull = Pull()
        with self._state:
            self._waits.append(pull)
            self._state.notify_all()
        return pull

    def any_waits(self) -> bool:
        """Whether any wait has not been given up."""
        with self._state:
            while self._waits and self._waits[0].cancelled():
                self._waits.popleft()
            return bool(self._waits)

    def moved(self, share: float) -> None:
        """Notes for all waits that a piece has come."""
        with self._state:
            for pull in self._waits:
                pull.share, pull.moved_at = share, time.monotonic()

    def take(self) -> Pull | None:
        """Takes the first wait that has not been given up, for the caller to end."""
        with self._state:
            while self._waits:
                pull = self._waits.popleft()
                if pull.set_running_or_notify_cancel():
                    return pull
        return None
