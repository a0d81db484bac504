"""Predicted beside measured speed, of 2, 4 and 8 learners on shaped links.

Two processes calibrate: they measure their link, arithmetic and the time of a step
alone. From these numbers the speed of 2, 4 and 8 learners is predicted for each method,
and then measured in the same run. Steps are timed waits: eight learners that computed
would share the cores of this machine, where real ones have their own. Their
communication still runs on these cores, and the prediction knows how many learners
share one.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks import hosts, learners
from benchmarks.feed import Task, Trace, rate
from benchmarks.hosts import Hosts
from benchmarks.learners import LearnersFailed, Place
from benchmarks.methods import PROGRAMS, SOLO
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread
from benchmarks.workload import BATCH, make_model, weights_of
from lightning_adpsgd.prediction.calibration import (
    Calibration,
    measure_arithmetic,
    measure_wire,
    num_cores,
)
from lightning_adpsgd.prediction.model import Mode, Prediction, Workload, predict
from lightning_adpsgd.virtual.clock import Compute

WAIT_S, SECONDS, LIMIT_S = 0.25, 4.0, 120.0
RATES = {"1 Gbit/s": "1gbit", "200 Mbit/s": "200mbit"}
SIZES = (2, 4, 8)
BOUND = 0.15


class Method(NamedTuple):
    """What a strategy of this name communicates."""

    communication: Mode
    topology: str = "ring"


METHODS = {
    "ddp": Method("allreduce"),
    "sdpsgd": Method("sync"),
    "d1psgd": Method("delay_by_one", "complete"),
    "adpsgd": Method("async"),
}


def measure(quick: bool = False) -> Report:
    """Measures all methods, sizes and links; quickly: two sizes and the faster link."""
    report = Report(
        f"Predicted beside measured steps/s of a learner, whose steps wait for "
        f"{1e3 * WAIT_S:.0f} ms, of a model of 34 MB. Calibrated with two processes.",
        limit="measured",
        notes=_NOTES,
    )
    if hosts.are_missing(report):
        return report
    torch.set_num_threads(1)
    for link in list(RATES)[: 1 if quick else None]:
        calibration = calibrate(link)
        report.notes.append(f"Calibration at {link}: {_described(calibration)}.")
        for size in SIZES[: 2 if quick else None]:
            report.rows += rows_of(link, size, calibration, report)
    report.targets += targets(report.rows)
    return report


_NOTES = [
    "of measured: predicted over measured steps/s.",
    "exchanges/s: that a learner takes part in, one way or the other.",
]


def _described(found: Calibration) -> str:
    return (
        f"{found.bandwidth / 1e6:.1f} MB/s each way, {1e6 * found.latency:.0f} µs; "
        f"a step {1e3 * (found.step_seconds or 0):.1f} ms, of which "
        f"{1e3 * found.step_processor_seconds:.1f} ms of processor. In ns a byte: "
        f"round {1e9 * found.round:.2f}, all-reduce {1e9 * found.gradient:.2f}, copy "
        f"in memory {1e9 * found.copy:.2f}, exchange {1e9 * found.exchange:.2f}, in 8 "
        f"or 4 bits {1e9 * found.lattice:.2f}, merge {1e9 * found.merge:.2f}"
    )


# --- with two processes


def calibrate(link: str) -> Calibration:
    """Measures the numbers of two hosts at this rate."""
    num_bytes = weights_of(make_model()).nbytes
    with hosts.emulated(2, RATES[link]) as emulated:

        def program(place: Place) -> tuple[dict[str, float], dict[str, float]]:
            dist.init_process_group("gloo")
            return measure_wire(num_bytes), measure_arithmetic(num_bytes)

        (wire, arithmetic), _ = learners.run(program, 2, LIMIT_S, emulated)
        alone = run(SOLO, 2, emulated)
    return Calibration(
        **wire,
        **arithmetic,
        cores=num_cores(),
        step_seconds=1 / rate(alone),
        step_processor_seconds=_mean_of(alone, processor_seconds),
    )


def predicted(name: str, size: int, calibration: Calibration) -> Prediction:
    """The prediction for a method, from the calibration alone."""
    method, step = METHODS[name], calibration.step_seconds
    assert step is not None
    workload = Workload(
        weights_of(make_model()).nbytes,
        BATCH,
        backward=WAIT_S * 2 / 3 / step,
    )
    return predict(
        workload,
        size,
        compute=Compute(step),
        link=calibration.link,
        topology=method.topology,
        communication=method.communication,
        costs=calibration.costs(learners_per_machine=size),
    )


# --- with all learners


def run(name: str, size: int, emulated: Hosts) -> list[Trace]:
    """Makes one training of all learners, each on a host of its own."""
    program, task = PROGRAMS[name], Task(seconds=SECONDS, wait_s=WAIT_S)
    return learners.run(lambda place: program(place, task), size, LIMIT_S, emulated)


def rows_of(
    link: str, size: int, calibration: Calibration, report: Report
) -> Iterator[Row]:
    """One row for each method."""
    with hosts.emulated(size, RATES[link]) as emulated:
        for name in METHODS:
            try:
                traces = run(name, size, emulated)
            except LearnersFailed as error:
                report.skipped[f"{name}, {size} learners, {link}"] = str(error)[-300:]
            else:
                yield row(name, link, traces, predicted(name, size, calibration))


def row(name: str, link: str, traces: list[Trace], expected: Prediction) -> Row:
    """Measured steps/s, and predicted over measured."""
    steps = rate(traces)
    ratio = expected.steps_per_second / steps
    size = len(traces)
    found = f"{steps:.3f} steps/s"
    print_row(f"{name}, {size} learners, {link}", found, f"predicted {ratio:.3f} of it")
    details = {"predicted": expected.steps_per_second}
    if name != "ddp":
        details |= {
            "exposed": _mean_of(traces, exposed),
            "predicted exposed": expected.exposed,
            "exchanges/s": steps * _mean_of(traces, exchanges),
            "predicted exchanges/s": expected.steps_per_second
            * expected.exchanges_per_step,
        }
    case = {"link": link, "learners": size, "method": name}
    return Row(case, spread([steps]), "steps/s", ratio, details=details)


def exposed(trace: Trace) -> float:
    """The share of wall time in which the training thread waited."""
    return (trace.last.exposed_s - trace.first.exposed_s) / _wall(trace)


def exchanges(trace: Trace) -> float:
    """The exchanges per step."""
    return (trace.last.exchanges - trace.first.exchanges) / _num_steps(trace)


def processor_seconds(trace: Trace) -> float:
    """The processor seconds of a step."""
    return (trace.last.process_s - trace.first.process_s) / _num_steps(trace)


def _mean_of(traces: list[Trace], figure: Callable[[Trace], float]) -> float:
    return sum(map(figure, traces)) / len(traces)


def _wall(trace: Trace) -> float:
    return trace.stamps[-1] - trace.stamps[0]


def _num_steps(trace: Trace) -> int:
    return len(trace.stamps) - 1


def targets(rows: list[Row]) -> Iterator[Target]:
    """The error of the worst prediction, for each method and link."""
    for link in RATES:
        for name in METHODS:
            ratios = [
                r.ratio
                for r in rows
                if (r.case["link"], r.case["method"]) == (link, name) and r.ratio
            ]
            if ratios:
                worst = max(abs(ratio - 1) for ratio in ratios)
                claim = f"{name}, {link}: prediction off by, at worst"
                yield Target(claim, BOUND, worst, at_least=False)
