"""How often and how fast to exchange: no more than the link and the cores can spare."""

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

# What an exchange costs in all, for each byte of the weights, in seconds: a guess until
# one was measured.
_SECONDS_PER_BYTE = 4e-9
# What merges, and exchanges that find no idle core, may take of the training's time.
TAKEN = 0.01
# For how long time that was not taken counts.
_SAVED_S = 2.0
# Over less than this cores may be idle by chance; who waits looks as often.
_BETWEEN_LOOKS_S = 0.25
# Who exchanges less often than once a minute trains alone.
_LONGEST_PAUSE_S = 60.0
# Where Linux tells of each core's time.
_STATISTICS = Path("/proc/stat")


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
    """Bounds what exchanges take of the training's time, and of processor time.

    Two accounts are kept, and an exchange may begin as soon as one of them is even:

    - Of the *training's* time no more than a hundredth goes to merges, and to the work
      of exchanges that finds every core busy, as all of it does where cores are short.
      To learners of one machine each does about as much harm as it suffers. How busy
      the cores are is seen while exchanges are under way, which come in bursts.
    - Of the learner's *processor* time exchanges take no more than a share, which is
      the larger bound where training computes on all cores.

    Debts are paid by time that passes: an exchange that took a second, at a share of a
    tenth, is paid for after the learner's threads have had ten. Who asks pays
    beforehand what the exchange before has cost, so that of several who wait only one
    goes, and learners that begin together do not all begin with an exchange; who is
    asked pays afterwards. All of it is guarded by `_lock`.

    Args:
        share: 0 < share <= 1; 1 is no bound.
        num_bytes: Of the weights, by which the first exchange is paid for.
        overhead: All that an exchange costs, by what its own thread takes
            (`Transport.overhead`).
    """

    def __init__(self, share: float, num_bytes: int = 0, overhead: float = 1.0) -> None:
        self._share, self._overhead = share, overhead
        self._lock = threading.Lock()
        self._cores: frozenset[int] = frozenset()
        # When the processor time is paid, and when the training's time; what an
        # exchange costs, and what is paid ahead of its end, in seconds of processors.
        self._paid_at, self._made_up_at, self._ahead = 0.0, math.inf, 0.0
        self._cost = _SECONDS_PER_BYTE * num_bytes
        # Processors that the learner has; what finds all cores busy, once it is known.
        self._mark, self._rate = _Mark(0.0, 0.0, 0.0), 1.0
        self._crowded: float | None = None
        # Exchanges under way, since when there are so many, and the time in which there
        # were any, with what the cores rested meanwhile.
        self._under_way, self._noted = 0, self._mark
        self._burst_s, self._rested_s = 0.0, 0.0

    def watch_this_thread(self) -> None:
        """Makes the calling thread the one whose cores are spared."""
        if self._share < 1 and _STATISTICS.exists():
            self._cores = frozenset(os.sched_getaffinity(0))
        self._mark = self._look()
        self._charge(self._cost)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around an exchange, by the thread that makes it."""
        begin = time.thread_time()
        self._note(1)
        try:
            yield
        finally:
            self._note(-1)
            self.spent(time.thread_time() - begin)

    def merged(self, seconds: float) -> None:
        """Reports what a merge took of the training thread."""
        with self._lock:
            self._take(seconds)

    def spent(self, processor_seconds: float) -> None:
        """Reports what the thread of an exchange took; for any thread."""
        with self._lock:
            self._cost = self._overhead * processor_seconds
            paid = min(self._ahead, self._cost)
            self._ahead -= paid
            self._charge(self._cost - paid)

    def pause_s(self) -> float:
        """For how long to wait, and then to call again; 0: an exchange may begin."""
        if not self._cores:
            return 0.0
        with self._lock:
            self._update()
            left = min(self._paid_at, self._made_up_at) - time.monotonic()
            if left > 0:
                return min(left, _BETWEEN_LOOKS_S)
            self._charge(self._cost)
            self._ahead += self._cost
            return 0.0

    def _charge(self, processor_seconds: float) -> None:
        self._paid_at = _later(
            self._paid_at, processor_seconds / (self._share * self._rate)
        )
        self._take(processor_seconds * (self._crowded or 0.0))

    def _take(self, seconds: float) -> None:
        if self._crowded is not None:
            self._made_up_at = _later(self._made_up_at, seconds / TAKEN, _SAVED_S)

    def _update(self) -> None:
        wall = time.monotonic() - self._mark.wall
        if wall < _BETWEEN_LOOKS_S:
            return
        last, self._mark = self._mark, self._look()
        self._rate = max(0.01, (self._mark.processor - last.processor) / wall)
        if self._crowded is None:
            self._crowded = self._found(wall, self._mark.idle - last.idle)
            self._made_up_at = time.monotonic()
            self._take(self._cost * self._crowded)

    def _note(self, change: int) -> None:
        """Looks at the time in which the number of exchanges under way was the same."""
        if not self._cores:
            return
        with self._lock:
            last, self._noted = self._noted, self._look()
            if self._under_way:
                self._burst_s += self._noted.wall - last.wall
                self._rested_s += self._noted.idle - last.idle
            self._under_way += change
            if self._burst_s >= _BETWEEN_LOOKS_S:
                self._crowded = self._found(self._burst_s, self._rested_s)
                self._burst_s = self._rested_s = 0.0

    def _found(self, wall: float, idle: float) -> float:
        """What finds all cores busy, by how long they rested all together."""
        num_cores = len(self._cores)
        return crowded(1 - idle / (num_cores * wall), num_cores)

    def _look(self) -> "_Mark":
        return _Mark(time.monotonic(), time.process_time(), _idle_s(self._cores))


def crowded(busy: float, num_cores: float) -> float:
    """The chance to find every core busy, if each is so by itself for this share."""
    return min(max(busy, 0.0), 1.0) ** max(num_cores, 1.0)


class _Mark(NamedTuple):
    """Seconds at one moment: of the clock, of processors, of cores without work."""

    wall: float
    processor: float
    idle: float


def _later(paid_at: float, seconds: float, saved_s: float = 0.0) -> float:
    now = time.monotonic()
    return min(max(now - saved_s, paid_at) + seconds, now + _LONGEST_PAUSE_S)


def _idle_s(cores: Collection[int]) -> float:
    """For how long these cores had nothing to do, all together, since the start."""
    if not cores:
        return 0.0
    names = {f"cpu{core}" for core in cores}
    lines = map(str.split, _STATISTICS.read_text().splitlines())
    # After the name: user, nice, system, idle, waiting for a disk, and more.
    ticks = sum(int(x[4]) + int(x[5]) for x in lines if x and x[0] in names)
    return ticks / os.sysconf("SC_CLK_TCK")
