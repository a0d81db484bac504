"""Makes SIGTERM end a process that waits for others, whatever the handler."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """A context that SIGTERM ends with `SystemExit`, after the previous handler.

    A Trainer's handler only notes the signal, and looks at the note after a batch. A
    process that waits for its first batch would not end. Ctrl-C raises
    `KeyboardInterrupt` as usual. Outside of the main thread, nothing changes.
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
