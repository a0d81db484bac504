"""The convergence of a training: losses, divergence, and the run's summary row.

A run counts as diverged if its held-out loss is non-finite or at chance level. That is
the loss of an untrained model, ``log(num_classes)`` for a cross-entropy. The diverged
runs of arXiv 2112.01433 are at chance level, too: 10.37 = log 32,000.
"""

import math
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_adpsgd.callbacks.algorithms import algorithm_of, batches_per_step
from lightning_adpsgd.callbacks.clock import Monitor, Outputs
from lightning_adpsgd.callbacks.diagnostic_files import DiagnosticFiles
from lightning_adpsgd.callbacks.gossip import exposed_seconds
from lightning_adpsgd.callbacks.progress import NONE_YET, Losses, Progress
from lightning_adpsgd.callbacks.reporting import (
    epochs_so_far,
    gather,
    log,
    loss_of,
    rates_of,
)
from lightning_adpsgd.callbacks.runs import (
    Run,
    check_name,
    results_of,
    settings_of,
    write_run,
)
from lightning_adpsgd.strategy.fast_forward import batch_size

_MARGIN = 0.05  # a model this far below chance level has learned something


class ConvergenceMonitor(Monitor):
    """Logs losses at each validation in `fit`, and the run's summary row at its end.

    docs/monitoring.md has the figures under `convergence/`, and those of the row.

    Args:
        held_out: Name under which the held-out loss is logged.
        chance: Held-out loss of an untrained model, such as ``log(num_classes)``; by
            default the mean of the learners' first training losses.
        runs: Folder for the file with the run's row, which `runs.read_runs` reads; a
            write error only warns. None: no file.
        name: Name of the run and its file; by default its settings and a random suffix.
        algorithm: Name of the algorithm; by default that of the strategy.
        seed: Random seed of the run; by default that of `seed_everything`.
        wer: Name under which a word error rate is logged; None: there is none.

    Attributes:
        progress: Progress as of the last validation; None before the first.
        diverged: Whether the last validation's loss was non-finite or at chance level.
        run: The summary row; None before the end.

    Raises:
        ValueError: With `runs`, `name` or `algorithm` is not a file name; or the first
            validation logs nothing as `held_out`.
    """

    def __init__(
        self,
        held_out: str = "val_loss",
        *,
        chance: float | None = None,
        runs: str | Path | None = None,
        name: str | None = None,
        algorithm: str | None = None,
        seed: int | None = None,
        wer: str | None = None,
    ) -> None:
        super().__init__()
        if runs is not None:  # at the end it would be too late
            check_name("name", name or "default")
            check_name("algorithm", algorithm or "default")
        self._held_out, self._given_chance = held_out, chance
        self._runs, self._name, self._algorithm = runs, name, algorithm
        self._seed, self._wer = seed, wer
        self._chance, self._best = chance, NONE_YET
        self._peak_lr, self._files = 0.0, DiagnosticFiles()
        self._trains = False
        self._forget()

    def _forget(self) -> None:
        self._losses = Losses()
        self._loader_batch = 0
        self._begin = time.perf_counter()
        self.progress: Progress | None = None
        self.diverged = False
        self.run: Run | None = None

    # --- in each step

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._trains = False
        if stage == "fit":  # the state of a resumed checkpoint is loaded after this
            self._chance, self._best = self._given_chance, NONE_YET
            self._peak_lr = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._forget()
        self._trains = True

    @override
    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._peak_lr = max([self._peak_lr, *rates_of(optimizer)])

    @override
    def count(self, trainer: Trainer, outputs: Outputs, batch: Any) -> None:
        self._loader_batch = max(self._loader_batch, batch_size(batch))
        if (loss := loss_of(trainer, outputs)) is not None:
            self._losses.add(loss)

    # --- at each validation, which all learners reach

    @override
    def measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        figures = self._figures(trainer)
        self.progress = figures
        if self._chance is None:
            self._chance = figures.first_loss
        if figures.held_out_loss < self._best.held_out_loss:
            self._best = figures
        loss = figures.held_out_loss
        # With a chance level of NaN, the comparison is false.
        self.diverged = not math.isfinite(loss) or loss >= self._chance - _MARGIN
        if trainer.is_global_zero:
            log(trainer, self._logged(trainer, figures))

    def _figures(self, trainer: Trainer) -> Progress:
        row = [
            self.clock.samples,
            self.clock.seconds,
            exposed_seconds(trainer) / self.clock.fit_seconds,
            *self._losses.take(),
            self._held_out_loss(trainer),
        ]
        return Progress.of(gather(trainer, row), epochs_so_far(trainer))

    def _held_out_loss(self, trainer: Trainer) -> float:
        metrics = trainer.callback_metrics
        if self._held_out not in metrics:
            names = ", ".join(sorted(metrics)) or "nothing"
            raise ValueError(
                f"`held_out` must name a loss that validation logs, got "
                f"{self._held_out!r}; logged are: {names}"
            )
        return float(metrics[self._held_out])

    def _logged(self, trainer: Trainer, figures: Progress) -> dict[str, float]:
        values = {
            "train_loss": figures.train_loss,
            "held_out_loss": figures.held_out_loss,
            "best_held_out_loss": self._best.held_out_loss,
            "diverged": float(self.diverged),
            "global_samples": figures.global_samples,
            "epochs": figures.epochs,
            "train_seconds": figures.train_seconds,
            "hours": figures.train_seconds / 3600,
            "wall_seconds": time.perf_counter() - self._begin,
            "global_batch": self._global_batch(trainer),
        }
        return {f"convergence/{name}": value for name, value in values.items()}

    # --- at the end, where no learner waits for another

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A training that had ended before, and is resumed, has a row with its results.
        if self._trains:
            self._summarize(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._trains and isinstance(exception, FloatingPointError):
            self.diverged = True
            # Loggers write files, too, and their error would replace this one.
            with self._files.may_fail():
                self._summarize(trainer)

    def _summarize(self, trainer: Trainer) -> None:
        self.run = self._row(trainer)
        if not trainer.is_global_zero:
            return
        if self._runs is not None:
            with self._files.may_fail():
                write_run(self.run, self._runs)
        for logger in trainer.loggers:
            logger.log_hyperparams(settings_of(self.run))
        log(trainer, results_of(self.run))

    def _row(self, trainer: Trainer) -> Run:
        algorithm, batch = algorithm_of(trainer), self._global_batch(trainer)
        if self._algorithm:
            algorithm = algorithm._replace(algorithm=self._algorithm)
        num_learners = algorithm.num_super_learners * algorithm.super_learner_size
        num_learners = num_learners or trainer.world_size
        seed = self._seed
        if seed is None and "PL_GLOBAL_SEED" in os.environ:
            seed = int(os.environ["PL_GLOBAL_SEED"])
        wer = trainer.callback_metrics.get(self._wer) if self._wer else None
        lr, suffix = self._peak_lr or None, uuid.uuid4().hex[:8]
        default = f"{algorithm.algorithm}-B{batch}-lr{lr}-seed{seed}-{suffix}"
        # A user's topology may have any name, and names the algorithm.
        default = default.replace("/", "-")
        return Run(
            name=self._name or default,
            **algorithm._asdict(),
            global_batch=batch,
            local_batch=batch // num_learners,
            lr=lr,
            seed=seed,
            diverged=self.diverged,
            wer=None if wer is None else float(wer),
            **self._results(),
        )

    def _results(self) -> dict[str, Any]:
        last, best = self.progress, self._best
        if last is None:
            return {}
        results = {
            "epochs": last.epochs,
            "global_samples": last.global_samples,
            "train_seconds": last.train_seconds,
            "last_loss": last.held_out_loss,
            "samples_per_second": last.samples_per_second,
            "exposed_share": last.exposed_share,
        }
        if math.isfinite(best.held_out_loss):
            results["best_loss"] = best.held_out_loss
            results["best_loss_samples"] = best.global_samples
        return results

    def _global_batch(self, trainer: Trainer) -> int:
        summed = self._loader_batch * trainer.accumulate_grad_batches
        return summed * batches_per_step(trainer)

    # --- checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "chance": self._chance,
            "best": tuple(self._best),
            "peak_lr": self._peak_lr,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._chance, self._best = state_dict["chance"], Progress(*state_dict["best"])
        self._peak_lr = state_dict.get("peak_lr", 0.0)  # older checkpoints lack it
