"""Whether a training converges: its losses, divergence, and the summary row of the run.

A run counts as diverged when its held-out loss is not finite or at chance level, that
of a model which knows nothing: ``log(num_classes)`` for a cross-entropy. That is how
arXiv 2112.01433 tells it too: its diverged runs stand at 10.37 = log 32,000.
"""

import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.callbacks.algorithms import algorithm_of, batches_per_step
from lightning_adpsgd.callbacks.clock import Monitor
from lightning_adpsgd.callbacks.learners import exposed_seconds
from lightning_adpsgd.callbacks.progress import NONE_YET, Losses, Progress
from lightning_adpsgd.callbacks.reporting import (
    epochs_so_far,
    gather,
    log,
    loss_of,
)
from lightning_adpsgd.callbacks.runs import Run, results_of, settings_of, write_run


class ConvergenceMonitor(Monitor):
    """Logs losses at each validation in `fit`, and the run's summary row at its end.

    Logged under `convergence/`: `train_loss` (mean over all learners since the last
    validation), `held_out_loss`, `best_held_out_loss` and `diverged` (0 or 1), against
    `global_samples` (of all learners), `epochs`, `train_seconds` (without validation),
    `wall_seconds` and `global_batch`. At the end the fields of `runs.Run` under `run/`:
    settings as hyperparameters, results as metrics.

    Weights of all learners that are not finite end a training that gossips with a
    `FloatingPointError`, with or without `stop`; the row is written then too.

    Args:
        held_out: The name under which the held-out loss is logged.
        chance: Held-out loss of a model that knows nothing, ``log(num_classes)`` say;
            by default the mean of the learners' very first training losses.
        margin: How far below `chance` a loss must be not to count as diverged.
        stop: Whether divergence ends the training, in all learners alike.
        patience: Validations in a row at chance level after which `stop` acts; a loss
            that is not finite needs none.
        runs: The folder for the file of the run's row, which `runs.read_runs` reads.
        name: Of the run; by default made from its settings and a random end.
        algorithm: By default the name of the strategy.
        seed: By default that of `seed_everything`.
        wer: The name under which a word error rate is logged, if one is.

    Attributes:
        progress: As of the last validation; none before.
        diverged: Whether the last validation was at chance level or not finite.
        run: The summary row; none before the end.

    Raises:
        ValueError: `patience` or `margin` is out of bounds; and in the first
            validation, if nothing was logged as `held_out`.
    """

    def __init__(
        self,
        held_out: str = "val_loss",
        *,
        chance: float | None = None,
        margin: float = 0.05,
        stop: bool = False,
        patience: int = 2,
        runs: str | Path | None = None,
        name: str | None = None,
        algorithm: str | None = None,
        seed: int | None = None,
        wer: str | None = None,
    ) -> None:
        super().__init__()
        if patience < 1:
            raise ValueError(f"`patience` must be at least 1, got {patience}")
        if margin < 0:
            raise ValueError(f"`margin` must not be negative, got {margin}")
        self._held_out, self._given_chance, self._margin = held_out, chance, margin
        self._stop, self._patience = stop, patience
        self._runs, self._name, self._algorithm = runs, name, algorithm
        self._seed, self._wer = seed, wer
        self._chance, self._best, self._restored = chance, NONE_YET, False
        self._forget()

    def _forget(self) -> None:
        self._losses, self._marks = Losses(), 0
        self._loader_batch, self._peak_lr = 0, math.nan
        self._begin = time.perf_counter()
        self.progress: Progress | None = None
        self.diverged = False
        self.run: Run | None = None

    # --- what is counted in each step

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._forget()
        if not self._restored:
            self._chance, self._best = self._given_chance, NONE_YET
        self._restored = False

    @override
    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._peak_lr = max([*rates, self._peak_lr], key=_number_or_least)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._loader_batch = max(self._loader_batch, extract_batch_size(batch))
        if (loss := loss_of(trainer, outputs)) is not None:
            self._losses.add(loss)

    # --- where all learners come

    @override
    def measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        figures = self._figures(trainer)
        self.progress = figures
        if self._chance is None:
            self._chance = figures.first_loss
        if figures.held_out_loss < self._best.held_out_loss:
            self._best = figures
        self.diverged = self._is_at_chance(figures.held_out_loss)
        self._marks = self._marks + 1 if self.diverged else 0
        if trainer.is_global_zero:
            log(trainer, self._logged(trainer, figures))
        if self._stop and self._is_hopeless(figures.held_out_loss):
            self._end(trainer, figures.held_out_loss)

    def _figures(self, trainer: Trainer) -> Progress:
        losses = self._losses.take()
        row = [
            self.clock.samples,
            self.clock.seconds,
            exposed_seconds(trainer),
            losses.total,
            losses.number,
            losses.first,
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

    def _is_at_chance(self, loss: float) -> bool:
        assert self._chance is not None
        # Written so that a chance level that is no number marks nothing.
        return not math.isfinite(loss) or loss >= self._chance - self._margin

    def _is_hopeless(self, loss: float) -> bool:
        return not math.isfinite(loss) or self._marks >= self._patience

    def _end(self, trainer: Trainer, loss: float) -> None:
        # Decided by figures that were gathered, so that all learners decide alike.
        trainer.should_stop = True
        rank_zero_warn(
            f"The training has diverged and stops: held-out loss {loss:.4g}, chance "
            f"level {self._chance:.4g}; lower the learning rate or lengthen its warm-up"
        )

    def _logged(self, trainer: Trainer, figures: Progress) -> dict[str, float]:
        values = {
            "train_loss": figures.train_loss,
            "held_out_loss": figures.held_out_loss,
            "best_held_out_loss": self._best.held_out_loss,
            "diverged": float(self.diverged),
            "global_samples": figures.global_samples,
            "epochs": figures.epochs,
            "train_seconds": figures.train_seconds,
            "wall_seconds": time.perf_counter() - self._begin,
            "global_batch": self._global_batch(trainer),
        }
        return {f"convergence/{name}": value for name, value in values.items()}

    # --- the end, to which nobody waits for anybody

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._summarize(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, FloatingPointError):
            self.diverged = True
            self._summarize(trainer)

    def _summarize(self, trainer: Trainer) -> None:
        self.run = self._row(trainer)
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_hyperparams(settings_of(self.run))
        log(trainer, results_of(self.run))
        if self._runs is not None:
            write_run(self.run, self._runs)

    def _row(self, trainer: Trainer) -> Run:
        algorithm, batch = algorithm_of(trainer), self._global_batch(trainer)
        name = self._algorithm or algorithm.name
        seed = self._seed
        if seed is None and "PL_GLOBAL_SEED" in os.environ:
            seed = int(os.environ["PL_GLOBAL_SEED"])
        lr = None if math.isnan(self._peak_lr) else self._peak_lr
        return Run(
            name=self._name or f"{name}-B{batch}-lr{lr}-seed{seed}-{_random_end()}",
            algorithm=name,
            topology=algorithm.topology,
            communication=algorithm.communication,
            num_super_learners=algorithm.num_super_learners,
            super_learner_size=algorithm.super_learner_size,
            global_batch=batch,
            local_batch=batch // algorithm.num_learners,
            lr=lr,
            seed=seed,
            diverged=self.diverged,
            wer=self._word_error_rate(trainer),
            **self._results(),
        )

    def _results(self) -> dict[str, float]:
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

    def _word_error_rate(self, trainer: Trainer) -> float | None:
        value = trainer.callback_metrics.get(self._wer) if self._wer else None
        return None if value is None else float(value)

    def _global_batch(self, trainer: Trainer) -> int:
        summed = self._loader_batch * trainer.accumulate_grad_batches
        return summed * batches_per_step(trainer)

    # --- checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "clock": super().state_dict(),
            "chance": self._chance,
            "best": tuple(self._best),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["clock"])
        self._chance, self._best = state_dict["chance"], Progress(*state_dict["best"])
        self._restored = True


def _number_or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _random_end() -> str:
    return uuid.uuid4().hex[:8]
