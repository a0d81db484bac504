"""The runs of a race, their order, and the time that they will take.

In a column each method is tuned first. Then the runs that are reported take turns by
seed, so that whatever else the machine does meets all alike.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from benchmarks.learners import LearnersFailed
from benchmarks.plain_loops import peers_missing
from benchmarks.racing.columns import COLUMNS, FAST, KILL, without_fault
from benchmarks.racing.entrants import ENTRANTS, FLOOR
from benchmarks.racing.problems import PROBLEMS
from benchmarks.racing.runs import (
    CALIBRATION_S,
    NOT_RUN,
    Cell,
    NotRun,
    Result,
    Role,
    Run,
    Track,
)
from benchmarks.racing.tuning import (
    Setting,
    best,
    loss_or_infinity,
    next_setting,
)

AROUND_A_RUN_S = 9.0
TUNED, TUNED_WITH_OPTION = 3.4, 6.5
"""The average number of settings that a search tries."""


@dataclass(frozen=True)
class Race:
    """The runs of a race.

    Args:
        problems: Names of models.
        columns: Names of columns.
        methods: Names of entrants.
        seconds: Length of each run.
        num_seeds: Number of seeds that are reported.
        most_trials: Most settings of a method that are tried, from a good guess on.
        choosing_seeds: Number of seeds of each trial; none of them is reported.
        rate_factor: Factor between neighbours on the grid of rates.
    """

    problems: Sequence[str] = tuple(PROBLEMS)
    columns: Sequence[str] = tuple(COLUMNS)
    methods: Sequence[str] = tuple(ENTRANTS)
    seconds: float = 45.0
    num_seeds: int = 3
    most_trials: int = 12
    choosing_seeds: int = 1
    rate_factor: float = 2.0

    def lineups(self) -> Iterator[list[Cell]]:
        """The cells of each column of each model."""
        for problem, column in itertools.product(self.problems, self.columns):
            names = [n for n in self.methods if _takes_part(n, column)]
            yield [Cell(problem, column, name) for name in names]

    def estimated_s(self) -> float:
        """The seconds that all runs take, if none has been made before."""
        return sum(self._estimated_s(c) for cells in self.lineups() for c in cells)

    def _estimated_s(self, cell: Cell) -> float:
        trials = min(self.most_trials, self._usual_trials(cell)) * self.choosing_seeds
        if cell.method == FLOOR and _floor_of(cell) != cell:
            return 0.0
        slower = 1 if cell.method == FLOOR else COLUMNS[cell.column].slow_motion
        num_runs = self.num_seeds + (0 if cell.column == KILL else trials)
        one_s = slower * self.seconds + AROUND_A_RUN_S
        return num_runs * one_s + 2 * slower * CALIBRATION_S

    def _usual_trials(self, cell: Cell) -> float:
        usual = TUNED if cell.entrant.options is None else TUNED_WITH_OPTION
        # The way to the best rate has more steps on a finer grid.
        return usual + (TUNED - 2) * (math.log(2, self.rate_factor) - 1)


class Standing(NamedTuple):
    """The outcome of a cell.

    Attributes:
        cell: The cell.
        setting: Chosen setting.
        results: Results of the reported seeds; none if it could not be run.
        trouble: Reason why it could not be run.
    """

    cell: Cell
    setting: Setting | None
    results: Sequence[Result]
    trouble: str = ""


def run_all(race: Race, track: Track) -> Iterator[Standing]:
    """Makes the missing runs, column by column."""
    for cells in race.lineups():
        settings: dict[Cell, Setting] = {}
        for cell in cells:
            try:
                settings[cell] = tune(race, track, cell)
            except (LearnersFailed, NotRun) as error:
                yield Standing(cell, None, (), str(error))
        found: dict[Cell, list[Result]] = {cell: [] for cell in settings}
        for seed, (cell, setting) in itertools.product(
            range(1, race.num_seeds + 1), settings.items()
        ):
            run = run_of(race, cell, setting, seed, "report")
            with suppress(NotRun):
                found[cell].append(track.result(run))
        for cell, results in found.items():
            yield _standing(cell, settings[cell], results)


def _standing(cell: Cell, setting: Setting, results: Sequence[Result]) -> Standing:
    if not results:
        return Standing(
            cell, setting, (), f"at the chosen rate, all seeds have {NOT_RUN}"
        )
    failed = [result["failed"] for result in results if "failed" in result]
    if failed:
        return Standing(cell, setting, (), failed[0])
    if any(result["loss"] is None for result in results):
        return Standing(cell, setting, (), "a seed diverged at the rate chosen")
    return Standing(cell, setting, results)


def tune(race: Race, track: Track, cell: Cell) -> Setting:
    """The best setting by the samples that are for choosing.

    Where a host is killed, it is the setting of the same column without the kill.
    """
    if cell.column == KILL:
        cell = Cell(cell.problem, FAST, cell.method)
    start, bounds = start_of(cell)
    losses: dict[Setting, float] = {}
    while len(losses) < race.most_trials:
        setting = next_setting(losses, start, bounds, race.rate_factor)
        if setting is None:
            break
        losses[setting] = fmean(_trials(race, track, cell, setting))
    if all(map(math.isinf, losses.values())):
        raise LearnersFailed(f"{cell.method} diverged or failed at all of {[*losses]}")
    return best(losses)


def start_of(cell: Cell) -> tuple[Setting, tuple[float, float] | None]:
    """The start of the search, and the bounds of the option."""
    rate, options = PROBLEMS[cell.problem].rate, cell.entrant.options
    if options is None:
        return Setting(rate), None
    low, start, high = options
    return Setting(rate, start), (low, high)


def _trials(race: Race, track: Track, cell: Cell, setting: Setting) -> Iterator[float]:
    for number in range(race.choosing_seeds):
        result = track.result(run_of(race, cell, setting, -number, "choose"))
        yield loss_or_infinity(result.get("loss to choose by"))


def run_of(race: Race, cell: Cell, setting: Setting, seed: int, role: Role) -> Run:
    """The run of a cell; columns with equally many samples share a floor."""
    if cell.method == FLOOR:
        cell = _floor_of(cell)
    return Run(cell, race.seconds, setting.rate, setting.option, seed, role)


def _takes_part(name: str, column: str) -> bool:
    entrant = ENTRANTS[name]
    if entrant.needs_peers and peers_missing():
        return False
    if entrant.is_sharded != COLUMNS[column].is_sharded:
        return False
    return column != KILL or entrant.survives


def _floor_of(cell: Cell) -> Cell:
    if COLUMNS[cell.column].share_of_samples < 1:
        return cell
    return Cell(cell.problem, without_fault(cell.column), FLOOR)
