"""The training time, samples and steps of one learner, without validation."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.callbacks.algorithms import learners_per_reader
from lightning_adpsgd.callbacks.reporting import gather, gossip_of, within_training
from lightning_adpsgd.strategy.compatibility import callbacks_of
from lightning_adpsgd.strategy.fast_forward import batch_size
from lightning_adpsgd.strategy.job import NAMESPACE

_CLOCKS = f"{NAMESPACE}/clocks"
"""The key of the counts of all learners in a checkpoint."""

Outputs = Tensor | Mapping[str, Any] | None
"""What a training step returns, as Lightning hands it to a callback."""


class Counts(NamedTuple):
    """The samples and seconds of training of one learner."""

    samples: int = 0
    seconds: float = 0.0


def dealt(learners: Sequence[Counts], num_learners: int) -> list[Counts]:
    """The counts from which each of `num_learners` continues.

    As many as before keep their own. Otherwise each gets an equal share of all samples,
    to 1, and the longest time, because learners train side by side.
    """
    if len(learners) == num_learners:
        return list(learners)
    share, rest = divmod(sum(one.samples for one in learners), num_learners)
    seconds = max(one.seconds for one in learners)
    return [Counts(share + (i < rest), seconds) for i in range(num_learners)]


class TrainingClock:
    """The training time, samples and steps of one learner, without validation.

    After a resume, time and samples continue from the checkpoint, as `dealt` says.

    Attributes:
        steps: Optimizer steps of this `fit`.
        samples: Samples of this learner. Where T learners share layers, and so read the
            same samples, each counts 1/T.
        learners: Counts of all learners as of the last `gather`.
    """

    def __init__(self) -> None:
        self.steps = self.samples = self._rest = 0
        self._seconds = 0.0
        self._running_since: float | None = None
        self._first_step = 0
        self._begun = self._gathered = Counts()
        self.learners: Sequence[Counts] = []

    def begin(self, trainer: Trainer, learners: Sequence[Counts] = (Counts(),)) -> None:
        """Continues from the counts of all learners, by default from zero."""
        self.learners = dealt(learners, trainer.world_size)
        self._begun = self._gathered = self.learners[trainer.global_rank]
        self.samples, self._seconds = self._begun
        self._first_step = trainer.global_step
        self.start()

    def count(self, trainer: Trainer, batch: Any) -> None:
        """Counts a batch that the learner has trained on."""
        read = batch_size(batch) + self._rest
        samples, self._rest = divmod(read, learners_per_reader(trainer))
        self.samples += samples
        self.steps = trainer.global_step - self._first_step

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

    @property
    def fit_seconds(self) -> float:
        """Seconds since `begin`, without those from a checkpoint."""
        return self.seconds - self._begun.seconds

    def gather(self, trainer: Trainer) -> None:
        """Gathers the counts of all learners; a collective."""
        self._gathered = Counts(self.samples, self.seconds)
        rows = gather(trainer, self._gathered)
        self.learners = [Counts(round(samples), seconds) for samples, seconds in rows]

    def estimate(self) -> list[Counts]:
        """Estimates the counts of all learners without a collective.

        Since the last `gather`, each is taken to have done as much as this learner.
        """
        samples = self.samples - self._gathered.samples
        seconds = self.seconds - self._gathered.seconds
        return [
            Counts(one.samples + samples, one.seconds + seconds)
            for one in self.learners
        ]


class Monitor(Callback):
    """The base class of monitors, with a clock and hooks for batches and validations.

    Attributes:
        clock: Time, samples and steps of this learner. From the start of training on,
            all monitors of a Trainer share one clock. It is paused from the beginning
            of a validation until the last monitor has measured.
    """

    def __init__(self) -> None:
        self.clock = TrainingClock()
        self._is_first = self._is_last = True
        self._has_begun = False
        self._loaded: list[Counts] = []

    def count(self, trainer: Trainer, outputs: Outputs, batch: Any) -> None:
        """Called after each training batch, which the clock has counted."""

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called at the end of each validation in `fit`, which all learners reach.

        The module still holds the consensus model, and the clock is paused.
        """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # An evaluation may have loaded counts, or a `fit` that failed before it began.
        self._loaded = []
        self._has_begun = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitors = callbacks_of(trainer, Monitor) or [self]
        self._is_first, self._is_last = self is monitors[0], self is monitors[-1]
        if self._is_first:
            loaded = [one._loaded for one in monitors if one._loaded]
            self.clock = TrainingClock()
            self.clock.begin(trainer, *loaded[:1])
        self.clock, self._loaded = monitors[0].clock, []

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

    def on_consensus_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before a validation, while the module holds this learner's weights."""
        self._has_begun = True
        self.clock.stop()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._has_begun:  # a strategy without a consensus model
            self.on_consensus_start(trainer, pl_module)
        self._has_begun = False

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if within_training(trainer):
            if self._is_first:
                self.clock.gather(trainer)
            self.measure(trainer, pl_module)
            if self._is_last:
                self.clock.start()

    # All monitors share the clock, so each writes and reads the same key.
    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Learners that gossip meet at every save, to take the mean of their weights.
        # Under other strategies one may save alone, and a collective would hang.
        runs = trainer.state.status == TrainerStatus.RUNNING
        if self._is_first and runs and gossip_of(trainer) is not None:
            self.clock.gather(trainer)
        known = self._loaded or self.clock.estimate()
        checkpoint[_CLOCKS] = [tuple(one) for one in known]

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # A row may begin with the learner's steps, which files no longer hold.
        self._loaded = [Counts(*row[-2:]) for row in checkpoint.get(_CLOCKS, ())]
