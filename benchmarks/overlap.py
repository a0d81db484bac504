"""How much of its communication each method hides, on links of 1 Gbit/s and 200 Mbit/s.

Learners on emulated hosts train the same model on the same samples by each method, in
turn. The control is `solo`: as many processes that compute the same and communicate
nothing. Where a method's steps per second fall short of solo's, its communication is
exposed, as waiting or as processor time that was taken from the computation. The time
for which the training thread waited, as the engine counts it, stands beside the ratio.

In the timed form a step waits as long as a real one took and computes nothing. So
the figures do not depend on the cores of this machine, which the hosts share.

The loss is that of held-out samples after equally many samples for all, trained to the
end: the rate rises, stays and falls. Its model is narrower, so that three seeds are
affordable, and links are slowed in proportion. Those methods whose learners wait for
one another do the same arithmetic on any link, and run on an unshaped one.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import hosts, learners, workload
from benchmarks.feed import Task, Trace, rate
from benchmarks.hosts import Hosts
from benchmarks.learners import LearnersFailed
from benchmarks.methods import (
    NEED_PEERS,
    PERIODS,
    PROGRAMS,
    SOLO,
    SOLO_LOOP,
    WITHIN_HOST,
)
from benchmarks.plain_loops import peers_missing
from benchmarks.results import Report, Row, Target
from benchmarks.timing import mean_with_interval, print_row, spread
from benchmarks.workload import WIDTHS

BITS_PER_S = {"1 Gbit/s": 1e9, "200 Mbit/s": 2e8}
RATES = {"1 Gbit/s": "1gbit", "200 Mbit/s": "200mbit"}
UNSHAPED = "unshaped"
FLAT = (SOLO, "ddp", "sdpsgd", "d1psgd", "adpsgd")
DECENT = ("Decent-DP ring", "Decent-DP one-peer-exp")
PEERS = (SOLO_LOOP, *DECENT, "torch post-local", "torchft LocalSGD", "torchft DiLoCo")
TWO_EACH = (SOLO, "ddp", WITHIN_HOST, "hadpsgd")
IN_PLAIN_LOOP = (*PEERS, "torch hierarchical")
ASYNCHRONOUS = ("adpsgd", "hadpsgd")
STEPS_TO_LOSS, SEEDS = 1200, (0, 1, 2)
WIDTHS_TO_LOSS = (256, 500, 500, 500, 10)
WORSE_LOSS = 1.02
LIMIT_S = 100.0  # of one run for its speed; the slowest takes a third of it
LOSS_LIMIT_S = 400.0
BUDGET_S = 14 * 60.0  # after which what is computed has one turn of each method
LONG_S = 8.0  # of a window of the timed form, and of methods that a bound is about

COMPUTED, TIMED, LOSS = (
    "computed on the cores that the hosts share",
    "computation replaced by a timed wait",
    f"held-out loss after {STEPS_TO_LOSS} steps of each learner",
)


class Layout(NamedTuple):
    """Hosts and the learners of each."""

    num_hosts: int
    per_host: int

    def __str__(self) -> str:
        """The text in a cell of a table."""
        return f"{self.num_hosts} x {self.per_host}"

    @property
    def num_learners(self) -> int:
        """The number of learners of all hosts."""
        return self.num_hosts * self.per_host


@dataclass(frozen=True)
class Comparison:
    """Methods that take turns on the same hosts.

    Args:
        layout: Hosts and learners.
        methods: Names of `PROGRAMS`.
        repetitions: Turns.
        timed: Whether computation is replaced by a wait.
    """

    layout: Layout
    methods: Sequence[str]
    repetitions: int
    timed: bool = False


BRIEF = (SOLO, "ddp", "adpsgd", SOLO_LOOP, DECENT[0])
BOUNDED = {*BRIEF, *DECENT, *TWO_EACH}
FULL = (
    Comparison(Layout(4, 1), (*FLAT, *IN_PLAIN_LOOP), 3),
    Comparison(Layout(2, 1), (*FLAT, *PEERS), 2),
    Comparison(Layout(2, 2), (*TWO_EACH, SOLO_LOOP, "torch hierarchical"), 2),
    Comparison(Layout(4, 1), BRIEF, 3, timed=True),
    Comparison(Layout(4, 2), TWO_EACH, 1, timed=True),
)
QUICK = (
    Comparison(Layout(4, 1), BRIEF, 1),
    Comparison(Layout(4, 1), BRIEF, 1, timed=True),
)


class Speed(NamedTuple):
    """The result of one run of a method.

    Attributes:
        steps: Steps per second of a learner.
        exposed: Share of the wall time in which the training thread waited, as the
            engine counts it; the mean of the learners.
        processor_ms: Processor time of a step, all threads of a learner.
        exchanges: Exchanges of a learner per minute; the mean of the learners.
    """

    steps: float
    exposed: float
    processor_ms: float
    exchanges: float


def measure(quick: bool = False) -> Report:
    """All methods on all links; the losses only if there is time."""
    report = Report(
        "What communication costs on shaped links: steps/s of a learner, against as "
        "many processes that communicate nothing (`solo`, in the same loop).",
        limit="solo",
        notes=_NOTES,
    )
    if hosts.are_missing(report):
        return report
    if reason := peers_missing():
        report.skipped["Decent-DP, torchft"] = reason
    torch.set_num_threads(1)
    step_s, deadline = 0.0, time.monotonic() + BUDGET_S
    for comparison in QUICK if quick else FULL:
        wait_s = step_s if comparison.timed else None
        rows = list(compare(comparison, report, wait_s, deadline))
        report.rows += rows
        if not step_s and (measured := _steps(rows, "1 Gbit/s", SOLO)):
            step_s = 1 / measured
    if not quick:
        report.rows += losses(report)
    report.targets += targets(report.rows)
    return report


_NOTES = [
    "`solo` to `hadpsgd` train through Lightning's Trainer, the others in a plain "
    "loop, and each is compared with solo in its own loop.",
    "hosts: number x learners of each. `hadpsgd` has one super-learner on each host; "
    "its control without gossip is `ddp within each host`.",
    "exposed: share of wall time in which the training thread waited, as the engine "
    "counts it; other methods count nothing.",
    "Methods that average every so many steps (post-local, hierarchical, LocalSGD, "
    "DiLoCo) do it every 8, hierarchical within pairs every 4.",
    "Losses are means over the seeds, with 95 % of a bootstrap over them. Their model "
    f"has {workload.num_weights(WIDTHS_TO_LOSS):,} weights; links are named for the "
    "whole model and slowed in proportion.",
]


# --- speed


def compare(
    comparison: Comparison, report: Report, wait_s: float | None, deadline: float
) -> Iterator[Row]:
    """The rows of one comparison, at all rates."""
    layout = comparison.layout
    with hosts.emulated(layout.num_hosts) as emulated:
        for link, rate_of_link in RATES.items():
            emulated.shape(rate_of_link)
            where = f"{layout}, {link}, {'timed' if wait_s else 'computed'}"
            print(where, flush=True)
            speeds: dict[str, list[Speed]] = {}
            for name in turns(comparison, deadline):
                task = task_of(name, wait_s)
                traces = run(name, layout, emulated, task, report, where)
                speeds.setdefault(name, []).extend(map(speed, traces))
            yield from rows_of(layout, link, speeds, TIMED if wait_s else COMPUTED)


def turns(comparison: Comparison, deadline: float) -> Iterator[str]:
    """The methods one after another, for all repetitions or while there is time."""
    for turn in range(comparison.repetitions):
        if turn and not comparison.timed and time.monotonic() > deadline:
            return
        yield from available(comparison.methods)


def task_of(name: str, wait_s: float | None) -> Task:
    """The task that measures a method's speed over whole periods."""
    long = wait_s is not None or name in BOUNDED
    seconds = LONG_S if long else Task.seconds
    return Task(seconds, period=PERIODS.get(name, 1), wait_s=wait_s)


def available(methods: Sequence[str]) -> list[str]:
    """The methods that are installed."""
    missing = NEED_PEERS if peers_missing() else set()
    return [name for name in methods if name not in missing]


def run(
    name: str,
    layout: Layout,
    emulated: Hosts,
    task: Task,
    report: Report,
    where: str,
    limit_s: float = LIMIT_S,
) -> list[list[Trace]]:
    """Makes one training of all learners; returns None if it failed, and reports it."""
    program, size = PROGRAMS[name], layout.num_learners
    try:
        return [
            learners.run(lambda place: program(place, task), size, limit_s, emulated)
        ]
    except LearnersFailed as error:
        report.skipped[f"{name}, {where}"] = str(error)[-300:]
        return []


def speed(traces: list[Trace]) -> Speed:
    """The speed, from the traces of all learners."""
    exposed, processor, exchanges = [], [], []
    for trace in traces:
        wall, num = trace.stamps[-1] - trace.stamps[0], len(trace.stamps) - 1
        exposed.append((trace.last.exposed_s - trace.first.exposed_s) / wall)
        processor.append(1e3 * (trace.last.process_s - trace.first.process_s) / num)
        exchanges.append(60 * (trace.last.exchanges - trace.first.exchanges) / wall)
    return Speed(rate(traces), *map(fmean, (exposed, processor, exchanges)))


def rows_of(
    layout: Layout, link: str, speeds: dict[str, list[Speed]], table: str
) -> Iterator[Row]:
    """One row for each method, with its ratio to solo in the same loop."""
    found = {
        name: spread(s.steps for s in runs) for name, runs in speeds.items() if runs
    }
    for name, steps in found.items():
        control = SOLO_LOOP if name in IN_PLAIN_LOOP else SOLO
        ratio = steps.median / found[control].median if control in found else None
        details = {
            "turns": len(speeds[name]),
            "processor ms": _median(s.processor_ms for s in speeds[name]),
        }
        if ours(name):
            details["exposed"] = _median(s.exposed for s in speeds[name])
            details["exchanges/min"] = _median(s.exchanges for s in speeds[name])
        case = {"hosts": str(layout), "link": link, "method": name}
        print_row(name, f"{steps:.2f} steps/s", f"{ratio or 0:.3f} of solo")
        yield Row(case, steps, "steps/s", ratio, table=table, details=details)


def ours(name: str) -> bool:
    """Whether a method is a setting of this package's strategy."""
    return "psgd" in name


def _median(values: Iterator[float]) -> float:
    return spread(values).median


# --- loss after equal samples


def losses(report: Report) -> Iterator[Row]:
    """Measures held-out losses, those of the asynchronous methods at both rates."""
    flat, two_each = Layout(4, 1), Layout(2, 2)
    waiting = [name for name in available((*FLAT, *PEERS)) if name not in ASYNCHRONOUS]
    plan = [(name, flat, UNSHAPED) for name in waiting if name != SOLO_LOOP]
    plan += [("adpsgd", flat, link) for link in RATES]
    plan += [("hadpsgd", two_each, link) for link in RATES]
    found = {case: list(seeds_of(*case, report)) for case in plan}
    control = fmean(final.loss for final in found["ddp", flat, UNSHAPED])
    for (name, layout, link), finals in found.items():
        if finals:
            yield loss_row(label(name, layout, link), finals, control)


class Final(NamedTuple):
    """The result of a training to the end.

    Attributes:
        loss: Loss of the weights that learner 0 would save.
        of_mean: Loss of the mean of all learners.
        distance: Relative consensus distance.
        exchanges: Exchanges of a learner per step.
    """

    loss: float
    of_mean: float
    distance: float
    exchanges: float


def seeds_of(name: str, layout: Layout, link: str, report: Report) -> Iterator[Final]:
    """The results of one training for each seed."""
    with hosts.emulated(layout.num_hosts, rate_to_loss(link)) as emulated:
        for seed in SEEDS:
            task = Task(
                steps=STEPS_TO_LOSS, widths=WIDTHS_TO_LOSS, annealed=True, seed=seed
            )
            where = f"{link}, for its loss, seed {seed}"
            runs = run(name, layout, emulated, task, report, where, LOSS_LIMIT_S)
            for traces in runs:
                final = final_of(name, traces)
                print_row(f"{name}, {where}", f"loss {final.loss:.4f}")
                yield final


def rate_to_loss(link: str) -> str | None:
    """The rate of a link, reduced as the model of the loss is smaller."""
    if link not in RATES:
        return None
    narrow, whole = (workload.num_weights(w) for w in (WIDTHS_TO_LOSS, WIDTHS))
    return f"{BITS_PER_S[link] * narrow / whole / 1e3:.0f}kbit"


def final_of(name: str, traces: list[Trace]) -> Final:
    """The result of one training; methods without counters exchange once a period."""
    local = torch.stack([t.local for t in traces if t.local is not None])
    shipped = traces[0].shipped
    assert shipped is not None
    known = 0.0 if name == SOLO else 1 / PERIODS.get(name, 1)
    counted = fmean(t.last.exchanges - t.first.exchanges for t in traces)
    return Final(
        workload.held_out_loss(shipped, WIDTHS_TO_LOSS),
        workload.held_out_loss(local.mean(0), WIDTHS_TO_LOSS),
        relative_consensus_distance(local),
        counted / (len(traces[0].stamps) - 1) if ours(name) else known,
    )


def label(name: str, layout: Layout, link: str) -> str:
    """The label of a row, with the link where it matters."""
    size = f", {layout}" if layout.per_host > 1 else ""
    return name if link == UNSHAPED else f"{name}{size}, {link}"


def loss_row(name: str, finals: Sequence[Final], control: float) -> Row:
    """The row of the loss of the saved weights, over the seeds, against `ddp`'s."""
    loss = mean_with_interval([final.loss for final in finals])
    details = {
        "of the mean of all": fmean(final.of_mean for final in finals),
        "consensus distance, relative": fmean(final.distance for final in finals),
        "exchanges a step": fmean(final.exchanges for final in finals),
        "seeds": len(finals),
    }
    print_row(name, f"loss {loss:.4f}", f"{loss.median / control:.4f}")
    unit, ratio = "nats, of the weights that are saved", loss.median / control
    return Row({"method": name}, loss, unit, ratio, "ddp", LOSS, details)


def relative_consensus_distance(weights: Tensor) -> float:
    """sqrt(mean ||w_i - mean||^2) / ||mean|| of the rows of [learners, elements]."""
    mean = weights.mean(0)
    return ((weights - mean).norm() / len(weights) ** 0.5 / mean.norm()).item()


# --- bounds


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """The bounds for `adpsgd` on 4 hosts that were set beforehand."""
    bounds = {"1 Gbit/s": (0.85, 1.6, 1.3), "200 Mbit/s": (0.97, 6.0, 5.0)}
    for link, (of_solo, of_ddp, of_decent) in bounds.items():
        what = f"adpsgd, 4 hosts, {link}"
        if row := _find(rows, COMPUTED, link, "adpsgd"):
            exposed = row.details["exposed"]
            yield Target(f"{what}: exposed share of wall time", 0.01, exposed, False)
            yield Target(f"{what}: of solo", of_solo, row.ratio or 0.0)
            for names, bound in ((("ddp",), of_ddp), (DECENT, of_decent)):
                if best := max(_steps(rows, link, name) for name in names):
                    ratio = row.value.median / best
                    yield Target(f"{what}: of {names[0].split()[0]}", bound, ratio)
        if row := _find(rows, TIMED, link, "adpsgd"):
            yield Target(f"{what}, timed wait: of solo", 0.98, row.ratio or 0.0)
        if row := _find_case(rows, LOSS, {"method": f"adpsgd, {link}"}):
            claim = f"{what}: loss after {STEPS_TO_LOSS} annealed steps, of ddp's"
            yield Target(claim, WORSE_LOSS, row.ratio or 0.0, False)


def _find(rows: Sequence[Row], table: str, link: str, name: str) -> Row | None:
    return _find_case(rows, table, {"hosts": "4 x 1", "link": link, "method": name})


def _find_case(rows: Sequence[Row], table: str, case: dict[str, str]) -> Row | None:
    found = [row for row in rows if row.table == table and row.case == case]
    return found[0] if found else None


def _steps(rows: Sequence[Row], link: str, name: str) -> float:
    """Steps per second; zero if not measured."""
    row = _find(rows, COMPUTED, link, name)
    return row.value.median if row is not None else 0.0
