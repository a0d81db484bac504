"""How often and how fast to exchange: no more than the link and the cores can spare."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

# What an exchange costs in all, for each byte of the weights, in seconds: a guess until
# one was measured.
_SECONDS_PER_BYTE = 4e-9
# A training thread that is kept from a core for less than this share of the time has
# the cores that it needs.
_CONTENDED = 0.05
# What merges, and exchanges that keep it from a core, may take of such a thread's time.
TAKEN = 0.01
# For how long time that was not taken counts, and how long what is usual is remembered.
_SAVED_S, _REMEMBERED_S = 2.0, 10.0
# Over less than this a thread may be lucky with its cores; who waits looks as often.
_BETWEEN_LOOKS_S = 0.25
# Who exchanges less often than once a minute trains alone.
_LONGEST_PAUSE_S = 60.0


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
    """Bounds what exchanges take of a learner's processor time, or of its training's.

    Where the training thread has to queue for a core, exchanges take a share of the
    processor time. Until it is known, the cores are taken to be short. Where cores are
    idle, or train nothing, what counts is what the training thread loses: the time of
    merges, and for how long it queues while an exchange is under way beyond what is
    usual; of its time no more than a hundredth goes there.

    Exchanges are paid for in time: one that took a second, at a share of a tenth, is
    paid for after the learner's threads have had ten. Who asks pays beforehand what the
    exchange before has cost, so that of several who wait only one goes, and learners
    that begin together do not all begin with an exchange; who is asked pays afterwards.
    All of it is guarded by `_lock`.

    Args:
        share: 0 < share <= 1; 1 is no bound.
        num_bytes: Of the weights, by which the first exchange is paid for.
        overhead: All that an exchange costs, by what its own thread takes
            (`Transport.overhead`).
    """

    def __init__(self, share: float, num_bytes: int = 0, overhead: float = 1.0) -> None:
        self._share, self._overhead = share, overhead
        self._lock = threading.Lock()
        self._queue: Path | None = None
        # When all is paid; what an exchange costs, and what is paid ahead of its end,
        # both in seconds of processors.
        self._paid_at, self._ahead = 0.0, 0.0
        self._cost = _SECONDS_PER_BYTE * num_bytes
        self._mark = self._noted = _Mark(0.0, 0.0, 0.0)
        self._contended, self._rate = True, 1.0
        # Exchanges under way, since when the training has lost time, and how much of
        # each second it queues without them.
        self._under_way, self._free_at, self._usual = 0, 0.0, 0.0

    def watch_this_thread(self) -> None:
        """Makes the calling thread the one whose cores are spared."""
        queue = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._queue = queue if self._share < 1 and queue.exists() else None
        self._mark = self._noted = self._look()
        self._charge(self._cost)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around an exchange, by the thread that makes it."""
        begin = time.thread_time()
        with self._lock:
            self._note(1)
        try:
            yield
        finally:
            self.spent(time.thread_time() - begin)
            with self._lock:
                self._note(-1)

    def merged(self, seconds: float) -> None:
        """Reports what a merge took of the training thread."""
        with self._lock:
            self._lose(seconds, time.monotonic())

    def spent(self, processor_seconds: float) -> None:
        """Reports what the thread of an exchange took; for any thread."""
        with self._lock:
            self._cost = self._overhead * processor_seconds
            paid = min(self._ahead, self._cost)
            self._ahead -= paid
            self._charge(self._cost - paid)

    def pause_s(self) -> float:
        """For how long to wait, and then to call again; 0: an exchange may begin."""
        if self._queue is None:
            return 0.0
        with self._lock:
            self._update()
            if not self._contended:
                left = self._free_at - time.monotonic()
                return min(max(left, 0.0), _BETWEEN_LOOKS_S)
            left = self._paid_at - time.monotonic()
            if left > 0:
                return min(left, _BETWEEN_LOOKS_S)
            self._charge(self._cost)
            self._ahead += self._cost
            return 0.0

    def _charge(self, processor_seconds: float) -> None:
        now = time.monotonic()
        seconds = processor_seconds / (self._share * self._rate)
        self._paid_at = min(max(now, self._paid_at) + seconds, now + _LONGEST_PAUSE_S)

    def _note(self, change: int) -> None:
        """Looks at the time in which the number of exchanges under way was the same."""
        if self._queue is None:
            return
        mark = self._look()
        wall, queued = mark.wall - self._noted.wall, mark.queued - self._noted.queued
        if self._under_way:
            self._lose(max(0.0, queued - self._usual * wall), mark.wall)
        elif wall > 0:
            part = min(1.0, wall / _REMEMBERED_S)
            self._usual += part * (queued / wall - self._usual)
        self._under_way += change
        self._noted = mark

    def _lose(self, seconds: float, now: float) -> None:
        if self._contended:  # then exchanges pay for their work
            return
        begin = max(self._free_at, now - _SAVED_S)
        self._free_at = min(begin + seconds / TAKEN, now + _LONGEST_PAUSE_S)

    def _update(self) -> None:
        mark = self._look()
        wall = mark.wall - self._mark.wall
        if wall < _BETWEEN_LOOKS_S:
            return
        self._contended = mark.queued - self._mark.queued > _CONTENDED * wall
        self._rate = max(0.01, (mark.processor - self._mark.processor) / wall)
        self._mark = mark
        if not self._contended:  # nothing is owed to cores that nobody wants
            self._paid_at = self._ahead = 0.0

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
