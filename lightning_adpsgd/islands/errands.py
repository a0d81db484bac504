"""Actions that may hang, in a thread of their own, so that who calls need not."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from lightning_adpsgd.weights.worker import Worker

T = TypeVar("T")


class Late(Exception):
    """An action was not done in time, and may still be done."""


class Errands:
    """Does one action after another; for one calling thread.

    Args:
        name: Of the thread, which the first action starts.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._worker: Worker | None = None
        self._last: Future[Any] = Future()
        self._last.set_result(None)

    def run(self, action: Callable[[], T], seconds: float) -> T:
        """What an action gives.

        Raises:
            Late: It has not ended in time, or the one before it has not. What it gives
                when it ends is lost.
        """
        if not self.await_last(seconds):
            raise Late
        if self._worker is None:
            self._worker = Worker(self._name, torch.device("cpu"))
        self._last = future = self._worker.submit(action)
        if not self.await_last(seconds):
            raise Late
        return future.result()

    def await_last(self, seconds: float) -> bool:
        """Waits until nothing is being done; returns whether that is so."""
        return not wait([self._last], max(0.0, seconds)).not_done

    def stop(self) -> None:
        """Ends the thread, when the action that it is doing ends; does not await it."""
        if self._worker is not None:
            self._worker.stop(None if self._last.done() else 0.0)
        self._worker = None
        self._last = Future()
        self._last.set_result(None)
