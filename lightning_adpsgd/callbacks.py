"""What a training did, told to any Lightning logger: curves, gossip, consensus.

`TrainingCurve` writes the loss against global samples and time while training runs;
it makes no collective and never waits for another learner. `GossipMonitor` gathers,
at each validation (where all learners come anyway), what every learner did: its speed,
its exchanges, their staleness, the time its training thread waited for communication,
and the consensus distance. `AllreduceWait` measures that waiting inside DDP's gradient
allreduce. All of them work under every strategy; what does not exist there is left out.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

STALENESS_BINS = 64
"""Steps of staleness that are told apart; the last bin holds all older ones."""

_MAX_LISTED_LEARNERS = 64


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


class TrainingCurve(Callback):
    """Logs the loss of learner 0 against global samples and training time.

    Logged as `curve/loss`, `curve/global_samples` (its own samples times the number of
    learners), `curve/train_seconds` (validation not counted), `curve/wall_seconds`,
    `curve/samples_per_second` (of all learners) and `curve/steps_per_second`.

    Args:
        every_n_steps: Steps between two points; by default the trainer's
            `log_every_n_steps`. The loss of a point is the mean since the last one.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be at least 1, got {every_n_steps}")
        self.clock = TrainingClock()
        self._every_n_steps = every_n_steps
        self._losses: list[Tensor] = []
        self._begin = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.begin(trainer)
        self._losses, self._begin = [], time.perf_counter()

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
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())
        every = self._every_n_steps or getattr(trainer, "log_every_n_steps", 50)
        if self.clock.steps % every == 0:
            self._write(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.stop()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _within_training(trainer):
            self.clock.start()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.clock.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.clock.load_state_dict(state_dict)

    def _write(self, trainer: Trainer) -> None:
        if not self._losses:
            return
        loss = torch.stack(self._losses).float().mean()
        self._losses = []
        if trainer.is_global_zero:
            log(trainer, {"curve/loss": loss.item(), **self._progress(trainer)})

    def _progress(self, trainer: Trainer) -> dict[str, float]:
        seconds, num_learners = self.clock.seconds, trainer.world_size
        return {
            "curve/global_samples": self.clock.samples * num_learners,
            "curve/train_seconds": seconds,
            "curve/wall_seconds": time.perf_counter() - self._begin,
            "curve/samples_per_second": self.clock.samples * num_learners / seconds,
            "curve/steps_per_second": self.clock.steps / seconds,
        }


class LearnerRecord(NamedTuple):
    """What one learner did since training started.

    Attributes:
        steps: Optimizer steps.
        samples: Samples of this learner.
        train_seconds: Without validation.
        exposed_seconds: The training thread's waiting for communication: in gossip and,
            where `AllreduceWait` measures it, in the gradient allreduce.
        exchanges: Averages completed with other super-learners.
        merges: Times that they were taken in.
        bytes_sent: To other super-learners.
        refused: Received vectors left out because they were not finite.
        staleness: How often a merge was that many optimizer steps old;
            `STALENESS_BINS` counts.
    """

    steps: float
    samples: float
    train_seconds: float
    exposed_seconds: float
    exchanges: float
    merges: float
    bytes_sent: float
    refused: float
    staleness: tuple[float, ...]

    @classmethod
    def from_row(cls, row: list[float]) -> "LearnerRecord":
        """The opposite of `row`."""
        return cls(*row[:-STALENESS_BINS], staleness=tuple(row[-STALENESS_BINS:]))

    def row(self) -> list[float]:
        """All figures in one list, so that they can be gathered as one vector."""
        return [*self[:-1], *self.staleness]


class GossipMonitor(Callback):
    """Logs what all learners did, at each validation in `fit`.

    Logged under `gossip/`: `consensus_distance`, `relative_consensus_distance`,
    `exchanges_per_second`, `merges`, `bytes_sent`, `refused`, `staleness_mean`,
    `staleness_max` and `staleness_{steps}` (the histogram, bins in use);
    under `learners/`: `global_samples`, `train_seconds`, `samples_per_second`,
    `exposed_fraction` (waiting for communication per training time, mean over
    learners), and the steps per second of each learner and their least and most.

    Attributes:
        records: One record per learner, as of the last validation.
    """

    def __init__(self) -> None:
        self.clock = TrainingClock()
        self.records: list[LearnerRecord] = []

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
        if not _within_training(trainer):
            return
        self.records = self._gather(trainer, pl_module.device)
        if trainer.is_global_zero:
            log(trainer, summarize(self.records) | _consensus(trainer))
        self.clock.start()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.clock.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.clock.load_state_dict(state_dict)

    def _gather(self, trainer: Trainer, device: torch.device) -> list[LearnerRecord]:
        row = self._record(trainer).row()
        mine = torch.tensor(row, dtype=torch.float64, device=device)
        gathered = trainer.strategy.all_gather(mine).reshape(-1, len(row))
        return [LearnerRecord.from_row(values) for values in gathered.tolist()]

    def _record(self, trainer: Trainer) -> LearnerRecord:
        statistics = _gossip_statistics(trainer)
        waits = [c.seconds for c in _callbacks(trainer, AllreduceWait)]
        gossip_wait = statistics.exposed_seconds if statistics else 0.0
        return LearnerRecord(
            steps=self.clock.steps,
            samples=self.clock.samples,
            train_seconds=self.clock.seconds,
            exposed_seconds=sum(waits) + gossip_wait,
            exchanges=statistics.exchanges if statistics else 0,
            merges=statistics.merges if statistics else 0,
            bytes_sent=statistics.bytes_sent if statistics else 0,
            refused=statistics.refused if statistics else 0,
            staleness=_histogram(statistics.staleness if statistics else {}),
        )


class AllreduceWait(Callback):
    """Measures the wait for DDP's gradient allreduce after the last gradient is ready.

    What DDP hides behind the backward pass is not counted. On devices whose
    collectives run beside the host, as CUDA's, the host does not wait there, and with
    a communication hook of the user there is nothing to measure: 0 then.

    Attributes:
        seconds: Sum over the steps so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last_gradient: float | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds, self._last_gradient = 0.0, None
        model = trainer.strategy.model
        hooked = getattr(trainer.strategy, "_ddp_comm_hook", None) is not None
        if not isinstance(model, DistributedDataParallel) or hooked:
            return
        if pl_module.device.type == "cpu":
            model.register_comm_hook(model.process_group, self._allreduce)

    def _allreduce(
        self, group: torch.distributed.ProcessGroup, bucket: GradBucket
    ) -> torch.futures.Future[Tensor]:
        self._last_gradient = time.perf_counter()
        return allreduce_hook(group, bucket)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._last_gradient is not None:
            self.seconds += time.perf_counter() - self._last_gradient
            self._last_gradient = None


def summarize(records: list[LearnerRecord]) -> dict[str, float]:
    """The figures that `GossipMonitor` logs, of the records of all learners."""
    rates = [r.steps / r.train_seconds for r in records]
    samples = sum(r.samples for r in records)
    figures = {
        "learners/global_samples": samples,
        "learners/train_seconds": max(r.train_seconds for r in records),
        "learners/samples_per_second": sum(
            r.samples / r.train_seconds for r in records
        ),
        "learners/exposed_fraction": _mean(
            r.exposed_seconds / r.train_seconds for r in records
        ),
        "learners/steps_per_second_least": min(rates),
        "learners/steps_per_second_most": max(rates),
    }
    for index, rate in enumerate(rates[:_MAX_LISTED_LEARNERS]):
        figures[f"learners/steps_per_second_{index}"] = rate
    if any(r.exchanges for r in records):
        figures |= _summarize_gossip(records)
    return figures


def _summarize_gossip(records: list[LearnerRecord]) -> dict[str, float]:
    histogram = total_staleness(records)
    figures = {
        "gossip/exchanges_per_second": sum(
            r.exchanges / r.train_seconds for r in records
        ),
        "gossip/merges": sum(r.merges for r in records),
        "gossip/bytes_sent": sum(r.bytes_sent for r in records),
        "gossip/refused": sum(r.refused for r in records),
    }
    if histogram:
        total = sum(histogram.values())
        weighted = sum(steps * count for steps, count in histogram.items())
        figures["gossip/staleness_mean"] = weighted / total
        figures["gossip/staleness_max"] = max(histogram)
    return figures | {f"gossip/staleness_{s}": c for s, c in histogram.items()}


def total_staleness(records: list[LearnerRecord]) -> dict[int, float]:
    """Steps of staleness and how often, over all learners; empty bins left out."""
    sums = [sum(bins) for bins in zip(*(r.staleness for r in records), strict=True)]
    return {steps: count for steps, count in enumerate(sums) if count}


def log(trainer: Trainer, figures: Mapping[str, float]) -> None:
    """Writes figures to all loggers of the trainer, at the last finished step."""
    step = trainer.global_step - 1  # as Lightning counts them for what `self.log` gets
    for logger in trainer.loggers:
        logger.log_metrics(dict(figures), step=step)


def _within_training(trainer: Trainer) -> bool:
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def _consensus(trainer: Trainer) -> dict[str, float]:
    consensus = getattr(trainer.strategy, "last_consensus", None)
    if consensus is None:
        return {}
    return {
        "gossip/consensus_distance": consensus.distance,
        "gossip/relative_consensus_distance": consensus.relative_distance,
    }


def _gossip_statistics(trainer: Trainer) -> Any:
    statistics = getattr(trainer.strategy, "gossip_statistics", None)
    return statistics() if statistics is not None else None


def _callbacks(trainer: Trainer, kind: type[AllreduceWait]) -> list[AllreduceWait]:
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    return [callback for callback in callbacks if isinstance(callback, kind)]


def _histogram(staleness: Mapping[int, int]) -> tuple[float, ...]:
    bins = [0.0] * STALENESS_BINS
    for steps, count in staleness.items():
        bins[min(steps, STALENESS_BINS - 1)] += count
    return tuple(bins)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
