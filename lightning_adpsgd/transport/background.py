"""How communication threads share the cores with training."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def in_background() -> Iterator[None]:
    """A context that runs the calling thread under SCHED_BATCH, on Linux.

    There, a message that wakes the thread does not interrupt training: it waits until a
    core is free or a time slice ends. Threads that start inside inherit this.
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
