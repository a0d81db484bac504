"""A learner's task, the batches that it takes, and the clock over its steps."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from typing_extensions import override

from benchmarks import workload
from benchmarks.learners import Meetings, Place
from benchmarks.workload import Batch

WARMUP = 3  # steps before the clock counts
SHORTEST, LONGEST = 3, 400


@dataclass(frozen=True)
class Task:
    """The task of the learners.

    Args:
        seconds: Length of the measurement; learner 0 decides how many steps that is.
        steps: Exact number of steps, instead of `seconds`; the result has the weights.
        counts: Number of counted steps by rank, instead of `seconds`.
        period: Steps after which what a method does repeats.
        wait_s: Length of a step in the timed form; None: steps compute.
        widths: Widths of the model's layers.
        annealed: Whether the rate rises and falls over `steps`, from a higher peak.
        seed: Seed of the first weights and of the batches.
        slower: By how much each learner's timed step is longer, in seconds, by rank.
    """

    seconds: float = 3.0
    steps: int | None = None
    counts: Sequence[int] = ()
    period: int = 1
    wait_s: float | None = None
    widths: Sequence[int] = workload.WIDTHS
    annealed: bool = False
    seed: int = 0
    slower: dict[int, float] = field(default_factory=dict)

    def count_for(self, step_s: float) -> int:
        """Steps that take about `seconds`: whole periods, and enough for a mean."""
        periods = round(self.seconds / step_s / self.period)
        return min(max(self.period * periods, self.period, SHORTEST), LONGEST)

    def make_model(self, rank: int) -> nn.Module:
        """The model of a learner: in the timed form, one that waits for its step."""
        if self.wait_s is None:
            return workload.make_model(widths=self.widths, seed=self.seed)
        workload.keep_memory()
        return workload.make_model(
            self.wait_s + self.slower.get(rank, 0.0), self.widths
        )

    def make_optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Makes the optimizer, the same for every method: no rate is tuned."""
        momentum = workload.MOMENTUM if self.wait_s is None else 0.0
        rate = workload.PEAK if self.annealed else workload.LR
        optimizer = torch.optim.SGD(parameters, lr=rate, momentum=momentum)
        if self.annealed:
            assert self.steps is not None
            workload.anneal(optimizer, rate, self.steps)
        return optimizer


class Reading(NamedTuple):
    """The counters of a learner at one moment.

    Attributes:
        exposed_s: Seconds that the training thread has waited for communication, as
            the engine counts them.
        process_s: Processor seconds of all threads.
        thread_s: Processor seconds of the training thread.
        exchanges: Exchanges that the engine counts; 0 under methods that count none.
    """

    exposed_s: float
    process_s: float
    thread_s: float
    exchanges: int = 0


class Counted(NamedTuple):
    """The engine's counters; zeros under methods that have none."""

    exposed_s: float = 0.0
    exchanges: int = 0


class Trace(NamedTuple):
    """The result of one learner.

    Attributes:
        stamps: When each counted step began, on the clock of the machine.
        first: Counters at the first of them.
        last: Counters at the last of them.
        shipped: The weights that the method would save, if they were asked for.
        local: This learner's weights before any averaging at the end.
    """

    stamps: list[float]
    first: Reading
    last: Reading
    shipped: Tensor | None = None
    local: Tensor | None = None


class Feed(IterableDataset[Batch]):
    """A learner's batches, and the clock over its steps.

    After the warm-up all learners wait for one another, and learner 0, which knows by
    then what a step takes, says how many follow.
    """

    def __init__(self, place: Place, task: Task) -> None:
        super().__init__()
        self._place, self._task = place, task
        self._meetings = Meetings(place)
        self._stamps: list[float] = []
        self._readings: dict[int, Reading] = {}
        # Numbers of the first and the last counted step. After a meeting, the second
        # step is the first to begin with communication under way.
        self._first, self._last = WARMUP + 1, -1
        self.counted: Callable[[], Counted] = Counted

    @override
    def __iter__(self) -> Iterator[Batch]:
        endless = workload.batches(1000 * self._task.seed + self._place.rank + 1)
        if self._task.steps is not None:
            self._first, self._last = 1, self._task.steps - 1
            yield from itertools.islice(endless, self._task.steps)
            return
        yield from itertools.islice(endless, WARMUP)
        count = self._agree()
        self._last = self._first + count
        yield from itertools.islice(endless, count + 2)

    def tick(self) -> None:
        """Marks the beginning of a step."""
        if len(self._stamps) in (self._first, self._last):
            self._readings[len(self._stamps)] = self._read()
        self._stamps.append(time.monotonic())

    def trace(self, shipped: Tensor | None, local: Tensor | None) -> Trace:
        """The observations between the first counted step and the last."""
        counted = self._stamps[self._first : self._last + 1]
        ends = self._readings[self._first], self._readings[self._last]
        wanted = self._task.steps is not None
        return Trace(
            counted, *ends, shipped if wanted else None, local if wanted else None
        )

    def _read(self) -> Reading:
        exposed_s, exchanges = self.counted()
        times = time.process_time(), time.thread_time()
        return Reading(exposed_s, *times, exchanges)

    def meet(self, name: str) -> None:
        """Waits for all learners."""
        self._meetings.meet(name)

    def leave(self) -> None:
        """Ends together with all learners."""
        self._meetings.leave()

    def _shortest_step(self) -> float:
        # The first builds buckets and connections; others may wait for a late learner.
        stamps = [*self._stamps, time.monotonic()]
        return min(later - earlier for earlier, later in itertools.pairwise(stamps[1:]))

    def _agree(self) -> int:
        store, mine = self._meetings.store, self._task.counts
        if self._place.rank == 0:
            store.set("count", str(self._task.count_for(self._shortest_step())))
        self.meet("start")
        return mine[self._place.rank] if mine else int(store.get("count"))


def rate(traces: list[Trace]) -> float:
    """Steps per second of a learner, in the time in which all of them trained."""
    begin = max(trace.stamps[0] for trace in traces)
    end = min(trace.stamps[-1] for trace in traces)
    rates = [_rate_between(trace.stamps, begin, end) for trace in traces]
    return sum(rates) / len(rates)


def _rate_between(stamps: list[float], begin: float, end: float) -> float:
    inside = [stamp for stamp in stamps if begin <= stamp <= end]
    if len(inside) < 2:  # it stepped less than once while all trained
        return (len(stamps) - 1) / (stamps[-1] - stamps[0])
    return (len(inside) - 1) / (inside[-1] - inside[0])
