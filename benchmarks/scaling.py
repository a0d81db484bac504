"""The change of a learner's steps/s from 1 to 8 processes on this machine.

Steps are timed waits, because the processes share the cores; the model is so small that
the loopback and the processor time of averaging do not matter. The rest is the time for
which learners wait for one another.
"""

import torch

from benchmarks import learners
from benchmarks.feed import Task, rate
from benchmarks.learners import LearnersFailed
from benchmarks.methods import NEED_PEERS, PROGRAMS
from benchmarks.plain_loops import peers_missing
from benchmarks.results import Report, Row
from benchmarks.timing import print_row, spread

WIDTHS = (256, 800, 800, 10)  # 0.85 million weights, 3.4 MB
STEP_S, SECONDS, LIMIT_S = 0.1, 3.0, 60.0
SIZES = (1, 2, 4, 8)
METHODS = ("adpsgd", "hadpsgd", "sdpsgd", "ddp", "Decent-DP ring")


def measure(quick: bool = False) -> Report:
    """Measures each method with each number of learners, in turn."""
    torch.set_num_threads(1)
    report = Report(
        f"Scaling of steps that take {1e3 * STEP_S:.0f} ms: steps/s of a learner.",
        limit="one learner",
        notes=[
            "`hadpsgd` has super-learners of two, and one learner where it is alone."
        ],
    )
    missing = peers_missing()
    if missing:
        report.skipped["Decent-DP"] = missing
    methods = [name for name in METHODS if not (missing and name in NEED_PEERS)]
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(1 if quick else 2):
        for size in SIZES:
            for name in methods:
                _measure(name, size, rates, report)
    report.rows += rows_of(rates)
    return report


def _measure(
    name: str, size: int, rates: dict[tuple[str, int], list[float]], report: Report
) -> None:
    if name in NEED_PEERS and size == 1:
        return  # Decent-DP refuses to be alone
    task = Task(seconds=SECONDS, wait_s=STEP_S, widths=WIDTHS)
    per_host = min(2, size) if name == "hadpsgd" else None
    program = PROGRAMS[name]
    try:
        traces = learners.run(
            lambda place: program(place, task), size, LIMIT_S, per_host=per_host
        )
        rates.setdefault((name, size), []).append(rate(traces))
    except LearnersFailed as error:
        report.skipped[f"{name}, {size} learners"] = str(error)[-300:]


def rows_of(rates: dict[tuple[str, int], list[float]]) -> list[Row]:
    """The rows, by method and then by number of learners."""
    rows = []
    for (name, size), values in sorted(rates.items()):
        # Alone, every method is the one without communication.
        alone = spread(rates.get((name, 1)) or rates[METHODS[0], 1])
        steps = spread(values)
        ratio = steps.median / alone.median
        print_row(f"{name}, {size}", f"{steps:.2f} steps/s", f"{ratio:.3f}")
        rows.append(Row({"method": name, "learners": size}, steps, "steps/s", ratio))
    return rows
