"""The communication threads of one learner, and the error that ends them."""

import threading
import time
from collections.abc import Callable

import torch

from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.weights.streams import side_stream


class Threads:
    """Two for each peer, of which one asks and one answers; daemons, all of them.

    Under `_state`, whose waiters a failure wakes: `_threads`, all that run, and
    `_error`, written by the first thread that fails and read by the training thread.

    Args:
        device: Where each of them queues its work, on a stream of its own.
        state: The engine's lock.
        on_error: Called once, by the thread that fails first.
        on_lost: Called by a thread that lost its peer, with its number and the error,
            where peers come and go; none: then the loss of one is a failure.

    Attributes:
        leaving: Set when the learner ends: nothing is asked any more, and no loss is
            news.
    """

    def __init__(
        self,
        device: torch.device,
        state: threading.Condition,
        on_error: Callable[[str], None],
        on_lost: Callable[[int, PeerLost], None] | None,
    ) -> None:
        self._device, self._state = device, state
        self._on_error, self._on_lost = on_error, on_lost
        self.leaving = threading.Event()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether one of them has met an error that ends the learner."""
        return self._error is not None

    @property
    def is_over(self) -> bool:
        """Whether the learner ends, one way or another."""
        return self.leaving.is_set() or self.has_failed

    def start(self, verb: str, peer: int, work: Callable[[], None]) -> None:
        """Begins a thread for a peer, which ends with its work."""
        thread = threading.Thread(target=self._guard, args=(work, peer), daemon=True)
        thread.name = f"adpsgd-{verb}-{peer}"
        with self._state:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
            # Whoever ends the learner joins all of these at any time.
            thread.start()

    def fail(self, error: BaseException) -> None:
        """Ends the learner with an error of a communication thread."""
        with self._state:
            first = not self.is_over
            if first:
                self._error = error
            self._state.notify_all()
        if first:
            self._on_error(str(error))

    def end_with(self, error: BaseException) -> None:
        """Ends the learner with an error that its own threads did not meet."""
        with self._state:
            self._error = self._error or error
            self._state.notify_all()

    def raise_if_failed(self) -> None:
        """Raises what a communication thread met, in the thread that calls."""
        if self._error is not None:
            raise self._error

    def join(self, deadline: float) -> list[str]:
        """Waits for their ends, until `time.perf_counter` tells the deadline.

        Returns:
            The names of those that have not ended.
        """
        with self._state:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.perf_counter()))
        return [thread.name for thread in threads if thread.is_alive()]

    @torch.no_grad()
    def _guard(self, work: Callable[[], None], peer: int) -> None:
        try:
            with side_stream(self._device):
                work()
        except PeerLost as error:
            if self._on_lost is None:
                self.fail(error)
            elif not self.leaving.is_set():
                self._on_lost(peer, error)
        except BaseException as error:
            self.fail(error)
