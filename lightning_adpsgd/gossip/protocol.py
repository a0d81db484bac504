"""What the two ends of an exchange agree on: rules, and the values that cross.

Pure values, without threads, networks or clocks, so that the engine (`gossip`) and the
virtual cluster (`timeline`) follow the same rules.
"""

from collections import Counter, deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from torch import Tensor

# A median of a few is not that of an epoch's end, which takes many times a step.
_NUM_STEPS, _SHARE_OF_STEP = 5, 0.25
_MOST = 1 << 53


class Position(NamedTuple):
    """How far a learner has come.

    Attributes:
        steps: optimizer steps that its weights have seen.
        samples: samples that all learners had trained on, as far as it knows.
        epochs: epochs that it has completed.
    """

    steps: int = 0
    samples: int = 0
    epochs: int = 0

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Position":
        """Reads what a peer says.

        Raises:
            ValueError: A number is negative, or larger than any that is counted to.
        """
        if not all(0 <= number < _MOST for number in numbers):
            raise ValueError(f"its position must count from 0, got {[*numbers]}")
        return cls(*numbers)


BEGINNING = Position()


class Pulled(NamedTuple):
    """Where a peer is, and its x: one tensor for each chunk, on the host."""

    position: Position
    values: list[Tensor]


class Outcome(NamedTuple):
    """The result of one exchange at one end.

    Attributes:
        finite: whether all that crossed was finite; what was not is left out.
        bytes_sent: payload that this end sent.
        first_step: optimizer steps that the weights had seen when reading began.
        damaged: number of parts left out because they arrived damaged at one end.
        near: whether the two ends were as near as they usually are (`quarantine`); what
            was not is left out.
        mine: whether this end is to blame: its weights were not finite, or were the
            larger ones of two that were too far apart.
    """

    finite: bool
    bytes_sent: int
    first_step: int
    damaged: int = 0
    near: bool = True
    mine: bool = False

    @property
    def merged(self) -> bool:
        """Whether everything that arrived intact was averaged."""
        return self.finite and self.near


def due_round(step: int, every: int) -> int | None:
    """The round that a learner calls after so many steps; None where none is due."""
    round, rest = divmod(step, every)
    return round if rest == 0 else None


def exchange_weight(gain: float, num_mine: int, num_theirs: int) -> float:
    """a in ``d += a (theirs - mine)``, the same at both ends (Metropolis' weights).

    Two ends that meet alone take their mean, a = gain / 2. Overlapping exchanges would
    together overshoot the mean; these weights make the sum of them an average again.

    `num_mine` and `num_theirs` are the exchanges that each end had under way when this
    one began, this one included.
    """
    return gain / (1 + max(num_mine, num_theirs))


class Patience:
    """For how long a learner waits at a step boundary for a partner.

    `max_wait` is in seconds; None: a quarter of what its last few steps have taken.
    """

    def __init__(self, max_wait: float | None) -> None:
        self._max_wait, self._steps = max_wait, deque[float](maxlen=_NUM_STEPS)

    def seconds(self, of_step: float) -> float:
        """The longest wait after a step that took so many seconds."""
        self._steps.append(of_step)
        if self._max_wait is not None:
            return self._max_wait
        return _SHARE_OF_STEP * median(self._steps)


class UnderWay:
    """The exchanges that one learner has under way; the caller guards it.

    A learner does not ask a peer with which it is exchanging already: the exchange
    under way serves as well. A learner that is asked never refuses.
    """

    def __init__(self) -> None:
        self._with = Counter[int]()

    def enter(self, peer: int, asked: bool = False) -> int:
        """Begins an exchange; returns the number under way, or 0 if it must not."""
        if self._with[peer] and not asked:
            return 0
        self._with[peer] += 1
        return self._with.total()

    def leave(self, peer: int) -> None:
        """Ends an exchange with a peer."""
        self._with[peer] -= 1

    def total(self) -> int:
        """The number under way."""
        return self._with.total()
