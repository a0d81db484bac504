"""Actions in a thread of their own, and calls that end in time or are dropped."""

import threading

import pytest
import torch

from lightning_adpsgd.weights.worker import (
    BackgroundWorker,
    CallTimedOut,
    TimedCalls,
)
from tests.helpers import PATIENCE_S


def interrupt() -> None:
    raise KeyboardInterrupt


def test_whatever_an_action_raises_reaches_who_waits_and_the_next_one_runs() -> None:
    worker = BackgroundWorker("worker", torch.device("cpu"))
    failed, done = worker.submit(interrupt), worker.submit(lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        failed.result(PATIENCE_S)
    assert done.result(PATIENCE_S) == 2
    worker.stop(PATIENCE_S)
    assert not worker._thread.is_alive()


def test_an_action_without_an_end_does_not_keep_the_process_from_its_exit() -> None:
    worker = BackgroundWorker("worker", torch.device("cpu"))
    assert worker.submit(lambda: threading.current_thread().daemon).result(PATIENCE_S)
    worker.stop(PATIENCE_S)


def test_no_call_is_queued_behind_one_that_is_late() -> None:
    calls, may_end, made = TimedCalls("calls"), threading.Event(), list[int]()
    with pytest.raises(CallTimedOut):
        calls.run(lambda: may_end.wait(PATIENCE_S), 0.0)
    with pytest.raises(CallTimedOut):
        calls.run(lambda: made.append(1), 0.0)
    may_end.set()
    assert calls.run(lambda: made.append(2), PATIENCE_S) is None
    assert made == [2]
    calls.stop(PATIENCE_S)
