"""Held-out loss after equal wall-clock time, every method at its best rate.

    python -m benchmarks race                            all: a night on two cores
    python -m benchmarks race --columns fast --seeds 1   some of it
    python -m benchmarks race --estimate                 only how long it will take
    python -m benchmarks race --report                   only what has been run so far

Each of four emulated hosts has a learner. The schedule, warm-up and decay, is fitted to
the steps that a method makes in the time, which short calibrations and earlier runs
have shown. Rates, and the methods' own settings, are chosen on held-out samples and
seeds that are not reported. The score is that of the mean of all learners' weights.

In the columns of shards, two hosts have two learners each, which hold one model, beside
HSDP. In those of own cores, steps, links and the race are slower, so that hosts do not
compete for the cores of this machine. Run alone, these two kinds of columns have
results of their own, `race_shards` and `race_own_cores`.

A finished run is a file in the folder of runs, and is not run again. The report covers
what was asked for. The floor is `ddp` after as many steps as learners make that never
communicate, on the samples that all hosts together can take.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import hosts, page, results
from benchmarks.plain_loops import peers_missing
from benchmarks.racing.columns import COLUMNS, NUM_HOSTS, SLOW_MOTION
from benchmarks.racing.entrants import FLOOR
from benchmarks.racing.problems import STEP_S
from benchmarks.racing.report import curves_of, means_of, rows_of, targets_of
from benchmarks.racing.runs import NOT_RUN, Track
from benchmarks.racing.schedule import Race, Standing, run_all
from benchmarks.results import Report

FOLDER = results.ROOT / "runs" / "race"


def report_of(race: Race, folder: Path, only_found: bool = False) -> Report:
    """Runs what is missing, unless told not to, and reports."""
    report = Report(
        f"Held-out loss of {NUM_HOSTS} learners after {race.seconds:g} s, each method "
        f"at its best rate; mean over {race.num_seeds} seeds, 95 % of a bootstrap over "
        "them in brackets.",
        limit="the floor",
        notes=_NOTES,
    )
    torch.set_num_threads(1)
    standings = found(race, folder) if only_found else run(race, folder)
    standings = without_lone_floors(standings)
    report.rows += rows_of(standings)
    report.targets += targets_of(means_of(standings))
    report.curves += curves_of(standings, race.seconds)
    report.skipped |= skipped_of(standings)
    if reason := peers_missing():
        report.skipped["Decent-DP, torchft"] = reason
    return report


def without_lone_floors(standings: Sequence[Standing]) -> list[Standing]:
    """Leaves out floors without other rows, which compare nothing."""
    raced = {
        (s.cell.problem, s.cell.column)
        for s in standings
        if s.results and s.cell.method != FLOOR
    }
    return [
        s
        for s in standings
        if not s.results or (s.cell.problem, s.cell.column) in raced
    ]


def skipped_of(standings: Sequence[Standing]) -> dict[str, str]:
    """The reasons why cells have no row; one line a column for those not run."""
    skipped: dict[str, str] = {}
    not_run = defaultdict[str, list[str]](list)
    for cell, _, _, trouble in standings:
        where = f"{cell.problem}, {cell.column}"
        if trouble.endswith(NOT_RUN):
            not_run[where].append(cell.method)
        elif trouble:
            skipped[f"{cell.method}, {where}"] = trouble[-300:]
    return skipped | {where: f"not run: {'; '.join(m)}" for where, m in not_run.items()}


def found(race: Race, folder: Path) -> list[Standing]:
    """The results of earlier calls."""
    return list(run_all(race, Track(None, folder)))


def run(race: Race, folder: Path) -> list[Standing]:
    """The results of earlier calls and, for the rest, of new runs."""
    print(f"at most about {race.estimated_s() / 60:.0f} minutes", flush=True)
    delays = defaultdict[float, list[str]](list)
    for name in race.columns:
        delays[COLUMNS[name].delay_s].append(name)
    return [s for d, names in delays.items() for s in _run_on(d, names, race, folder)]


def _run_on(
    delay_s: float, columns: Sequence[str], race: Race, folder: Path
) -> list[Standing]:
    with hosts.emulated(NUM_HOSTS, delay_s=delay_s) as emulated:
        return list(run_all(replace(race, columns=columns), Track(emulated, folder)))


_NOTES = [
    f"A step takes {1e3 * STEP_S:.0f} ms: the gradient is computed, the rest slept. "
    "Links are named for 34 MB of weights and slowed in proportion to the model's.",
    "This package trains through Lightning's Trainer, the others in a plain loop.",
    "Shards: two hosts of two learners, and steps four times as long. HSDP is torch's "
    "`fully_shard` over a mesh of hosts x learners.",
    "MB sent a step: by a host, all protocols. An exchange is an average that a "
    "learner took part in; that of a share of the weights counts as that share.",
    "Where a host is killed, the settings are those of the column without. This "
    "package's learners are islands there; those of the others form a new process "
    "group at once. The seed says who is killed.",
    f"Own cores: all is {SLOW_MOTION} times slower, steps, links and the race, so that "
    "hosts do not compete for the cores of this machine.",
    "s: the longest run; more than the race's length is a calibration that was wrong.",
]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks race")
    add, race = parser.add_argument, Race()
    for name, known in (
        ("models", race.problems),
        ("columns", race.columns),
        ("methods", race.methods),
    ):
        help_ = "; ".join(known)
        add(f"--{name}", nargs="+", choices=known, default=known, help=help_)
    add(
        "--seconds",
        type=float,
        default=race.seconds,
        help="length of a run (%(default)s)",
    )
    add(
        "--seeds",
        type=int,
        default=race.num_seeds,
        help="number of reported seeds (%(default)s)",
    )
    add(
        "--choosing-seeds",
        type=int,
        default=race.choosing_seeds,
        help="number of seeds that choose rates (%(default)s)",
    )
    add(
        "--most-trials",
        type=int,
        default=race.most_trials,
        help="most settings of a method that are tried (%(default)s)",
    )
    add(
        "--rate-factor",
        type=float,
        default=race.rate_factor,
        help="factor between neighbours on the grid of rates (%(default)s)",
    )
    add(
        "--folder",
        type=Path,
        default=FOLDER,
        help="folder of finished runs (runs/race)",
    )
    add("--report", action="store_true", help="run nothing; report what is there")
    add("--estimate", action="store_true", help="only say how long it will take")
    options = parser.parse_args(arguments)
    if not options.rate_factor > 1:
        parser.error(f"--rate-factor must be above 1, got {options.rate_factor:g}")
    return options


def main(arguments: Sequence[str]) -> int:
    """The command line of the race; writes its file and the page."""
    options, begin = parse(arguments), time.perf_counter()
    race = Race(
        options.models,
        options.columns,
        options.methods,
        options.seconds,
        options.seeds,
        options.most_trials,
        options.choosing_seeds,
        options.rate_factor,
    )
    if options.estimate:
        print(f"about {race.estimated_s() / 60:.0f} minutes if nothing has been run")
        return 0
    if not options.report and (reason := hosts.reason_against()):
        print(f"cannot race: {reason}", file=sys.stderr)
        return 1
    report = report_of(race, options.folder, options.report)
    command = " ".join(["python -m benchmarks race", *map(_quoted, arguments)])
    results.write(
        _name_of(options.columns), report, command, time.perf_counter() - begin
    )
    print(f"results: {page.write().relative_to(results.ROOT)}")
    return 0


def _name_of(columns: Sequence[str]) -> str:
    """The name of the file of results."""
    asked = [COLUMNS[name] for name in columns]
    if all(column.is_sharded for column in asked):
        return "race_shards"
    own_cores = all(column.slow_motion > 1 for column in asked)
    return "race_own_cores" if own_cores else "race"


def _quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
