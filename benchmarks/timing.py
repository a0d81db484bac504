"""Repeated timings and the lines of a table; shared by the scripts of this folder."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    def per(self, amount: float) -> "Spread":
        """`amount` divided by each of the three: a rate out of durations."""
        return Spread(amount / self.median, amount / self.high, amount / self.low)

    def __format__(self, spec: str) -> str:
        """The median with the quartiles in brackets."""
        low, high = format(self.low, spec), format(self.high, spec)
        return f"{format(self.median, spec)} [{low}, {high}]"


def spread(values: Iterable[float]) -> Spread:
    """Median and quartiles; of a single value, that value three times."""
    values = list(values)
    if len(values) == 1:
        return Spread(*values * 3)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def mean_with_interval(
    values: Sequence[float], num_draws: int = 2000, seed: int = 0
) -> Spread:
    """The mean, and 95 % of the means of as many values drawn with replacement.

    For a few seeds this is narrower than the truth: of three values no draw has a mean
    beyond the least or the largest of them.
    """
    dice = random.Random(seed)
    means = [
        statistics.fmean(dice.choices(values, k=len(values))) for _ in range(num_draws)
    ]
    cuts = statistics.quantiles(means, n=40, method="inclusive")
    return Spread(statistics.fmean(values), cuts[0], cuts[-1])


def take_turns(
    works: Mapping[str, Callable[[], object]], repetitions: int, warmups: int = 2
) -> dict[str, Spread]:
    """Measures the seconds of each work, all of them in turn.

    They take turns, so that other work of the machine affects all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for repetition in range(warmups + repetitions):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            if repetition >= warmups:
                seconds[name].append(time.perf_counter() - begin)
    return {name: spread(values) for name, values in seconds.items()}


def processor_seconds(work: Callable[[], object]) -> float:
    """Measures a work's processor seconds, whatever else the machine does."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def print_row(*cells: str) -> None:
    """One line of a table: a wide first column, then columns of equal width."""
    first, *rest = cells
    print(f"{first:<34}" + "".join(f"{cell:>26}" for cell in rest), flush=True)
