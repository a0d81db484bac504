"""What `adpsgd` keeps of solo's speed over longer windows, which hold many exchanges.

`hidden` compares many methods and gives each a few seconds. Where cores are contended
an engine rests for many seconds between two exchanges (`cpu_share`), so that a short
window can miss what exchanges cost. Here few methods take turns at longer windows.
"""

from dataclasses import replace

import torch

from benchmarks import hosts
from benchmarks.hidden import LIMIT_S, RATES, Layout, Speed, rows_of, run, speed
from benchmarks.methods import LINKS, SOLO, Task
from benchmarks.results import Report, Target
from benchmarks.timing import spread

METHODS = "adpsgd", LINKS
LAYOUT = Layout(num_hosts=4, per_host=1)
TASK = Task(seconds=20.0)
TURNS = 3
BOUNDS = {"1 Gbit/s": 0.85, "200 Mbit/s": 0.97}


def measure(quick: bool = False) -> Report:
    """Solo and `adpsgd` over Gloo and over links in turn, at both rates."""
    report = Report(
        f"Speed kept over windows of {TASK.seconds:g} s, computed on shared cores.",
        limit="solo",
        notes=[f"Each run is ended after {LIMIT_S:g} s."],
    )
    if reason := hosts.reason_against():
        report.skipped["everything"] = reason
        return report
    torch.set_num_threads(1)
    task = replace(TASK, seconds=5.0) if quick else TASK
    with hosts.emulated(LAYOUT.num_hosts) as emulated:
        for link, rate in RATES.items():
            emulated.shape(rate)
            speeds: dict[str, list[Speed]] = {n: [] for n in (SOLO, *METHODS)}
            for _ in range(1 if quick else TURNS):
                for name, found in speeds.items():
                    traces = run(name, LAYOUT, emulated, task, report, link)
                    found.extend(map(speed, traces))
            report.rows += rows_of(LAYOUT, link, speeds, "sustained")
            report.targets += [target(link, name, speeds) for name in METHODS]
    return report


def target(link: str, name: str, speeds: dict[str, list[Speed]]) -> Target:
    """The median over turns of the ratio to the solo beside it."""
    pairs = zip(speeds[name], speeds[SOLO], strict=True)
    ratio = spread([mine.steps / solo.steps for mine, solo in pairs]).median
    return Target(f"{name}, 4 hosts, {link}: of solo", BOUNDS[link], ratio)
