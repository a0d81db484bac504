"""A live line in Lightning's progress bar with the speed and gossip of all learners."""

import math
import time
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch._C._distributed_c10d import PrefixStore, Store
from typing_extensions import override

from lightning_adpsgd.callbacks.clock import Monitor, Outputs
from lightning_adpsgd.callbacks.gossip import statistics_of
from lightning_adpsgd.callbacks.reporting import consensus_of

_KEY = "lightning_adpsgd/progress"
_WINDOW = 8  # updates; with fewer, the speed would jump where steps are long


class ProgressLine(Monitor):
    """Shows the speed and gossip of all learners in the progress bar (tqdm or rich).

    docs/monitoring.md has the figures, which are those since the eighth update before.
    An update costs each learner an addition in the job's store, and no waiting.

    Args:
        every_s: seconds between two updates; 0: update after every batch.

    Raises:
        ValueError: `every_s` is negative, infinite or NaN.
    """

    def __init__(self, every_s: float = 2.0) -> None:
        if not 0 <= every_s < math.inf:
            raise ValueError(f"`every_s` must be 0 or more seconds, got {every_s!r}")
        super().__init__()
        self._every_s, self._due = every_s, 0.0
        self._store: Store | None = None
        self._told = self._total = 0
        self._looks = deque[Look](maxlen=_WINDOW)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._store, self._due = None, 0.0
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            self._store = PrefixStore(_KEY, store)
        self._told, self._total = self.clock.samples, 0
        self._looks.clear()

    @override
    def count(self, trainer: Trainer, outputs: Outputs, batch: Any) -> None:
        now = time.perf_counter()
        if trainer.progress_bar_callback is None or now < self._due:
            return
        self._due = now + self._every_s
        self._looks.append(self._look(trainer))
        if trainer.is_global_zero and len(self._looks) > 1:
            trainer.lightning_module.log_dict(
                self._figures(trainer),
                prog_bar=True,
                logger=False,
                on_step=True,
                on_epoch=False,
                rank_zero_only=True,
            )

    def _look(self, trainer: Trainer) -> "Look":
        clock, done = self.clock, statistics_of(trainer)
        total = self._add_up(clock.samples)
        return Look(clock.seconds, total, clock.steps, done.exchanges, done.members)

    def _figures(self, trainer: Trainer) -> dict[str, float]:
        figures = self._looks[-1].figures_since(self._looks[0])
        if (consensus := consensus_of(trainer)) is not None:
            figures["distance"] = consensus.relative_distance
        return figures

    def _add_up(self, own: int) -> int:
        """Adds the growth of this learner's samples, and returns the sum over all.

        If the store is gone, the sum stays as it is: the failure is reported elsewhere.
        """
        if self._store is None:
            return own
        with suppress(RuntimeError):
            self._total = self._store.add("samples", own - self._told)
            self._told = own
        return self._total


class Look(NamedTuple):
    """The totals at one moment; `samples` counts those of all learners."""

    seconds: float
    samples: int
    steps: int
    exchanges: int
    members: int

    def figures_since(self, first: "Look") -> dict[str, float]:
        """The figures of the line for the time between two updates."""
        rate = (self.samples - first.samples) / (self.seconds - first.seconds)
        figures = {"samples/s": max(self.members, 1) * rate}
        if self.exchanges:
            num_steps = max(self.steps - first.steps, 1)  # batches may share a step
            exchanges = self.exchanges - first.exchanges
            figures["exchanges/step"] = exchanges / num_steps
        if self.members:
            figures["members"] = float(self.members)
        return figures
