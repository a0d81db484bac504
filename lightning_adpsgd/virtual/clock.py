"""Simulated time: the order of events, the duration of steps, the sharing of links.

All seconds are simulated. The same seed gives the same times, and a learner's step
times do not depend on the other learners.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_adpsgd.dials import check_number, check_positive

# The order of events at the same time. Messages arrive first, and then steps end. Only
# then do exchanges begin, so that they read the weights after these steps. The longest
# waits for a partner end last.
LANDING, STEPPING, ASKING, SKIPPING = range(4)

BUCKET_BYTES = 25 << 20
"""The size of a bucket: the gradients that torch's DDP reduces together."""


@dataclass(frozen=True)
class Compute:
    """The compute time of a step: forward, backward and optimizer.

    Args:
        seconds: mean seconds of a step.
        spread: standard deviation of the logarithm of the step times, which are
            lognormal with mean `seconds`; 0: all steps take equally long.
        slow: factor on the seconds of each slow learner, by the learner's number.

    Raises:
        TypeError: A time or factor is neither a float nor an integer.
        ValueError: A time or factor is not positive.
    """

    seconds: float = 1.0
    spread: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive("seconds", self.seconds)
        check_positive("spread", self.spread, or_zero=True)
        for learner, factor in self.slow.items():
            check_positive(f"slow[{learner}]", factor)


@dataclass(frozen=True)
class Link:
    """The connection of a learner to the others.

    Args:
        bandwidth: bytes per second in each direction, shared equally by its exchanges.
        latency: seconds from the sending of a message to its arrival.

    Raises:
        TypeError: One of the two is neither a float nor an integer.
        ValueError: The bandwidth is not positive, or the latency negative or infinite.
    """

    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_number("bandwidth", self.bandwidth)
        if not self.bandwidth > 0:
            raise ValueError(f"`bandwidth` must be positive, got {self.bandwidth}")
        check_positive("latency", self.latency, or_zero=True)

    def seconds(self, num_bytes: float) -> float:
        """The seconds that this many bytes take if nothing else is on the link."""
        return self.latency + num_bytes / self.bandwidth

    def allreduce_seconds(self, num_bytes: float, num_learners: int) -> float:
        """The seconds of a ring all-reduce: 2 (n - 1) turns of 1/n of the bytes."""
        turns = 2 * (num_learners - 1)
        return turns * self.seconds(num_bytes / num_learners)

    def allgather_seconds(self, num_bytes: float, num_learners: int) -> float:
        """The seconds of a ring all-gather of this many bytes in total: n - 1 turns."""
        return (num_learners - 1) * self.seconds(num_bytes / num_learners)


def overlapped(allreduce: float, backward: float, num_bytes: float) -> float:
    """The seconds that an all-reduce of gradients adds to a step.

    DDP reduces K buckets of gradients. Bucket k is ready after k/K of the backward
    pass, and its all-reduce waits for those before it.

    Args:
        allreduce: seconds of the all-reduce of all buckets.
        backward: seconds of the backward pass; 0: nothing hides the all-reduce.
        num_bytes: bytes of the gradients.
    """
    buckets = math.ceil(num_bytes / BUCKET_BYTES)
    bound_by_links = backward / buckets + allreduce
    bound_by_compute = backward + allreduce / buckets
    return max(bound_by_links, bound_by_compute) - backward


class StepTimes:
    """Draws the step times of all learners, each from its own random stream."""

    def __init__(self, compute: Compute, seed: int) -> None:
        self._compute, self._seed = compute, seed
        self._streams: dict[int, random.Random] = {}
        # The mean of exp(N(m, s²)) is exp(m + s²/2).
        self._location = math.log(compute.seconds) - compute.spread**2 / 2

    def end(self, learner: int, begin: float) -> float:
        """The end time of a learner's next step, which begins at `begin`."""
        return begin + self._draw(learner) * self._compute.slow.get(learner, 1.0)

    def _draw(self, learner: int) -> float:
        if not self._compute.spread:
            return self._compute.seconds
        if learner not in self._streams:
            self._streams[learner] = random.Random(f"{self._seed} {learner}")
        stream = self._streams[learner]
        return stream.lognormvariate(self._location, self._compute.spread)


class Agenda:
    """Future actions, in the order of simulated time.

    At the same time, lower ranks come first, and then earlier entries. `now` is the
    time of the last action.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, int, Callable[..., None], tuple]] = []
        self._numbers = itertools.count()

    def enter(
        self, seconds: float, rank: int, action: Callable[..., None], *arguments: object
    ) -> None:
        """Schedules an action; its time must not be before `now`."""
        entry = (seconds, rank, next(self._numbers), action, arguments)
        heapq.heappush(self._entries, entry)

    def happen(self) -> None:
        """Performs the next action."""
        self.now, _, _, action, arguments = heapq.heappop(self._entries)
        action(*arguments)


@dataclass(eq=False)
class _Transfer:
    """A transfer between two ends, of equally many bytes in both directions."""

    ends: tuple[int, int]
    left: float  # bytes at the time `since`
    since: float
    done: Callable[[], None]
    rate: float = 0.0
    version: int = 0

    def set_rate(self, now: float, rate: float) -> float:
        """Changes the bytes per second; returns the time at which the transfer ends."""
        self.left = max(0.0, self.left - self.rate * (now - self.since))
        self.since, self.rate = now, rate
        self.version += 1
        return now + self.left / rate


class Network:
    """Moves bytes between ends; all transfers of an end share its link equally.

    A transfer is as fast as the busier of its two ends allows.
    """

    def __init__(self, bandwidth: float, agenda: Agenda) -> None:
        self._bandwidth, self._agenda = bandwidth, agenda
        self._at: dict[int, list[_Transfer]] = {}

    def begin(
        self, ends: tuple[int, int], num_bytes: float, done: Callable[[], None]
    ) -> None:
        """Begins a transfer, and calls `done` at its end."""
        transfer = _Transfer(ends, num_bytes, self._agenda.now, done)
        for end in ends:
            self._at.setdefault(end, []).append(transfer)
        self._share(ends)

    def _share(self, ends: tuple[int, int]) -> None:
        # Each once and in a fixed order, which a set lacks.
        found = dict.fromkeys(c for end in ends for c in self._at[end])
        for transfer in found:
            busier = max(len(self._at[end]) for end in transfer.ends)
            rate = self._bandwidth / busier
            if rate != transfer.rate:
                seconds = transfer.set_rate(self._agenda.now, rate)
                arrive = (self._arrive, transfer, transfer.version)
                self._agenda.enter(seconds, LANDING, *arrive)

    def _arrive(self, transfer: _Transfer, version: int) -> None:
        if version != transfer.version:  # its rate has changed since
            return
        for end in transfer.ends:
            self._at[end].remove(transfer)
        self._share(transfer.ends)  # the other transfers become faster
        transfer.done()
