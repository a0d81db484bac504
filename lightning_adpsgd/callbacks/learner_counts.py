"""The counts of all learners, from which any number of learners can continue."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Counts(NamedTuple):
    """The optimizer steps, samples and seconds of training of one learner."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, row: Iterable[float]) -> "Counts":
        """The counts in a row of floating-point numbers, as it was gathered."""
        steps, samples, seconds = row
        return cls(round(steps), round(samples), seconds)

    def plus(self, more: "Counts") -> "Counts":
        """The sum of both."""
        steps, samples = self.steps + more.steps, self.samples + more.samples
        return Counts(steps, samples, self.seconds + more.seconds)

    def minus(self, less: "Counts") -> "Counts":
        """The difference of both."""
        steps, samples = self.steps - less.steps, self.samples - less.samples
        return Counts(steps, samples, self.seconds - less.seconds)


def dealt(learners: Sequence[Counts], num_learners: int) -> list[Counts]:
    """The counts from which each of `num_learners` continues.

    As many as before keep their own. Otherwise each gets an equal share of all steps
    and samples, and the longest time, because learners train side by side.
    """
    if len(learners) == num_learners:
        return list(learners)
    steps = _shares(sum(one.steps for one in learners), num_learners)
    samples = _shares(sum(one.samples for one in learners), num_learners)
    seconds = max(one.seconds for one in learners)
    return [Counts(*both, seconds) for both in zip(steps, samples, strict=True)]


def _shares(total: int, number: int) -> list[int]:
    """Parts of a total that differ by at most 1."""
    share, rest = divmod(total, number)
    return [share + (index < rest) for index in range(number)]
