"""SIGTERM while a process waits for others: it ends, whatever handler there is."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the block by `SystemExit`, after the handler of before has run.

    A Trainer's handler only notes the signal, for the next batch. A process that waits
    for its first one would never look. Ctrl-C raises `KeyboardInterrupt` as it is. In
    another thread than the main one nothing is changed.
    """
    before = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is None or before is signal.SIG_IGN:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        if callable(before):
            before(number, frame)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
