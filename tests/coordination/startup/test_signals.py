"""SIGTERM ends a wait, whatever a handler would do with it."""

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_adpsgd.coordination.startup.signals import ended_by_sigterm


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """What a handler of SIGTERM notes, as a Trainer's does, without ending anything."""
    numbers = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_a_wait_after_the_handler_of_before(noted: list[int]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert (ended.value.code, noted) == (128 + signal.SIGTERM, [signal.SIGTERM])
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_what_is_no_handler_is_back_after_a_wait_and_who_ignores_it_goes_on(
    noted: list[int], before: Any
) -> None:
    signal.signal(signal.SIGTERM, before)
    ends = list[object]()
    try:
        with ended_by_sigterm():
            assert (signal.getsignal(signal.SIGTERM) is before) == (
                before is signal.SIG_IGN
            )
            signal.raise_signal(signal.SIGTERM)
    except SystemExit as ended:
        ends.append(ended.code)
    assert ends == ([143] if before is signal.SIG_DFL else [])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_may_wait_too(noted: list[int]) -> None:
    """Python takes handlers from the main thread alone."""
    seen, handler = list[object](), signal.getsignal(signal.SIGTERM)

    def wait() -> None:
        with ended_by_sigterm():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert seen == [handler]
