"""The rules that both ends of an exchange follow, and the values that they send.

They are pure, without threads, networks or clocks, so that the engine (`gossip`) and
the virtual cluster (`timeline`) share them.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from torch import Tensor

# A median of a few is not that of an epoch's end, which takes many times a step.
_NUM_STEPS, _SHARE_OF_STEP = 5, 0.25
_MOST = 1 << 53
_MOMENT = 1e-9  # seconds, which clocks do not tell apart


class Position(NamedTuple):
    """The progress of a learner.

    Attributes:
        steps: number of optimizer steps that its weights have seen.
        samples: number of samples that all learners have trained on, as far as it
            knows.
        epochs: number of epochs that it has completed.
    """

    steps: int = 0
    samples: int = 0
    epochs: int = 0

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Position":
        """Reads the numbers of a peer.

        Raises:
            ValueError: A number is negative or implausibly large.
        """
        if not all(0 <= number < _MOST for number in numbers):
            raise ValueError(f"its position must count from 0, got {[*numbers]}")
        return cls(*numbers)


BEGINNING = Position()


class Pulled(NamedTuple):
    """A peer's position and its weights x: one tensor for each chunk, on the host."""

    position: Position
    values: list[Tensor]


class Outcome(NamedTuple):
    """The result of one exchange at one end.

    Attributes:
        finite: whether all parts were finite; others were left out.
        bytes_sent: payload bytes that this end sent.
        first_step: number of optimizer steps that the weights had seen when reading
            began.
        damaged: number of parts left out because they arrived damaged at one end.
        near: whether the two ends were as close as usual (`quarantine`); parts that
            were too far away were left out.
        mine: whether this end is to blame: its weights were non-finite, or the larger
            ones of two ends that were too far apart.
    """

    finite: bool
    bytes_sent: int
    first_step: int
    damaged: int = 0
    near: bool = True
    mine: bool = False

    @property
    def merged(self) -> bool:
        """Whether all parts that arrived intact were averaged."""
        return self.finite and self.near


def due_round(step: int, every: int) -> int | None:
    """The round that a learner starts after `step` steps; None if none is due."""
    round, rest = divmod(step, every)
    return round if rest == 0 else None


def exchange_weight(gain: float, num_mine: int, num_theirs: int) -> float:
    """The weight a in ``d += a (theirs - mine)``, the same at both ends (Metropolis).

    Two ends that meet alone take their mean, a = gain / 2. Overlapping exchanges with
    that weight would together overshoot the mean; Metropolis weights make their sum an
    average again.

    `num_mine` and `num_theirs` count the exchanges that each end had under way when
    this one began, including this one.
    """
    return gain / (1 + max(num_mine, num_theirs))


class Patience:
    """The longest wait for a partner at a step boundary.

    `max_wait` is in seconds; None: a quarter of the median duration of the last steps.
    """

    def __init__(self, max_wait: float | None) -> None:
        self._max_wait, self._steps = max_wait, deque[float](maxlen=_NUM_STEPS)

    def seconds(self, of_step: float) -> float:
        """The longest wait, in seconds, after a step that took `of_step` seconds."""
        self._steps.append(of_step)
        if self._max_wait is not None:
            return self._max_wait
        return _SHARE_OF_STEP * median(self._steps)


class UnderWay:
    """The exchanges that one learner has under way, and the peers that it will ask.

    A learner asks one peer after the other, the one that it met longest ago first: two
    exchanges that share a link would both average older weights. But a peer waits for
    an exchange with another no longer than its own last exchange took, so that no slow
    peer holds up the others. A learner that is asked never refuses.

    The caller must hold a lock; `now` is in seconds of any clock.
    """

    def __init__(self) -> None:
        self._with = Counter[int]()
        self._line = set[int]()
        # By peer: when the last exchange began, and how long the last one took.
        self._began, self._took = dict[int, float](), dict[int, float]()

    def enter(self, peer: int, asked: bool = False, now: float = 0.0) -> int:
        """Begins an exchange; returns the number under way, 0 if it may not begin.

        It may not if this learner asks a peer with which it is already exchanging.
        """
        if self._with[peer] and not asked:
            return 0
        self._with[peer] += 1
        self._began[peer] = now
        return self._with.total()

    def leave(self, peer: int, now: float = 0.0) -> None:
        """Ends an exchange with a peer."""
        self._with[peer] -= 1
        self._took[peer] = now - self._began[peer]

    def began_at(self, peer: int) -> float:
        """When the last exchange with a peer began; minus infinity: never."""
        return self._began.get(peer, -math.inf)

    def line_up(self, peer: int) -> None:
        """Adds a peer to those that wait to be asked."""
        self._line.add(peer)

    def step_out(self, peer: int) -> None:
        """Takes a peer from those that wait."""
        self._line.discard(peer)

    @property
    def in_line(self) -> list[int]:
        """The peers that wait to be asked."""
        return sorted(self._line)

    def wait_s(self, peer: int, now: float) -> float:
        """The seconds until a waiting peer may be asked, if nothing ends before.

        Infinity: another is first, an exchange with this one is under way, or none has
        ended yet.
        """
        first = min(self._line, key=lambda one: (self.began_at(one), one))
        if first != peer or self._with[peer]:
            return math.inf
        if not self.total():
            return 0.0
        own = self._took.get(peer, max(self._took.values(), default=math.inf))
        latest = max(self.began_at(one) for one, number in self._with.items() if number)
        left = latest + own - now
        return left if left > _MOMENT else 0.0

    def total(self) -> int:
        """The number under way."""
        return self._with.total()
