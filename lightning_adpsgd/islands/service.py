"""Service threads: they take turns, and an unexpected error does not end them."""

import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

_log = logging.getLogger(__name__)

MOST_ERRORS = 20
"""After so many failed turns in a row, the learner ends."""

_MEASURED_S = 2.0


def uptime_s() -> float:
    """Seconds by a monotonic clock that, on Linux, also runs while the machine sleeps.

    `time.monotonic` stands still on Linux while the machine is suspended.
    """
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class TrainingWatch:
    """Distinguishes training beside a slow turn from a few steps just after a stop.

    Args:
        steps: function for the number of steps so far.
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        self._count, self.began, self._steps = steps, 0.0, 0
        self._measured_at, self._measured_steps = 0.0, 0
        self._last_rate, self._steps_per_s = 0.0, 0.0

    def begin_turn(self, now: float) -> None:
        """Measures the rate of steps: the lower of the last two, as steps may jump."""
        self.began, self._steps = now, self._count()
        seconds = now - self._measured_at
        # One turn may have no step although training goes on.
        if seconds >= _MEASURED_S:
            rate = (self._steps - self._measured_steps) / seconds
            self._steps_per_s, self._last_rate = min(rate, self._last_rate), rate
            self._measured_at, self._measured_steps = now, self._steps

    def goes_on(self, now: float) -> bool:
        """Whether training made two steps in this turn, and a tenth of the usual."""
        usual = self._steps_per_s * (now - self.began)
        return self._count() - self._steps >= max(2, usual / 10)


class ServiceThread(ABC):
    """A thread that takes turns and rests after each, until `stop`.

    `_state` guards `_ending` and `_num_turns`. It is notified after each turn, and held
    during `_rest`, which waits on it. Other threads read the attributes.

    Args:
        name: phrase for the thread in messages.
        thread: name of the thread in the system.
        fail: function called with the error that ends the learner.

    Attributes:
        num_errors: number of failed turns.
    """

    def __init__(
        self, name: str, thread: str, fail: Callable[[BaseException], None]
    ) -> None:
        self.name, self._fail = name, fail
        self.num_errors, self._in_a_row = 0, 0
        self._state, self._ending, self._num_turns = threading.Condition(), False, 0
        self._thread = threading.Thread(target=self._work, name=thread, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def refresh(self, seconds: float) -> bool:
        """Waits until a turn has ended; returns whether one has in time."""
        with self._state:
            turn = self._num_turns
            return self._state.wait_for(lambda: self._num_turns > turn, seconds)

    def stop(self, seconds: float) -> None:
        """Ends the thread; waits that long for it."""
        with self._state:
            self._ending = True
            self._state.notify_all()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    @property
    def has_just_failed(self) -> bool:
        """Whether the last turn has failed."""
        return self._in_a_row > 0

    def take(self, turn: Callable[[], None]) -> bool:
        """Takes a turn; returns whether the thread goes on."""
        try:
            turn()
        except Exception as error:
            return self._note(error)
        self._in_a_row = 0
        return True

    @abstractmethod
    def _take_turn(self) -> None: ...

    @abstractmethod
    def _rest(self) -> None: ...

    def _work(self) -> bool:
        goes_on = True
        while goes_on and not self._ending:
            goes_on = self.take(self._take_turn)
            with self._state:
                self._num_turns += 1
                self._state.notify_all()
                if goes_on and not self._ending:
                    self._rest()
        return goes_on

    def _note(self, error: Exception) -> bool:
        self.num_errors += 1
        self._in_a_row += 1
        number = self.num_errors
        if number.bit_count() == 1:  # 1, 2, 4, 8, ...
            _log.warning(
                "%s met an unexpected error (%d so far) and tries again: %r",
                *(self.name, number, error),
                exc_info=error,
            )
        if self._in_a_row < MOST_ERRORS:
            return True
        end = RuntimeError(
            f"{self.name} has failed {self._in_a_row} times in a row: {error!r}. So "
            "this learner ends; see the traceback in the log"
        )
        end.__cause__ = error
        self._fail(end)
        return False
