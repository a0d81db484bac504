"""The progress and the losses of all learners of a training together."""

import math
from typing import NamedTuple

from torch import Tensor


class Progress(NamedTuple):
    """The progress of all learners together; times exclude validation."""

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
        """Combines the rows that `ConvergenceMonitor` gathers, one per learner."""
        samples, seconds, shares, sums, counts, firsts, held_out = zip(
            *rows, strict=True
        )
        speeds = [n / time for n, time in zip(samples, seconds, strict=True)]
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
"""The progress before the first validation; its losses exceed all others."""


class Losses:
    """Sums losses on their device, so that no step waits for the host."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._first: Tensor | None = None
        self._count = 0

    def add(self, loss: Tensor) -> None:
        """Adds a loss."""
        loss = loss.float()
        if self._first is None:
            self._first = loss
        self._sum = loss if self._sum is None else self._sum + loss
        self._count += 1

    def take(self) -> tuple[float, int, float]:
        """The sum and number since the last call, and the first loss of the run."""
        first = math.nan if self._first is None else self._first.item()
        sums = 0.0 if self._sum is None else self._sum.item()
        taken = (sums, self._count, first)
        self._sum, self._count = None, 0
        return taken
