"""One run: an algorithm on a virtual cluster, from start to held-out loss."""

import math
import time
from typing import Any

import torch
from torch import nn

from lightning_adpsgd import Async, VirtualCluster
from lightning_adpsgd.asr.schedule import PaperSchedule
from lightning_adpsgd.registration import NAMES
from lightning_adpsgd.virtual.clock import Compute, Link
from lightning_adpsgd.virtual.objective import evaluating
from lightning_adpsgd.virtual.report import Point, Report
from recipes.batch_size.outcomes import Outcome
from recipes.batch_size.settings import (
    BASELINE,
    EXTRA,
    HIERARCHICAL,
    Run,
    Settings,
    without_clip,
)
from recipes.batch_size.workloads import Workload, batches_of

_CHANCE_MARGIN = 0.05
_HOPELESS = 20.0
_INNER_LINK = 10.0


class _Hopeless(Exception):
    """The held-out loss is so far above chance that the rest need not be computed."""


def train(run: Run, workload: Workload, settings: Settings) -> Outcome:
    """Trains once; the same arguments give the same losses, bit for bit.

    Args:
        run: run to train.
        workload: data and model. Where an epoch is no multiple of the batch, the last
            batch of the run goes beyond its last epoch.
        settings: settings that all runs have in common.
    """
    points, choices = list[Point](), list[float]()
    begin = time.perf_counter()
    report = _fit(run, workload, settings, points, choices)
    losses = [point.held_out_loss for point in points]
    diverged = _why_diverged(report, losses[-1], workload.num_classes)
    return Outcome(
        run.cell.algorithm,
        run.cell.batch,
        run.setting.step,
        run.seed,
        run.setting.rate,
        math.inf if diverged else losses[-1],
        math.inf if diverged else choices[-1],
        run.setting.clip,
        diverged,
        _mean_staleness(report),
        max(point.relative_distance for point in points),
        points[-1].seconds,
        time.perf_counter() - begin,
        tuple(point.samples for point in points),
        tuple(losses),
    )


def make_cluster(run: Run, workload: Workload, settings: Settings) -> VirtualCluster:
    """The learners of a run, all at the same start.

    SSGD is one learner with the whole batch: what an allreduce of equal learners is, to
    rounding (`tests/virtual/test_ties.py`), at the cost of fewer and larger gradients.
    """
    model = _model_of(run.seed, workload)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    bandwidth = num_bytes / settings.exchange
    return VirtualCluster(
        model,
        **options_of(run.cell.algorithm, settings),
        loss=workload.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        compute=Compute(spread=settings.spread),
        link=Link(bandwidth),
        inner_link=Link(_INNER_LINK * bandwidth),
        gradient_clip=run.setting.norm,
        seed=run.seed,
    )


def start_loss(seed: int, workload: Workload) -> float:
    """Held-out loss at the start of all runs of a seed."""
    model = _model_of(seed, workload)
    with evaluating(model):
        return float(workload.loss(model, workload.to_report))


def _model_of(seed: int, workload: Workload) -> nn.Module:
    torch.manual_seed(seed)
    return workload.make()


def options_of(algorithm: str, settings: Settings) -> dict[str, Any]:
    """Sizes and options of an algorithm."""
    algorithm = without_clip(algorithm)
    if algorithm == BASELINE:
        return {"num_super_learners": 1}
    options = {**NAMES, **EXTRA}[algorithm]
    size = settings.super_learner_size if algorithm == HIERARCHICAL else 1
    mode, gain = options["communication"], 1.0
    if mode == "async":
        # The claim is the papers', and so is the algorithm.
        mode, gain = Async(look_ahead=False), settings.mixing_gain
    return {
        "num_super_learners": settings.num_learners // size,
        "super_learner_size": size,
        "topology": options["topology"],
        "communication": mode,
        "mixing_gain": gain,
    }


def schedule_of(run: Run, corpus: int, settings: Settings) -> PaperSchedule:
    """The papers' schedule: a linear rise to the run's peak rate, then steps down."""
    rise = settings.rise
    return PaperSchedule(
        corpus,
        global_batch=rise,
        base_batch=1,
        base_rate=run.setting.rate / rise,
        warmup_epochs=settings.warmup_epochs,
        decay=settings.decay,
    )


def _fit(
    run: Run,
    workload: Workload,
    settings: Settings,
    points: list[Point],
    choices: list[float],
) -> Report | None:
    cluster, corpus = make_cluster(run, workload, settings), len(workload.train[0])
    samples = corpus * settings.epochs
    hopeless = _HOPELESS * math.log(workload.num_classes)

    def keep(point: Point) -> None:
        points.append(point)
        if point.held_out_loss > hopeless:
            raise _Hopeless

    def evaluate(model: nn.Module) -> float:
        choices.append(float(workload.loss(model, workload.to_choose_by)))
        return float(workload.loss(model, workload.to_report))

    try:
        return cluster.fit(
            batches_of(workload.train, run.cell.batch, cluster.num_learners, run.seed),
            samples,
            lr_schedule=schedule_of(run, corpus, settings).rate,
            evaluate=evaluate,
            every_samples=samples // settings.points,
            on_point=keep,
        )
    except _Hopeless:
        return None


def _why_diverged(report: Report | None, loss: float, num_classes: int) -> str:
    """Empty for a run that has learnt something."""
    if report is not None and report.diverged:
        return report.diverged
    chance = math.log(num_classes) - _CHANCE_MARGIN
    if report is None or not loss < chance:
        return f"held-out loss {loss:.4g}, where chance is {math.log(num_classes):.4g}"
    return ""


def _mean_staleness(report: Report | None) -> float:
    counts = {} if report is None else report.totals.staleness
    merges = sum(counts.values())
    return sum(k * n for k, n in counts.items()) / merges if merges else math.nan
