"""How much longer steps take beside exchanges, where no system counts it.

On a GPU the thread of an exchange and the training thread launch kernels by the same
driver and interpreter. What an exchange takes from training is neither its processor
time nor a wait for a core, so it is measured in steps.
"""

import statistics
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

# A median is taken of at most, and at least, so many steps of each kind.
_MOST, _LEAST = 32, 5
# After so many steps beside exchanges, those without one are out of date.
_LASTING = 2 * _MOST


class Slowdown:
    """Durations of the last steps beside exchanges, and of those without one.

    The training thread calls `stepped`, and threads of exchanges the other methods.
    `_lock` guards all fields.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._beside = deque[float](maxlen=_MOST)
        self._alone = deque[float](maxlen=_MOST)
        self._num_running, self._num_since_alone = 0, 0
        # When the step began; whether an exchange has run since.
        self._began: float | None = None
        self._is_beside = False

    def stepped(self, now: float) -> None:
        """Notes that a step has ended, and the next one begins."""
        with self._lock:
            if self._began is not None:
                self._note(now - self._began)
            self._began, self._is_beside = now, self._num_running > 0

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """A context in which an exchange runs."""
        with self._lock:
            self._num_running += 1
            self._is_beside = True
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1

    def taken_s(self, seconds: float, share: float) -> float:
        """The seconds of training that an exchange of this duration costs.

        It slows down the step in which it begins and those that begin during it, each
        by the difference of the two medians. Too few steps of either kind may be known,
        or those without an exchange out of date. Then the result makes room for five
        without one, even if it is charged when the exchange begins.

        Args:
            share: share of the training's time that exchanges may take, in (0, 1].
        """
        with self._lock:
            known = [*self._beside, *self._alone]
            rest_s = seconds + _LEAST * statistics.median(known or [0.0])
            if min(len(self._beside), len(self._alone)) < _LEAST:
                return share * rest_s if known else 0.0
            beside, alone = map(statistics.median, (self._beside, self._alone))
            taken_s = max(0.0, beside - alone) * (1 + seconds / beside)
            is_old = self._num_since_alone >= _LASTING
            return max(taken_s, share * rest_s) if is_old else taken_s

    def _note(self, seconds: float) -> None:
        if not self._is_beside:
            self._alone.append(seconds)
            self._num_since_alone = 0
            return
        self._beside.append(seconds)
        self._num_since_alone += 1
