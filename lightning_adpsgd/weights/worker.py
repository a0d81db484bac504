"""A thread that runs actions one after another, beside the training thread."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from lightning_adpsgd.weights.streams import side_stream

T = TypeVar("T")
_Task = Callable[[], None]


class BackgroundWorker:
    """Runs actions one after another in a thread of its own.

    Unlike the executors of `concurrent.futures`, its thread is a daemon: an action that
    waits for a lost peer does not delay the exit of the process.

    Args:
        name: name of the thread, which the first action starts.
        device: device on which actions queue work, on the thread's own stream.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def submit(self, action: Callable[[], T]) -> "Future[T]":
        """Queues an action; the future gets its result or exception."""
        if self._thread.ident is None:
            self._thread.start()
        future: Future[T] = Future()
        self._tasks.put(lambda: _settle(future, action))
        return future

    def stop(self, seconds: float | None) -> None:
        """Ends the thread after its queue; waits up to `seconds`, or without limit."""
        self._tasks.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _work(self) -> None:
        with side_stream(self._device):
            while (task := self._tasks.get()) is not None:
                task()


class CallTimedOut(Exception):
    """A call did not finish in time; it may still be under way."""


class TimedCalls:
    """Makes calls one after another in a separate thread; for one calling thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._worker = BackgroundWorker(name, torch.device("cpu"))
        self._last: Future[Any] | None = None

    def run(self, call: Callable[[], T], seconds: float) -> T:
        """Returns the result of a call, or raises `CallTimedOut` and drops it."""
        if not self.await_last(seconds):
            raise CallTimedOut
        self._last = future = self._worker.submit(call)
        if not self.await_last(seconds):
            raise CallTimedOut
        return future.result()

    def await_last(self, seconds: float) -> bool:
        """Waits for a call under way, if any; returns whether it has ended."""
        pending = [] if self._last is None else [self._last]
        return not wait(pending, max(0.0, seconds)).not_done

    def stop(self, seconds: float = 0.0) -> None:
        """Ends the thread after the call under way; waits for that up to `seconds`."""
        self._worker.stop(None if self.await_last(seconds) else 0.0)
        self._worker = BackgroundWorker(self._name, torch.device("cpu"))
        self._last = None


class InlineWorker:
    """Runs each action when it is queued, in the calling thread."""

    def submit(self, action: Callable[[], T]) -> "Future[T]":
        """Runs an action, whose exception ends the call; the future has its result."""
        future: Future[T] = Future()
        future.set_result(action())
        return future

    def stop(self, seconds: float | None) -> None:
        """Does nothing, because there is no queue and no thread."""


def _settle(future: "Future[T]", action: Callable[[], T]) -> None:
    try:
        result = action()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
