"""The share of solo's speed that `adpsgd` keeps over long windows with many exchanges.

`overlap` compares many methods and gives each a few seconds. Where cores are contended
an engine rests for many seconds between two exchanges (`cpu_share`), so that a short
window can miss what exchanges cost. Here few methods take turns at longer windows, once
computing, and once waiting for as long as a computed step took.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks import hosts
from benchmarks.feed import Task
from benchmarks.hosts import Hosts
from benchmarks.methods import SOLO
from benchmarks.overlap import (
    COMPUTED,
    LIMIT_S,
    RATES,
    TIMED,
    Layout,
    Speed,
    rows_of,
    run,
    speed,
)
from benchmarks.results import Report, Target
from benchmarks.timing import spread

METHODS = ("adpsgd",)
LAYOUT = Layout(num_hosts=4, per_host=1)
TASK = Task(seconds=15.0)
TURNS = 3
BOUNDS = {
    (COMPUTED, "1 Gbit/s"): 0.85,
    (COMPUTED, "200 Mbit/s"): 0.97,
    (TIMED, "1 Gbit/s"): 0.98,
    (TIMED, "200 Mbit/s"): 0.98,
}

Speeds = dict[str, list[Speed]]


def measure(quick: bool = False) -> Report:
    """Measures solo and `adpsgd` in turn, at both rates."""
    report = Report(
        f"Speed kept over windows of {TASK.seconds:g} s.",
        limit="solo",
        notes=[f"Each run is ended after {LIMIT_S:g} s."],
    )
    if hosts.are_missing(report):
        return report
    torch.set_num_threads(1)
    task, turns = (replace(TASK, seconds=5.0), 1) if quick else (TASK, TURNS)
    with hosts.emulated(LAYOUT.num_hosts) as emulated:
        computed = compare(task, COMPUTED, turns, emulated, report)
        task = replace(task, wait_s=step_of(computed))
        compare(task, TIMED, turns, emulated, report)
    return report


def compare(
    task: Task, table: str, turns: int, emulated: Hosts, report: Report
) -> list[Speeds]:
    """Measures all methods in turn, at each rate; adds the rows to the report."""
    compared = []
    for link, rate in RATES.items():
        emulated.shape(rate)
        speeds: Speeds = {name: [] for name in (SOLO, *METHODS)}
        for _ in range(turns):
            for name, found in speeds.items():
                traces = run(name, LAYOUT, emulated, task, report, f"{link}, {table}")
                found.extend(map(speed, traces))
        report.rows += rows_of(LAYOUT, link, speeds, table)
        report.targets += [target(table, link, name, speeds) for name in METHODS]
        compared.append(speeds)
    return compared


def step_of(compared: Sequence[Speeds]) -> float:
    """The seconds of a step of solo, median over all turns at all rates."""
    return spread([1 / found.steps for one in compared for found in one[SOLO]]).median


def target(table: str, link: str, name: str, speeds: Speeds) -> Target:
    """The bound on the median, over turns, of the ratio to the solo beside it."""
    pairs = zip(speeds[name], speeds[SOLO], strict=True)
    ratio = spread([mine.steps / solo.steps for mine, solo in pairs]).median
    what = f"{name}, 4 hosts, {link}" + (", timed wait" if table == TIMED else "")
    return Target(f"{what}: of solo", BOUNDS[table, link], ratio)
