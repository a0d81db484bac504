"""The course of a learner in a run: its batches, pace, clock and snapshots."""

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from typing_extensions import override

from benchmarks.learners import Meetings, Place
from benchmarks.racing.problems import PROBLEMS, STEP_S, Pace
from benchmarks.workload import Batch, anneal

SHARES_OF_TIME = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
UNCOUNTED = 3
FEWEST = 4


@dataclass(frozen=True)
class Heat:
    """One run of all learners.

    Args:
        problem: Name of a `Problem`.
        seconds: Intended length of the run.
        rate: Peak learning rate.
        seed: Seed of the first weights and the data.
        option: The method's own setting, if it has one: a period or a share.
        steps: Steps of each learner, by rank; empty: a calibration, in which learner 0
            counts how many fit into `seconds`.
        times_slower: The length of each learner's steps, by rank.
        own_pace: Whether learners may make different numbers of steps.
        victim: Learner that is killed half-way.
        with_curve: Whether weights are kept during the run.
    """

    problem: str
    seconds: float
    rate: float
    seed: int
    option: float = 0.0
    steps: tuple[int, ...] = ()
    times_slower: tuple[int, ...] = ()
    own_pace: bool = False
    victim: int | None = None
    with_curve: bool = False

    def slowness(self, rank: int) -> int:
        """The length of a learner's step, in nominal steps."""
        return self.times_slower[rank] if self.times_slower else 1


class Finish(NamedTuple):
    """The result of one learner.

    Attributes:
        steps: Number of steps that it made.
        seconds: From the start to the end, with the last mean if the method takes one.
        speed: Steps per second, the first ones of a calibration left out.
        sent_bytes: Bytes that its host sent, in all protocols.
        exchanges: Number of averages that it took part in.
        weights: Its own weights at the end.
        curve: Its weights at these seconds.
    """

    steps: int
    seconds: float
    speed: float
    sent_bytes: int
    exchanges: float
    weights: Tensor
    curve: list[tuple[float, Tensor]]


class Course(IterableDataset[Batch]):
    """A learner's batches, with its optimizer, pace and clock.

    Args:
        place: Place of the learner.
        heat: Run that all of them are in.
    """

    def __init__(self, place: Place, heat: Heat) -> None:
        super().__init__()
        self.place, self.heat = place, heat
        self.meetings = Meetings(place)
        self.pace = Pace(STEP_S * heat.slowness(place.rank))
        self.model = PROBLEMS[heat.problem].make_model(heat.seed, self.pace)
        self.num_steps = heat.steps[place.rank] if heat.steps else 0
        self._most_steps = max(heat.steps, default=0)
        self.exchanges = 0.0
        self.given = 0
        self._stamps: list[float] = []
        self._sent, self._end = 0, 0.0
        self._curve: list[tuple[float, Tensor]] = []

    @override
    def __iter__(self) -> Iterator[Batch]:
        problem, rank = PROBLEMS[self.heat.problem], self.place.rank
        endless = problem.batches_of(self.heat.seed, rank)
        self.meetings.meet("start")
        while self.given < (self.num_steps or UNCOUNTED):
            self.given += 1
            yield next(endless)
            if not self.num_steps and self.given == UNCOUNTED:
                self.num_steps = UNCOUNTED + self._agree()

    def make_optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Makes the optimizer of any method, with a schedule over `steps`."""
        rate = self.heat.rate
        optimizer = PROBLEMS[self.heat.problem].make_optimizer(parameters, rate)
        return anneal(optimizer, rate, self.num_steps) if self.heat.steps else optimizer

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the whole model; it stays when a method starts over."""
        return self.make_optimizer(self.model.parameters())

    def rounds_ended(self, period: int) -> int:
        """The number of rounds that end with the last step, usually none or one.

        A round lasts `period` steps of the fastest learner, and as many steps of each
        other one as it makes in this time. So all make equally many rounds.
        """
        if not self.num_steps:
            return 0  # The first steps of a calibration.
        begin = 0 if self.heat.steps else UNCOUNTED
        rounds = max(1, round(self._most_steps / period))
        return shares_ended(rounds, self.given - begin, self.num_steps - begin)

    def tick(self) -> None:
        """Marks the beginning of a step."""
        now = time.monotonic()
        if not self._stamps:
            self._sent = sent_bytes()
        self._stamps.append(now)
        self._keep_for_curve(now - self._stamps[0])
        self.pace.begin()

    def stop(self) -> None:
        """Marks the end of the last step."""
        self._end = time.monotonic()
        self._sent = sent_bytes() - self._sent

    def finish(self) -> Finish:
        """The result, after `stop`."""
        steps = len(self._stamps)
        counted = self._stamps[0 if self.heat.steps else min(UNCOUNTED, steps - 1) :]
        speed = len(counted) / (self._end - counted[0])
        return Finish(
            steps,
            self._end - self._stamps[0],
            speed,
            self._sent,
            self.exchanges,
            weights_of(self.model),
            self._curve,
        )

    def _keep_for_curve(self, seconds: float) -> None:
        due = SHARES_OF_TIME[len(self._curve) :]
        if self.heat.with_curve and due and seconds >= due[0] * self.heat.seconds:
            self._curve.append((seconds, weights_of(self.model)))

    def _agree(self) -> int:
        """The number of steps of a calibration, by the clock of learner 0."""
        store = self.meetings.store
        if self.place.rank == 0:
            stamps = [*self._stamps, time.monotonic()]
            step_s = min(b - a for a, b in itertools.pairwise(stamps))
            if not self.heat.own_pace:
                # They may not have waited for the slowest yet.
                step_s = max(step_s, STEP_S * max(self.heat.times_slower, default=1))
            store.set("count", str(self.heat.seconds / step_s))
        self.meetings.meet("agreed")
        slower = self.heat.slowness(self.place.rank) / self.heat.slowness(0)
        share = 1 / slower if self.heat.own_pace else 1.0
        self._most_steps = round(float(store.get("count")))
        return max(FEWEST, round(share * self._most_steps))


def shares_ended(shares: int, step: int, num_steps: int) -> int:
    """The number of equal shares of a run that end with a step, counted from one."""
    return step * shares // num_steps - (step - 1) * shares // num_steps


def weights_of(model: nn.Module) -> Tensor:
    """A copy of all weights, or of what this learner has of them, as one vector."""
    weights = (
        w.to_local() if isinstance(w, DTensor) else w for w in model.parameters()
    )
    return nn.utils.parameters_to_vector(weights).detach().clone()


def sent_bytes() -> int:
    """The bytes sent on all interfaces of this process's network but the loopback."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    fields = (line.partition(":") for line in lines)
    return sum(int(rest.split()[8]) for name, _, rest in fields if name.strip() != "lo")
