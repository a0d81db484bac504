"""What each learner did since training started, and what all of them did together."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from lightning_adpsgd.callbacks.allreduce import AllreduceWait
from lightning_adpsgd.callbacks.clock import TrainingClock

STALENESS_BINS = 64
"""Steps of staleness that are told apart; the last bin holds all older ones."""

_MAX_LISTED_LEARNERS = 64


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
        peer_ages: Optimizer steps of this learner since its last completed exchange
            with each super-learner (or since the start), in their order; not a number
            for those with which it exchanges nothing. Empty where nothing is recorded.
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
    peer_ages: tuple[float, ...] = ()

    @classmethod
    def from_row(cls, row: list[float]) -> "LearnerRecord":
        """The opposite of `row`."""
        scalars = len(cls._fields) - 2
        bins = scalars + STALENESS_BINS
        figures = (*row[:scalars], tuple(row[scalars:bins]), tuple(row[bins:]))
        return cls._make(figures)

    def row(self) -> list[float]:
        """All figures in one list, so that they can be gathered as one vector."""
        return [*self[:-2], *self.staleness, *self.peer_ages]


def record_of(trainer: Trainer, clock: TrainingClock) -> LearnerRecord:
    """What this learner did, as of now."""
    statistics = gossip_statistics(trainer)
    return LearnerRecord(
        steps=clock.steps,
        samples=clock.samples,
        train_seconds=clock.seconds,
        exposed_seconds=exposed_seconds(trainer),
        exchanges=statistics.exchanges if statistics else 0,
        merges=statistics.merges if statistics else 0,
        bytes_sent=statistics.bytes_sent if statistics else 0,
        refused=statistics.refused if statistics else 0,
        staleness=_histogram(statistics.staleness if statistics else {}),
        peer_ages=_ages(trainer, statistics.peer_ages if statistics else {}),
    )


def exposed_seconds(trainer: Trainer) -> float:
    """How long this learner's training thread has waited for communication."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    waits = [c.seconds for c in callbacks if isinstance(c, AllreduceWait)]
    statistics = gossip_statistics(trainer)
    return sum(waits) + (statistics.exposed_seconds if statistics else 0.0)


def gossip_statistics(trainer: Trainer) -> Any:
    """`mixing.Statistics` of this learner; none under a strategy without gossip."""
    statistics = getattr(trainer.strategy, "gossip_statistics", None)
    return statistics() if statistics is not None else None


def membership(trainer: Trainer) -> dict[str, float]:
    """Who is there, came and went, where super-learners are islands; else nothing."""
    statistics = gossip_statistics(trainer)
    if not (statistics and statistics.members):
        return {}
    return {
        "gossip/members": statistics.members,
        "gossip/joined": statistics.joined,
        "gossip/lost": statistics.lost,
    }


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
    seconds = [r.train_seconds for r in records]
    exchanges = [r.exchanges for r in records]
    sent = [r.bytes_sent for r in records]
    return {
        "gossip/exchanges_per_second": _sum_of_rates(exchanges, seconds),
        "gossip/exchanges_per_step": sum(exchanges) / sum(r.steps for r in records),
        "gossip/merges": sum(r.merges for r in records),
        "gossip/bytes_sent": sum(sent),
        "gossip/bytes_per_second": _sum_of_rates(sent, seconds),
        "gossip/refused": sum(r.refused for r in records),
        **_summarize_staleness(total_staleness(records)),
        **_summarize_ages(records),
    }


def _summarize_staleness(histogram: Mapping[int, float]) -> dict[str, float]:
    if not histogram:
        return {}
    weighted = sum(steps * count for steps, count in histogram.items())
    return {
        "gossip/staleness_mean": weighted / sum(histogram.values()),
        "gossip/staleness_max": max(histogram),
        **{f"gossip/staleness_{s}": count for s, count in histogram.items()},
    }


def _summarize_ages(records: list[LearnerRecord]) -> dict[str, float]:
    ages = dict(peer_ages(records))
    if not ages:
        return {}
    return {
        "gossip/peer_age_mean": _mean(age for each in ages.values() for age in each),
        "gossip/peer_age_max": max(age for each in ages.values() for age in each),
        **{
            f"gossip/peer_age_{peer}": max(each)
            for peer, each in ages.items()
            if peer < _MAX_LISTED_LEARNERS
        },
    }


def peer_ages(records: list[LearnerRecord]) -> Iterator[tuple[int, list[float]]]:
    """Each super-learner, and for how many steps its peers have not heard of it.

    A super-learner that everybody has lost touch with has a list of high ages.
    """
    for peer, ages in enumerate(zip(*(r.peer_ages for r in records), strict=True)):
        if known := [age for age in ages if not math.isnan(age)]:
            yield peer, known


def total_staleness(records: list[LearnerRecord]) -> dict[int, float]:
    """Steps of staleness and how often, over all learners; empty bins left out."""
    sums = [sum(bins) for bins in zip(*(r.staleness for r in records), strict=True)]
    return {steps: count for steps, count in enumerate(sums) if count}


def _ages(trainer: Trainer, ages: Mapping[int, int]) -> tuple[float, ...]:
    # One place for each super-learner, so that the rows of all learners are as long.
    num_super_learners = getattr(trainer.strategy, "num_super_learners", 0)
    return tuple(float(ages.get(s, math.nan)) for s in range(num_super_learners))


def _histogram(staleness: Mapping[int, int]) -> tuple[float, ...]:
    bins = [0.0] * STALENESS_BINS
    for steps, count in staleness.items():
        bins[min(steps, STALENESS_BINS - 1)] += count
    return tuple(bins)


def _sum_of_rates(counts: Iterable[float], seconds: Iterable[float]) -> float:
    return sum(count / time for count, time in zip(counts, seconds, strict=True))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
