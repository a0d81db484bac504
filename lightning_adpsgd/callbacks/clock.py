"""The training time, samples and steps of one learner, without validation."""

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.callbacks.algorithms import learners_per_reader
from lightning_adpsgd.callbacks.reporting import within_training
from lightning_adpsgd.strategy.compatibility import callbacks_of

Outputs = Tensor | Mapping[str, Any] | None
"""What a training step returns, as Lightning hands it to a callback."""


class TrainingClock:
    """The training time, samples and steps of one learner, without validation.

    Attributes:
        steps: Optimizer steps.
        samples: Samples of this learner. Where T learners share layers, and so read the
            same samples, each counts 1/T.
        is_restored: Whether the next `begin` continues from a checkpoint.
    """

    def __init__(self) -> None:
        self._reset()
        self.is_restored = False

    def _reset(self) -> None:
        self.steps = self.samples = self._rest = 0
        self._seconds = 0.0
        self._running_since: float | None = None
        self._steps_elsewhere = 0

    def begin(self, trainer: Trainer) -> None:
        """Runs from zero, or from the checkpoint that has been loaded."""
        if not self.is_restored:
            self._reset()
        self.is_restored = False
        self._steps_elsewhere = trainer.global_step - self.steps
        self.start()

    def count(self, trainer: Trainer, batch: Any) -> None:
        """Counts a batch that the learner has trained on."""
        read = extract_batch_size(batch) + self._rest
        samples, self._rest = divmod(read, learners_per_reader(trainer))
        self.samples += samples
        self.steps = trainer.global_step - self._steps_elsewhere

    def start(self) -> None:
        """Resumes the clock; does nothing while it runs."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def stop(self) -> None:
        """Pauses the clock; does nothing while it is paused."""
        self._seconds, self._running_since = self.seconds, None

    @property
    def seconds(self) -> float:
        """Seconds for which the clock has run."""
        if self._running_since is None:
            return self._seconds
        return self._seconds + time.perf_counter() - self._running_since

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a checkpoint."""
        return {"steps": self.steps, "samples": self.samples, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next `begin` continue from a checkpoint."""
        self.steps, self.samples = state["steps"], state["samples"]
        self._seconds, self._running_since = state["seconds"], None
        self.is_restored = True


class Monitor(Callback):
    """A base class of monitors, with a clock and hooks for steps and validations.

    Attributes:
        clock: Time, samples and steps of this learner. From the start of training on,
            all monitors of a trainer have one clock. It is paused during a validation,
            and until the last of them has measured.
    """

    def __init__(self) -> None:
        self.clock = TrainingClock()
        self._is_first = self._is_last = True

    def count(self, trainer: Trainer, outputs: Outputs, batch: Any) -> None:
        """Called after each training batch, which the clock has counted."""

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures, at the end of each validation in `fit`, which all learners reach.

        The consensus model is still in place, and the clock is paused.
        """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitors = callbacks_of(trainer, Monitor) or [self]
        self._is_first, self._is_last = self is monitors[0], self is monitors[-1]
        if self._is_first:
            restored = [one.clock for one in monitors if one.clock.is_restored]
            self.clock = restored[0] if restored else self.clock
            self.clock.begin(trainer)
        self.clock = monitors[0].clock

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Outputs,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._is_first:
            self.clock.count(trainer, batch)
        self.count(trainer, outputs, batch)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.stop()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if within_training(trainer):
            self.measure(trainer, pl_module)
            if self._is_last:
                self.clock.start()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.clock.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.clock.load_state_dict(state_dict)
