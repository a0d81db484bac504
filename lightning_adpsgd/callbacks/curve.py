"""The loss of learner 0 between validations, without a collective or any wait."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_adpsgd.callbacks.clock import Monitor, Outputs
from lightning_adpsgd.callbacks.progress import Losses
from lightning_adpsgd.callbacks.reporting import log, loss_of


class TrainingCurve(Monitor):
    """Logs the loss of learner 0 against global samples and training time.

    Every `log_every_n_steps` of the Trainer (0: never) there is a point, with the mean
    loss since the one before. docs/monitoring.md has the figures.
    """

    def __init__(self) -> None:
        super().__init__()
        self._losses, self._begin, self._steps = Losses(), 0.0, 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._losses, self._begin = Losses(), time.perf_counter()
        self._steps = trainer.global_step

    @override
    def count(self, trainer: Trainer, outputs: Outputs, batch: Any) -> None:
        if (loss := loss_of(trainer, outputs)) is not None:
            self._losses.add(loss)
        # `Trainer` has this attribute, although its type does not declare it.
        every = getattr(trainer, "log_every_n_steps", 50)
        # Several batches may make one step.
        before, self._steps = self._steps, trainer.global_step
        if every and self._steps != before and self._steps % every == 0:
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        total, number, _ = self._losses.take()
        if number and trainer.is_global_zero:
            log(trainer, {"curve/loss": total / number, **self._progress(trainer)})

    def _progress(self, trainer: Trainer) -> dict[str, float]:
        seconds, num_learners = self.clock.seconds, trainer.world_size
        return {
            "curve/global_samples": self.clock.samples * num_learners,
            "curve/train_seconds": seconds,
            "curve/hours": seconds / 3600,
            "curve/wall_seconds": time.perf_counter() - self._begin,
            "curve/samples_per_second": self.clock.samples * num_learners / seconds,
            "curve/steps_per_second": self.clock.steps / self.clock.fit_seconds,
        }
