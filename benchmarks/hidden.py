"""How much of its communication each method hides, on links of 1 Gbit/s and 200 Mbit/s.

Learners on emulated hosts train the same model on the same samples by each method, in
turn. The control is `solo`: as many processes that compute the same and communicate
nothing. What a method's steps per second lack of solo's is communication that shows,
be it as waiting or as processor time that was taken from the computation. Beside it the
time for which the training thread waited, as the engine counts it.

In the timed form a step waits as long as a real one took and computes nothing, so that
the cores of this machine, which the hosts share, are not what is measured.

The loss is that of held-out samples after equally many samples for all. Those methods
whose learners wait for one another do the same arithmetic on any link, and run on an
unshaped one.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import hosts, learners, workload
from benchmarks.hosts import Hosts
from benchmarks.learners import LearnersFailed
from benchmarks.methods import (
    NEED_PEERS,
    PERIODS,
    PROGRAMS,
    SOLO,
    SOLO_LOOP,
    Task,
    Trace,
    peers_missing,
    rate,
)
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread

RATES = {"1 Gbit/s": "1gbit", "200 Mbit/s": "200mbit"}
UNSHAPED = "unshaped"
FLAT = (SOLO, "ddp", "sdpsgd", "d1psgd", "adpsgd")
DECENT = ("Decent-DP ring", "Decent-DP one-peer-exp")
PEERS = (SOLO_LOOP, *DECENT, "torch post-local", "torchft LocalSGD", "torchft DiLoCo")
HIERARCHICAL = (SOLO, "ddp", "hadpsgd", SOLO_LOOP, "torch hierarchical")
ASYNCHRONOUS = ("adpsgd", "hadpsgd")
STEPS_TO_LOSS = 240
LIMIT_S = 100.0  # of one run; the slowest takes a third of it

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
        """As a table's cell."""
        return f"{self.num_hosts} x {self.per_host}"

    @property
    def num_learners(self) -> int:
        """Of all hosts."""
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
FULL = (
    Comparison(Layout(4, 1), (*FLAT, *PEERS, "torch hierarchical"), 3),
    Comparison(Layout(2, 1), (*FLAT, *PEERS), 2),
    Comparison(Layout(2, 2), HIERARCHICAL, 2),
    Comparison(Layout(4, 1), BRIEF, 2, timed=True),
    Comparison(Layout(4, 2), (SOLO, "ddp", "hadpsgd"), 2, timed=True),
)
QUICK = (
    Comparison(Layout(4, 1), BRIEF, 1),
    Comparison(Layout(4, 1), BRIEF, 1, timed=True),
)


class Speed(NamedTuple):
    """What one run of a method came to.

    Attributes:
        steps: Per second, of a learner.
        exposed: Share of the wall time in which the training thread waited, as the
            engine counts it; the mean of the learners.
        processor_ms: Processor time of a step, all threads of a learner.
    """

    steps: float
    exposed: float
    processor_ms: float


def measure(quick: bool = False) -> Report:
    """All methods on all links; the losses only if there is time."""
    report = Report(
        "What communication costs on shaped links: steps/s of a learner, against as "
        "many processes that communicate nothing (`solo`, in the same loop).",
        limit="solo",
        notes=_NOTES,
    )
    if reason := hosts.reason_against():
        report.skipped["everything"] = reason
        return report
    if reason := peers_missing():
        report.skipped["Decent-DP, torchft"] = reason
    torch.set_num_threads(1)
    step_s = 0.0
    for comparison in QUICK if quick else FULL:
        rows = list(compare(comparison, report, step_s if comparison.timed else None))
        report.rows += rows
        step_s = step_s or 1 / _value(rows, "4 x 1", "1 Gbit/s", SOLO)
    if not quick:
        report.rows += losses(report)
    report.targets += targets(report.rows)
    return report


_NOTES = [
    "`solo` to `hadpsgd` train through Lightning's Trainer, the others in a plain "
    "loop, and each is compared with solo in its own loop.",
    "hosts: number x learners of each. `hadpsgd` has one super-learner on each host.",
    "exposed: share of wall time in which the training thread waited, as the engine "
    "counts it; other methods count nothing.",
    "Methods that average every so many steps (post-local, hierarchical, LocalSGD, "
    "DiLoCo) do it every 8, hierarchical within pairs every 4.",
]


# --- speed


def compare(
    comparison: Comparison, report: Report, wait_s: float | None
) -> Iterator[Row]:
    """The rows of one comparison, at all rates."""
    layout, methods = comparison.layout, available(comparison.methods)
    with hosts.emulated(layout.num_hosts) as emulated:
        for link, rate_of_link in RATES.items():
            emulated.shape(rate_of_link)
            where = f"{layout}, {link}, {'timed' if wait_s else 'computed'}"
            print(where, flush=True)
            speeds: dict[str, list[Speed]] = {name: [] for name in methods}
            for _ in range(comparison.repetitions):
                for name in methods:
                    try:
                        traces = run(name, layout, emulated, task_of(name, wait_s))
                        speeds[name].append(speed(traces))
                    except LearnersFailed as error:
                        report.skipped[f"{name}, {where}"] = str(error)[-300:]
            yield from rows_of(layout, link, speeds, TIMED if wait_s else COMPUTED)


def task_of(name: str, wait_s: float | None) -> Task:
    """To measure a method's speed over whole periods."""
    return Task(period=PERIODS.get(name, 1), wait_s=wait_s)


def available(methods: Sequence[str]) -> list[str]:
    """Those that are installed."""
    missing = NEED_PEERS if peers_missing() else set()
    return [name for name in methods if name not in missing]


def run(name: str, layout: Layout, emulated: Hosts, task: Task) -> list[Trace]:
    """One training of all learners."""
    program = PROGRAMS[name]
    return learners.run(
        lambda place: program(place, task), layout.num_learners, LIMIT_S, emulated
    )


def speed(traces: list[Trace]) -> Speed:
    """What the learners' traces say together."""
    exposed, processor = [], []
    for trace in traces:
        wall = trace.stamps[-1] - trace.stamps[0]
        exposed.append((trace.last.exposed_s - trace.first.exposed_s) / wall)
        taken = trace.last.process_s - trace.first.process_s
        processor.append(1e3 * taken / (len(trace.stamps) - 1))
    num = len(traces)
    return Speed(rate(traces), sum(exposed) / num, sum(processor) / num)


def rows_of(
    layout: Layout, link: str, speeds: dict[str, list[Speed]], table: str
) -> Iterator[Row]:
    """One row for each method, with its ratio to solo in the same loop."""
    found = {
        name: spread(s.steps for s in runs) for name, runs in speeds.items() if runs
    }
    for name, steps in found.items():
        control = SOLO if name in (*FLAT, "hadpsgd") else SOLO_LOOP
        ratio = steps.median / found[control].median if control in found else None
        details = {"processor ms": _median(s.processor_ms for s in speeds[name])}
        if ours(name):
            details["exposed"] = _median(s.exposed for s in speeds[name])
        case = {"hosts": str(layout), "link": link, "method": name}
        print_row(name, f"{steps:.2f} steps/s", f"{ratio or 0:.3f} of solo")
        yield Row(case, steps, "steps/s", ratio, table=table, details=details)


def ours(name: str) -> bool:
    """Whether it is a setting of this package's strategy."""
    return name.endswith("psgd")


def _median(values: Iterator[float]) -> float:
    return spread(values).median


# --- loss after equal samples


def losses(report: Report) -> Iterator[Row]:
    """Held-out losses, those of the asynchronous methods at both rates."""
    flat, two_each = Layout(4, 1), Layout(2, 2)
    waiting = [name for name in available((*FLAT, *PEERS)) if name not in ASYNCHRONOUS]
    plan = [(name, flat, UNSHAPED) for name in waiting if name != SOLO_LOOP]
    plan += [("adpsgd", flat, link) for link in RATES]
    plan += [("hadpsgd", two_each, link) for link in RATES]
    control = 0.0
    for name, layout, link in plan:
        with hosts.emulated(layout.num_hosts, RATES.get(link)) as emulated:
            try:
                traces = run(name, layout, emulated, Task(steps=STEPS_TO_LOSS))
            except LearnersFailed as error:
                report.skipped[f"loss of {name}, {link}"] = str(error)[-300:]
                continue
        row = loss_row(name, layout, link, traces, control)
        control = control or (row.value.median if name == "ddp" else 0.0)
        yield row


def loss_row(
    name: str, layout: Layout, link: str, traces: list[Trace], control: float
) -> Row:
    """The loss of what learner 0 would save, and of the mean of all learners."""
    local = torch.stack([t.local for t in traces if t.local is not None])
    shipped = traces[0].shipped
    assert shipped is not None
    loss = workload.held_out_loss(shipped)
    details = {
        "of the mean of all": workload.held_out_loss(local.mean(0)),
        "consensus distance, relative": relative_consensus_distance(local),
    }
    print_row(f"{name}, {link}", f"loss {loss:.4f}", f"{loss / (control or loss):.3f}")
    return Row(
        {"hosts": str(layout), "link": link, "method": name},
        spread([loss]),
        "nats, of the weights that are saved",
        loss / control if control else None,
        "ddp",
        LOSS,
        details,
    )


def relative_consensus_distance(weights: Tensor) -> float:
    """sqrt(mean ||w_i - mean||^2) / ||mean|| of the rows of [learners, elements]."""
    mean = weights.mean(0)
    return ((weights - mean).norm() / len(weights) ** 0.5 / mean.norm()).item()


# --- what was to be reached


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """The bounds for `adpsgd` on 4 hosts that were set beforehand."""
    bounds = {"1 Gbit/s": (0.85, 1.6, 1.3), "200 Mbit/s": (0.97, 6.0, 5.0)}
    for link, (of_solo, of_ddp, of_decent) in bounds.items():
        row = _find(rows, COMPUTED, "4 x 1", link, "adpsgd")
        if row is None:
            continue
        what = f"adpsgd, 4 hosts, {link}"
        exposed = f"{what}: exposed share of wall time"
        yield Target(exposed, 0.01, row.details["exposed"], at_least=False)
        yield Target(f"{what}: of solo", of_solo, row.ratio or 0.0)
        mine, ddp = row.value.median, _value(rows, "4 x 1", link, "ddp")
        yield Target(f"{what}: of ddp", of_ddp, mine / ddp)
        if decent := [_value(rows, "4 x 1", link, name) for name in DECENT]:
            best = max(decent)
            if best:
                yield Target(f"{what}: of Decent-DP", of_decent, mine / best)
        timed = _find(rows, TIMED, "4 x 1", link, "adpsgd")
        if timed is not None:
            yield Target(f"{what}, timed wait: of solo", 0.98, timed.ratio or 0.0)
        loss = _find(rows, LOSS, "4 x 1", link, "adpsgd")
        if loss is not None:
            yield Target(f"{what}: loss, of ddp's", 1.02, loss.ratio or 0.0, False)


def _find(
    rows: Sequence[Row], table: str, layout: str, link: str, name: str
) -> Row | None:
    case = {"hosts": layout, "link": link, "method": name}
    found = [row for row in rows if row.table == table and row.case == case]
    return found[0] if found else None


def _value(rows: Sequence[Row], layout: str, link: str, name: str) -> float:
    row = _find(rows, COMPUTED, layout, link, name)
    return row.value.median if row is not None else 0.0


if __name__ == "__main__":
    sys.exit("run it by: python -m benchmarks hidden")
