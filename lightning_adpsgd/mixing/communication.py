"""The interface of averaging for a training loop, which is the same in every mode.

`strategy.engines.make_engine` chooses the implementation: `synchronous.Rounds` for
"sync" and "delay_by_one", `gossip.engine.Gossip` for "async" and "ready_pairs".
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_adpsgd.mixing.statistics import Statistics


class Communication(ABC):
    """Averaging with the other super-learners; for the training thread.

    Attributes:
        has_exchanges: whether exchanges run beside training, so `settle` can be undone.
        num_reloads: number of times that a peer's weights have replaced this learner's.
        sends_few_bits: whether weights last travelled in 8 bits or fewer when `settle`
            was called, because they must or because the link is slow.
    """

    has_exchanges = False
    num_reloads = 0
    sends_few_bits = False

    @abstractmethod
    def start(self) -> None:
        """Starts to communicate; the weights must be equal in all super-learners."""

    @abstractmethod
    def before_update(self) -> None:
        """Called when a gradient is ready, before the optimizer changes the weights."""

    @abstractmethod
    def after_update(self) -> None:
        """Called when the optimizer has changed the weights."""

    @abstractmethod
    def settle(self) -> None:
        """Merges all averages; every super-learner must have paused before."""

    @abstractmethod
    def stop(self) -> None:
        """Ends cleanly after `settle`: says goodbye to peers and joins threads."""

    @abstractmethod
    def abort(self) -> None:
        """Ends after a failure, within seconds and without a peer's help."""

    @property
    @abstractmethod
    def step_and_round(self) -> tuple[int, int]:
        """The numbers of the next optimizer step and the next round of the schedule."""

    @abstractmethod
    def go_on_from(self, step: int, round: int) -> None:
        """Continues counting from a given `step_and_round`."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """The counters so far."""

    # --- exchanges in the background, while the module holds the mean; rounds have none

    def pause(self) -> None:
        """Begins no more exchanges; returns when those begun here have ended."""
        return

    def set_aside(self, vectors: Sequence[Tensor], unmerged: bool = False) -> None:
        """Shows peers these vectors after `settle`, while the module holds the mean.

        Args:
            unmerged: whether these are the weights before `settle`, which is undone.
        """
        return

    def resume(self) -> None:
        """Resumes exchanges after `settle`, from the current weights."""
        return

    def release(self) -> None:
        """Releases peers that wait for this end, after a failure; for any thread."""
        return


def averaging_closure(
    closure: Callable[[], Any], average: Callable[[], Any]
) -> Callable[[], Any]:
    """A closure for an optimizer that averages after its first call.

    LBFGS calls it several times per step; the average belongs to the first call, when
    the gradients are first ready.
    """
    is_first = True

    def call() -> Any:
        nonlocal is_first
        output = closure()
        if is_first:
            is_first = False
            average()
        return output

    return call
