"""The papers' learning-rate schedule for large batches, counted in global samples.

The rate starts at that of the reference batch, grows linearly to the rate that is
proportional to the global batch, and then falls by a constant factor per epoch:

    rate(e) = base + (peak - base) * e / warmup          for e <= warmup
    rate(e) = peak * decay ** ceil(e - warmup)           for e >  warmup
    peak    = base * global_batch / base_batch           e = global samples / corpus

With the default figures, those of the papers, rate(0) = 0.1, rate(10) = peak and
rate(16) = peak / 8.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True)
class PaperSchedule:
    """The learning rate as a function of the samples that all learners have seen.

    Args:
        corpus_samples: Number of samples in one epoch.
        global_batch: Number of samples in one step of all learners together.
        base_rate: Rate at the start, and for a global batch of `base_batch`.
        base_batch: Global batch that `base_rate` was tuned for.
        warmup_epochs: Number of epochs of linear growth; 0 starts at the peak.
        decay: Factor per epoch after the warm-up.

    Raises:
        ValueError: A count or rate is not positive, or `decay` is outside (0, 1].
    """

    corpus_samples: int
    global_batch: int
    base_rate: float = 0.1
    base_batch: int = 256
    warmup_epochs: float = 10.0
    decay: float = 2**-0.5

    def __post_init__(self) -> None:
        for name in ("corpus_samples", "global_batch", "base_rate", "base_batch"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"`{name}` must be positive, got {getattr(self, name)}"
                )
        if not self.warmup_epochs >= 0:
            raise ValueError(
                f"`warmup_epochs` must not be negative, got {self.warmup_epochs}"
            )
        if not 0 < self.decay <= 1:
            raise ValueError(f"`decay` must lie in (0, 1], got {self.decay}")

    @property
    def peak_rate(self) -> float:
        """The rate at the end of the warm-up, proportional to the global batch."""
        return self.base_rate * self.global_batch / self.base_batch

    def rate(self, global_samples: int) -> float:
        """The learning rate after this many samples of all learners together."""
        return self.rate_at_epoch(global_samples / self.corpus_samples)

    def rate_at_epoch(self, epoch: float) -> float:
        """The learning rate at a time in (fractional) epochs."""
        if epoch > self.warmup_epochs:
            return self.peak_rate * self.decay ** math.ceil(epoch - self.warmup_epochs)
        if self.warmup_epochs == 0:
            return self.peak_rate
        rise = self.peak_rate - self.base_rate
        return self.base_rate + rise * epoch / self.warmup_epochs


class GlobalSampleLR(LRScheduler):
    """Sets an optimizer's rate from a `PaperSchedule`; call `step` at every step.

    Each step counts as one global batch: the samples of this learner times the number
    of learners. A caller that knows the true number, as with work sharing, sets
    `global_samples` instead. The state is the two counters, so a checkpoint stays
    free of this package's classes.

    Args:
        optimizer: Optimizer, all of whose parameter groups get the same rate.
        schedule: Learning rate as a function of global samples.
    """

    def __init__(self, optimizer: Optimizer, schedule: PaperSchedule) -> None:
        self.schedule = schedule
        # The base class takes one step while it is constructed.
        self.global_samples = -schedule.global_batch
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Counts one global batch and sets the rate."""
        self.global_samples += self.schedule.global_batch
        super().step(epoch)

    def get_lr(self) -> list[float | Any]:
        """The rate of each parameter group."""
        rate = self.schedule.rate(self.global_samples)
        return [rate for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The counters; the schedule itself comes from the arguments."""
        return {"global_samples": self.global_samples, "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Restores the counters and the rate that belongs to them."""
        self.global_samples = state_dict["global_samples"]
        self.last_epoch = state_dict["last_epoch"]
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = self.get_lr()
