"""How far all learners of a training together are, and how good."""

import math
from typing import NamedTuple

from torch import Tensor


class Progress(NamedTuple):
    """How far all learners together are; times without validation."""

    epochs: float
    global_samples: float
    train_seconds: float
    samples_per_second: float
    exposed_share: float
    train_loss: float
    first_loss: float
    held_out_loss: float

    @classmethod
    def of(cls, rows: list[list[float]], epochs: float) -> "Progress":
        """Of the rows that `ConvergenceMonitor` gathers, one for each learner."""
        samples, seconds, exposed, sums, counts, firsts, held_out = zip(
            *rows, strict=True
        )
        speeds = [n / time for n, time in zip(samples, seconds, strict=True)]
        shares = [part / time for part, time in zip(exposed, seconds, strict=True)]
        return cls(
            epochs=epochs,
            global_samples=sum(samples),
            train_seconds=max(seconds),
            samples_per_second=sum(speeds),
            exposed_share=sum(shares) / len(shares),
            train_loss=sum(sums) / sum(counts) if sum(counts) else math.nan,
            first_loss=sum(firsts) / len(firsts),
            held_out_loss=sum(held_out) / len(held_out),
        )


NONE_YET = Progress(0, 0, 0, 0, 0, math.inf, math.inf, math.inf)
"""Worse than any."""


class LossSums(NamedTuple):
    """Sum and number of the losses of a stretch, and the very first loss of all."""

    total: float
    number: int
    first: float


class Losses:
    """Sums losses where they are, so that no step waits for the device."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._first: Tensor | None = None
        self._count = 0

    def add(self, loss: Tensor) -> None:
        """Takes one more into the sum."""
        loss = loss.float()
        if self._first is None:
            self._first = loss
        self._sum = loss if self._sum is None else self._sum + loss
        self._count += 1

    def take(self) -> LossSums:
        """The sums since the last time, and the very first loss."""
        first = math.nan if self._first is None else self._first.item()
        sums = 0.0 if self._sum is None else self._sum.item()
        taken = LossSums(sums, self._count, first)
        self._sum, self._count = None, 0
        return taken
