"""Time, samples and steps of one learner, without what validation takes."""

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.callbacks.reporting import within_training


class TrainingClock:
    """Time, samples and steps of one learner, without what validation takes.

    Attributes:
        steps: Optimizer steps.
        samples: Samples of this learner.
    """

    def __init__(self) -> None:
        self.steps = self.samples = 0
        self._seconds = 0.0
        self._running_since: float | None = None
        self._steps_elsewhere = 0
        self._restored = False

    def begin(self, trainer: Trainer) -> None:
        """Runs from zero, or from where the run that is resumed was."""
        if not self._restored:
            self.__init__()
        self._restored = False
        self._steps_elsewhere = trainer.global_step - self.steps
        self.start()

    def count(self, trainer: Trainer, batch: Any) -> None:
        """Counts a batch that the learner has trained on."""
        self.samples += extract_batch_size(batch)
        self.steps = trainer.global_step - self._steps_elsewhere

    def start(self) -> None:
        """Goes on; nothing happens if it runs."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def stop(self) -> None:
        """Holds; nothing happens if it is stopped."""
        self._seconds, self._running_since = self.seconds, None

    @property
    def seconds(self) -> float:
        """Seconds that it ran."""
        if self._running_since is None:
            return self._seconds
        return self._seconds + time.perf_counter() - self._running_since

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"steps": self.steps, "samples": self.samples, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next `begin` go on from a checkpoint."""
        self.steps, self.samples = state["steps"], state["samples"]
        self._seconds, self._running_since = state["seconds"], None
        self._restored = True


class Monitor(Callback):
    """What the callbacks of this package share: a clock, and a look at each validation.

    Attributes:
        clock: Of this learner; it holds during a validation.
    """

    def __init__(self) -> None:
        self.clock = TrainingClock()

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called at the end of each validation in `fit`, to which all learners come.

        The consensus model is still in place, and the clock holds.
        """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.begin(trainer)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.clock.count(trainer, batch)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.stop()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if within_training(trainer):
            self.measure(trainer, pl_module)
            self.clock.start()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.clock.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.clock.load_state_dict(state_dict)


def stop_clocks(trainer: Trainer) -> None:
    """Holds the clocks of all callbacks, of those too that come later in their order.

    For who measures at the start of a validation what takes time.
    """
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        if isinstance(callback, Monitor):
            callback.clock.stop()
