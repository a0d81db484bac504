"""How threads of communication share the cores with training."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def in_background() -> Iterator[None]:
    """Runs the calling thread under SCHED_BATCH, on Linux.

    A message that wakes it does not interrupt training then. Threads that it starts
    inside inherit this, and keep it afterwards. They get as much time as before, but
    where all cores are busy, they wait until one is free or a time slice ends. Packets
    of a slow link come one at a time, and each would interrupt.
    """
    is_usual = _is_usual()
    if is_usual:
        _set_policy(os.SCHED_BATCH)
    try:
        yield
    finally:
        if is_usual:
            _set_policy(os.SCHED_OTHER)


def _is_usual() -> bool:
    if sys.platform != "linux":
        return False
    try:
        return os.sched_getscheduler(0) == os.SCHED_OTHER
    except OSError:  # musl, or a sandbox
        return False


def _set_policy(policy: int) -> None:
    with suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))
