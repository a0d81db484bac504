"""The cost of the strategy when there is no peer to talk to.

One learner under `adpsgd` against the same under Lightning's single-device strategy;
and a learner whose engine runs beside a peer, without an exchange: then each step pays
for the hooks. The steps compute: a few milliseconds on a model of 2.7 MB and about 30
ms on one of 34 MB. Runs take turns; the figure is the median step of a run. All keep
the memory that gradients leave. Otherwise the C library decides again in each process
whether 34 MB of pages come from the system at every step, which is worth some 10 %.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from benchmarks import learners, lightning_programs, workload
from benchmarks.feed import Task, Trace
from benchmarks.learners import Place
from benchmarks.results import Report, Row, Target
from benchmarks.timing import Spread, print_row, spread
from benchmarks.workload import WIDTHS
from lightning_adpsgd import HADPSGDStrategy

SINGLE, ONE, IDLE = "single device", "adpsgd, one learner", "adpsgd, idle peer"
MODELS = {"2.7 MB": (256, 700, 700, 10), "34 MB": WIDTHS}
SECONDS, REPETITIONS, LIMIT_S = 1.5, 9, 60.0
NEVER = 1 << 40
PEER_S = 0.5  # of a step of the idle peer


def measure(quick: bool = False) -> Report:
    """Measures the three at both lengths of a step, in turn."""
    torch.set_num_threads(1)
    report = Report(
        "The strategy's cost with nobody to talk to: the duration of a step.",
        limit="single device",
        notes=[
            "With an idle peer the engine and its threads run, and nothing is "
            "exchanged; the bound is for one learner."
        ],
    )
    for model, widths in MODELS.items():
        durations = take_turns(widths, 3 if quick else REPETITIONS)
        report.rows += rows_of(model, durations)
    report.targets += [
        Target(f"{ONE}, {row.case['model']}: of single device", 1.02, row.ratio, False)
        for row in report.rows
        if row.case["strategy"] == ONE and row.ratio is not None
    ]
    return report


def take_turns(widths: Sequence[int], repetitions: int) -> dict[str, Spread]:
    """The milliseconds of learner 0's steps."""
    durations: dict[str, list[float]] = {SINGLE: [], ONE: [], IDLE: []}
    for _ in range(repetitions):
        for name, values in durations.items():
            values.append(median_step_ms(run(name, widths)))
    return {name: spread(values) for name, values in durations.items()}


def run(name: str, widths: Sequence[int]) -> Trace:
    """One training; the trace of learner 0."""
    program = partial(learn, name=name, widths=widths)
    return learners.run(program, 2 if name == IDLE else 1, LIMIT_S)[0]


def learn(place: Place, name: str, widths: Sequence[int]) -> Trace:
    """The program of a learner."""
    workload.keep_memory()
    task = Task(seconds=SECONDS, widths=widths)
    if name == SINGLE:
        return lightning_programs.alone(place, task)
    if place.rank:
        # It waits, and takes as few steps as it must.
        task = replace(task, counts=(0, 2), wait_s=PEER_S)
    return lightning_programs.train(place, task, strategy_of(name), place.world_size, 1)


def strategy_of(name: str) -> HADPSGDStrategy:
    """`adpsgd`; beside an idle peer, without a round in which to exchange."""
    every = NEVER if name == IDLE else 1
    return HADPSGDStrategy("ring", "async", super_learner_size=1, gossip_every=every)


def median_step_ms(trace: Trace) -> float:
    steps = (later - earlier for earlier, later in pairwise(trace.stamps))
    return 1e3 * statistics.median(steps)


def rows_of(model: str, durations: dict[str, Spread]) -> Iterator[Row]:
    for name, taken in durations.items():
        ratio = taken.median / durations[SINGLE].median
        print_row(f"{name}, {model}", f"{taken:.2f} ms", f"{ratio:.3f}")
        yield Row({"model": model, "strategy": name}, taken, "ms a step", ratio)
