"""How busy other programs kept this machine while a training ran.

Speeds are worth printing only where nothing else ran. The load average does not tell:
it counts the learners themselves, and what has just ended.
"""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle, and idle until a disk answers
_COUNTED_TWICE = 8  # guests are part of user and nice
_QUIET = 0.05


def others_since_now() -> Callable[[], float | None]:
    """Begins to look at the processor time of the whole machine.

    Returns:
        A function that returns the mean number of cores that other programs than this
        process and its ended children have kept busy since. It returns None where the
        system does not tell.
    """
    begin, busy, own = time.monotonic(), _busy_s(), _own_s()

    def others() -> float | None:
        now = _busy_s()
        if busy is None or now is None:
            return None
        spent = now - busy - (_own_s() - own)
        return max(0.0, spent / (time.monotonic() - begin))

    return others


def is_quiet(others: float | None, cores: int | None = None) -> bool:
    """Whether so few cores were busy with other programs that a speed can be told."""
    return others is not None and others <= _QUIET * (cores or os.cpu_count() or 1)


def _busy_s() -> float | None:
    """Seconds for which cores were not idle since the machine began."""
    try:
        line = _STAT.read_text().splitlines()[0]
    except OSError:
        return None
    ticks = [int(field) for field in line.split()[1:]][:_COUNTED_TWICE]
    busy = sum(count for place, count in enumerate(ticks) if place not in _IDLE)
    return busy / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Processor time of this process and of its children that have been joined."""
    usages = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    found = [resource.getrusage(usage) for usage in usages]
    return sum(one.ru_utime + one.ru_stime for one in found)
