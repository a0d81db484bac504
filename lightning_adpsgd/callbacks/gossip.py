"""Logs speed, exchanges, staleness, waiting and consensus distance of all learners."""

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_adpsgd.callbacks.algorithms import is_island
from lightning_adpsgd.callbacks.allreduce import AllreduceWait
from lightning_adpsgd.callbacks.clock import Monitor, TrainingClock
from lightning_adpsgd.callbacks.reporting import (
    consensus_distances,
    gather,
    gossip_of,
    log,
)
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.strategy.compatibility import callbacks_of

STALENESS_BINS = 64
"""Number of bins, one per step of staleness; the last one also holds all above."""

_MAX_LISTED_LEARNERS = 64


class GossipMonitor(Monitor):
    """Logs the communication of all learners at each validation in `fit`.

    docs/monitoring.md has the figures under `gossip/` and `learners/`.

    Attributes:
        records: One per learner, from the last `fit`'s last validation; or none yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[LearnerRecord] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.records = []

    @override
    def measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rows = gather(trainer, _record_of(trainer, self.clock).row())
        self.records = [LearnerRecord.from_row(row) for row in rows]
        if trainer.is_global_zero:
            figures = summarize(self.records) | _membership(trainer)
            log(trainer, figures | consensus_distances(trainer))


class LearnerRecord(NamedTuple):
    """The counters of one learner; `Statistics` describes those not described here.

    `samples` and `train_seconds` include the training before a resume
    (`TrainingClock`). All others are of this `fit`.

    Attributes:
        train_seconds: Training time without validation.
        exposed_seconds: Time for which the training thread waited for communication:
            for gossip and, if `AllreduceWait` measures it, for the gradient allreduce.
        allreduce_bytes: Bytes sent for allreduces, if `AllreduceWait` counts them.
        fit_steps: Steps of this `fit`.
        fit_seconds: Training time of this `fit`, without validation.
        staleness: Number of averages by age in steps, in `STALENESS_BINS` bins.
        peer_ages: Age of each super-learner; NaN if this learner does not exchange with
            it. Empty for islands, and if nothing is recorded.
    """

    samples: float
    train_seconds: float
    exposed_seconds: float
    exchanges: float
    merges: float
    bytes_sent: float
    refused: float
    allreduce_bytes: float
    fit_steps: float
    fit_seconds: float
    staleness: tuple[float, ...]
    peer_ages: tuple[float, ...] = ()

    @classmethod
    def from_row(cls, row: list[float]) -> "LearnerRecord":
        """The record of a row as `row` makes it."""
        scalars = len(cls._fields) - 2
        bins = scalars + STALENESS_BINS
        figures = (*row[:scalars], tuple(row[scalars:bins]), tuple(row[bins:]))
        return cls._make(figures)

    def row(self) -> list[float]:
        """All figures as one list of numbers, to be gathered as a vector."""
        return [*self[:-2], *self.staleness, *self.peer_ages]


def _record_of(trainer: Trainer, clock: TrainingClock) -> LearnerRecord:
    statistics = statistics_of(trainer)
    return LearnerRecord(
        samples=clock.samples,
        train_seconds=clock.seconds,
        exposed_seconds=exposed_seconds(trainer),
        exchanges=statistics.exchanges,
        merges=statistics.merges,
        bytes_sent=statistics.bytes_sent,
        refused=statistics.refused,
        allreduce_bytes=sum(
            one.bytes_sent for one in callbacks_of(trainer, AllreduceWait)
        ),
        fit_steps=clock.steps,
        fit_seconds=clock.fit_seconds,
        staleness=_histogram(statistics.staleness),
        peer_ages=_ages(trainer, statistics.peer_ages),
    )


def exposed_seconds(trainer: Trainer) -> float:
    """The seconds for which this learner's training thread waited for communication."""
    waits = sum(one.seconds for one in callbacks_of(trainer, AllreduceWait))
    return waits + statistics_of(trainer).exposed_seconds


def statistics_of(trainer: Trainer) -> Statistics:
    """The counters of this learner's communication; zeros if nothing communicates."""
    return gossip_of(trainer) or Statistics()


def _membership(trainer: Trainer) -> dict[str, float]:
    statistics = statistics_of(trainer)
    names = ("members", "joined", "lost") if statistics.members else ()
    return {f"gossip/{name}": getattr(statistics, name) for name in names}


def summarize(records: list[LearnerRecord]) -> dict[str, float]:
    """The figures that `GossipMonitor` logs, from the records of all learners."""
    of: Any = LearnerRecord._make(zip(*records, strict=True))  # each field of all
    rates = _rates(of.fit_steps, of.fit_seconds)
    figures = {
        "learners/global_samples": sum(of.samples),
        "learners/train_seconds": max(of.train_seconds),
        "learners/samples_per_second": sum(_rates(of.samples, of.train_seconds)),
        "learners/exposed_fraction": fmean(_rates(of.exposed_seconds, of.fit_seconds)),
        "learners/steps_per_second_least": min(rates),
        "learners/steps_per_second_most": max(rates),
    }
    for index, rate in enumerate(rates[:_MAX_LISTED_LEARNERS]):
        figures[f"learners/steps_per_second_{index}"] = rate
    if allreduced := sum(of.allreduce_bytes):
        figures["learners/allreduce_bytes"] = allreduced
    if any(of.exchanges):
        figures |= _summarize_gossip(of)
    return figures


def _summarize_gossip(of: Any) -> dict[str, float]:
    return {
        "gossip/exchanges_per_second": sum(_rates(of.exchanges, of.fit_seconds)),
        "gossip/exchanges_per_step": sum(of.exchanges) / max(sum(of.fit_steps), 1),
        "gossip/merges": sum(of.merges),
        "gossip/bytes_sent": sum(of.bytes_sent),
        "gossip/bytes_per_second": sum(_rates(of.bytes_sent, of.fit_seconds)),
        "gossip/refused": sum(of.refused),
        **_summarize_staleness(of.staleness),
        **_summarize_ages(of.peer_ages),
    }


def _summarize_staleness(staleness: Iterable[tuple[float, ...]]) -> dict[str, float]:
    sums = [sum(bins) for bins in zip(*staleness, strict=True)]
    histogram = {steps: count for steps, count in enumerate(sums) if count}
    if not histogram:
        return {}
    weighted = sum(steps * count for steps, count in histogram.items())
    return {
        "gossip/staleness_mean": weighted / sum(sums),
        "gossip/staleness_max": max(histogram),
        **{f"gossip/staleness_{s}": count for s, count in histogram.items()},
    }


def _summarize_ages(peer_ages: Iterable[tuple[float, ...]]) -> dict[str, float]:
    columns = zip(*peer_ages, strict=True)
    known = [[age for age in ages if not math.isnan(age)] for ages in columns]
    ages = {peer: each for peer, each in enumerate(known) if each}
    if not ages:
        return {}
    return {
        "gossip/peer_age_mean": fmean([age for each in ages.values() for age in each]),
        "gossip/peer_age_max": max(map(max, ages.values())),
        **{
            f"gossip/peer_age_{peer}": max(each)
            for peer, each in ages.items()
            if peer < _MAX_LISTED_LEARNERS
        },
    }


def _ages(trainer: Trainer, ages: Mapping[int, int]) -> tuple[float, ...]:
    if is_island(trainer):  # its peers come and go, and have any number
        return ()
    # An entry for each super-learner, so that the rows of all learners have one length.
    num_super_learners = getattr(trainer.strategy, "num_super_learners", 0)
    return tuple(float(ages.get(s, math.nan)) for s in range(num_super_learners))


def _histogram(staleness: Mapping[int, int]) -> tuple[float, ...]:
    bins = [0.0] * STALENESS_BINS
    for steps, count in staleness.items():
        bins[min(steps, STALENESS_BINS - 1)] += count
    return tuple(bins)


def _rates(counts: Iterable[float], seconds: Iterable[float]) -> list[float]:
    return [count / time for count, time in zip(counts, seconds, strict=True)]
