"""How threads of communication share the cores with training."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def in_background() -> Iterator[None]:
    """Inside, no message makes Linux interrupt training for this thread.

    That holds for the threads that it starts inside, too, also outside. They get as
    much time as before; but where all cores are busy, they wait until one is free or a
    time slice ends. A slow link brings a packet at a time, and each would interrupt.
    """
    is_usual = sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER
    if is_usual:
        _set_policy(os.SCHED_BATCH)
    try:
        yield
    finally:
        if is_usual:
            _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> None:
    with suppress(OSError):  # a sandbox may refuse it
        os.sched_setscheduler(0, policy, os.sched_param(0))
