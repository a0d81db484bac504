"""How often and how fast to exchange: no more than the link and the cores can spare."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# All that an exchange costs, by what its own thread takes: the network's thread,
# merges, caches that both use. Measured with 34 MB of weights at 1 Gbit/s.
_OVERHEAD = 3.5
# A training thread that is kept from a core for less than this share of the time has
# the cores that it needs.
_CONTENDED = 0.05
_LONGEST_PAUSE_S = 10.0


class Pacer:
    """Spreads bytes over time: a budget of bytes per second; shared by all threads.

    Args:
        bytes_per_second: None is no bound.
        clock: Tells the seconds.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._clock = bytes_per_second, clock
        self._lock = threading.Lock()
        self._free_at = 0.0

    def charge(self, num_bytes: float) -> float:
        """Takes bytes out of the budget and returns how long to wait before sending.

        Who is asked sends at once, whatever the budget says; who asks waits.
        """
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + num_bytes / self._rate
            return begin - now


class CoreShare:
    """Bounds the share of a learner's processor time that exchanges take.

    It binds only where the training thread has to queue for a core: where cores are
    idle, or train nothing, exchanges cost the training nothing. Exchanges report their
    processor time (`spent`, any thread); who is about to ask waits until it has become
    the agreed share (`pause_s`). `_next` and the two marks are guarded by `_lock`.

    Args:
        share: 0 < share <= 1; 1 is no bound.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._queue: Path | None = None
        self._next = 0.0
        self._mark = _Mark(0.0, 0.0, 0.0)
        self._contended, self._rate = False, 1.0

    def watch_this_thread(self) -> None:
        """Makes the calling thread the one whose cores are spared."""
        queue = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._queue = queue if self._share < 1 and queue.exists() else None
        self._mark = self._look()

    def spent(self, processor_seconds: float) -> None:
        """Reports what an exchange took."""
        with self._lock:
            seconds = _OVERHEAD * processor_seconds / (self._share * self._rate)
            now = time.monotonic()
            self._next = min(max(now, self._next) + seconds, now + _LONGEST_PAUSE_S)

    def pause_s(self) -> float:
        """Seconds to wait before the next exchange is asked for; 0 where none."""
        if self._queue is None:
            return 0.0
        with self._lock:
            self._update()
            return max(0.0, self._next - time.monotonic()) if self._contended else 0.0

    def _update(self) -> None:
        mark = self._look()
        wall = mark.wall - self._mark.wall
        if wall < 0.1:
            return
        self._contended = mark.queued - self._mark.queued > _CONTENDED * wall
        self._rate = max(0.01, (mark.processor - self._mark.processor) / wall)
        self._mark = mark

    def _look(self) -> "_Mark":
        queued_ns = 0
        if self._queue is not None:
            with suppress(OSError):  # the thread has ended
                queued_ns = int(self._queue.read_text().split()[1])
        return _Mark(time.monotonic(), time.process_time(), queued_ns / 1e9)


class _Mark(NamedTuple):
    """Seconds at one moment: of the clock, of processors, of waiting for one."""

    wall: float
    processor: float
    queued: float
