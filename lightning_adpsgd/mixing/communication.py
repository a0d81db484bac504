"""What a training loop sees of averaging, whichever mode it is in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_adpsgd.mixing.statistics import Statistics


class Communication(ABC):
    """Averaging with the other super-learners; driven by the training thread alone."""

    @abstractmethod
    def start(self) -> None:
        """Begins to communicate; the weights are equal in all super-learners."""

    @abstractmethod
    def before_update(self) -> None:
        """Called when a gradient is ready, before the optimizer changes the weights."""

    @abstractmethod
    def after_update(self) -> None:
        """Called when the optimizer has changed the weights."""

    @abstractmethod
    def settle(self) -> None:
        """Merges all that was averaged; every super-learner has paused by then."""

    @abstractmethod
    def stop(self) -> None:
        """Ends cleanly after `settle`: peers are told, threads joined."""

    @abstractmethod
    def abort(self) -> None:
        """Ends after a failure, within seconds and without a peer's help."""

    @property
    @abstractmethod
    def step_and_round(self) -> tuple[int, int]:
        """Numbers of the next optimizer step and of the next round of the schedule."""

    @abstractmethod
    def go_on_from(self, step: int, round: int) -> None:
        """Counts on from another's `step_and_round`."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """What was done so far."""


class Exchanges(ABC):
    """Exchanges beside the training thread, which pause while it holds the mean."""

    @property
    @abstractmethod
    def num_reloads(self) -> int:
        """How often the weights were replaced by those of a peer."""

    @abstractmethod
    def pause(self) -> None:
        """Begins no further exchange; returns when those begun here have ended."""

    @abstractmethod
    def set_aside(self, vectors: Sequence[Tensor]) -> None:
        """Shows peers these vectors after `settle`, while the weights hold the mean."""

    @abstractmethod
    def resume(self) -> None:
        """Begins exchanges again after `settle`, from the weights as they are."""

    @abstractmethod
    def release(self) -> None:
        """Lets go of peers that wait for this end; any thread calls it on a failure."""


class AveragingClosure:
    """An optimizer's closure that averages after its first call.

    LBFGS calls it several times a step; the average belongs to the first call.

    Args:
        closure: function that computes the gradients.
        average: function called once, when they are first ready.
    """

    def __init__(self, closure: Callable[[], Any], average: Callable[[], Any]) -> None:
        self._closure, self._average = closure, average
        self._is_first = True

    def __call__(self) -> Any:
        """Returns what the closure returns."""
        output = self._closure()
        if self._is_first:
            self._is_first = False
            self._average()
        return output
