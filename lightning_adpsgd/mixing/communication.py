"""What a training loop sees of averaging, whichever mode it is in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_adpsgd.mixing.statistics import Statistics


class Communication(ABC):
    """How a super-learner averages with others; driven by the training thread alone."""

    @abstractmethod
    def start(self) -> None:
        """Begins to communicate; the weights are equal in all super-learners."""

    @abstractmethod
    def before_update(self) -> None:
        """Called when a gradient is ready and before the optimizer changes weights."""

    @abstractmethod
    def after_update(self) -> None:
        """Called when the optimizer has changed the weights."""

    @abstractmethod
    def settle(self) -> None:
        """Merges all that was averaged; every super-learner has paused before."""

    @abstractmethod
    def stop(self) -> None:
        """Ends cleanly after `settle`: peers are told, threads joined."""

    @abstractmethod
    def abort(self) -> None:
        """Ends after a failure, within seconds and without a peer's help."""

    @property
    @abstractmethod
    def step_and_round(self) -> tuple[int, int]:
        """Optimizer steps, and rounds of the schedule begun: what comes next."""

    @abstractmethod
    def go_on_from(self, step: int, round: int) -> None:
        """Counts on from another's `step_and_round`."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """What was done so far."""


class Exchanges(ABC):
    """What goes on beside the training thread, and must rest while it holds a mean."""

    @property
    @abstractmethod
    def num_reloads(self) -> int:
        """How often the weights were replaced by those of a peer."""

    @abstractmethod
    def pause(self) -> None:
        """Begins no exchange any more, and returns when those begun here have ended."""

    @abstractmethod
    def set_aside(self, vectors: Sequence[Tensor]) -> None:
        """What peers see after `settle`, while others stand in the weights' place."""

    @abstractmethod
    def resume(self) -> None:
        """Goes on after `settle`, from the weights as they are."""

    @abstractmethod
    def release(self) -> None:
        """Lets go of peers that wait for this end; called by any thread on a failure.

        The training thread may be in the middle of a long step.
        """


class AveragingClosure:
    """An optimizer's closure, after whose first call the average may be taken.

    LBFGS calls it several times a step; the average belongs to the first.

    Args:
        closure: Computes the gradients.
        average: Called once, when they are there for the first time.
    """

    def __init__(self, closure: Callable[[], Any], average: Callable[[], Any]) -> None:
        self._closure, self._average = closure, average
        self._is_first = True

    def __call__(self) -> Any:
        """What the closure returns."""
        output = self._closure()
        if self._is_first:
            self._is_first = False
            self._average()
        return output
