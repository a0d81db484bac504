"""The sweep: trains what is missing, one run after the other."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from recipes.batch_size.claim import claim
from recipes.batch_size.outcomes import Outcome, load, save, write_table
from recipes.batch_size.search import Best, at_rule, best_of, by_cell, climb, missing
from recipes.batch_size.settings import Cell, Run, Settings
from recipes.batch_size.training import train
from recipes.batch_size.workloads import Workload

# What the search was seen to need: rates of one seed, and three of all seeds.
_RATES_OF_ONE_SEED = 2


class Sweep(NamedTuple):
    """The state of a sweep.

    Attributes:
        settings: settings of all runs.
        outcomes: outcomes of all runs so far.
    """

    settings: Settings
    outcomes: Sequence[Outcome]

    @property
    def bests(self) -> dict[Cell, Best]:
        """Each cell that is finished, at its best setting.

        Baselines of earlier versions count: they tried fewer rates.
        """
        cells = by_cell(self.outcomes)
        return {
            cell: best_of(cells[cell], self.settings)
            for cell in self.settings.cells()
            if cell in cells and not climb(cell, cells, self.settings)
        }

    @property
    def at_rule(self) -> dict[Cell, Best]:
        """Each cell at the rate of the papers' rule, where the grid holds it."""
        return at_rule(by_cell(self.outcomes), self.settings)

    def at_best_setting(self, cell: Cell) -> list[Outcome]:
        """The runs of a cell at its best setting, all seeds."""
        at = cell, self.bests[cell].setting
        return [o for o in self.outcomes if (o.run.cell, o.run.setting) == at]


def run_sweep(workload: Workload, settings: Settings, out: Path) -> Sweep:
    """Trains every run that is missing and writes `results.csv`.

    Args:
        workload: workload, whose samples are cut to a multiple of the largest batch.
        settings: settings of all runs.
        out: folder of the runs; a run that is there is not trained again.

    Raises:
        ValueError: There are fewer samples than the largest batch.
        SettingsChanged: The folder holds runs of other settings, of another model or
            of other data.
    """
    cut, runs = workload.cut(settings.largest_batch), out / "runs"
    outcomes = load(runs)
    claim(out, workload, settings, outcomes)
    with tqdm(initial=len(outcomes), unit="run", smoothing=0.05) as bar:
        while todo := next_runs(outcomes, settings):
            bar.total = len(outcomes) + expected(outcomes, settings)
            for run in todo:
                bar.set_description(f"{run.cell.algorithm} {run.cell.batch}")
                outcomes.append(train(run, cut, settings))
                save(runs, outcomes[-1])
                bar.update()
    write_table(out / "results.csv", load(runs))
    return Sweep(settings, load(runs))


def next_runs(outcomes: Sequence[Outcome], settings: Settings) -> list[Run]:
    """The runs of the first cell that is not finished; none at the end."""
    cells = by_cell(outcomes)
    todo = (missing(cell, cells, settings) for cell in settings.cells())
    return next(filter(None, todo), [])


def expected(outcomes: Sequence[Outcome], settings: Settings) -> int:
    """About how many runs there are still to be."""
    cells = by_cell(outcomes)
    each = _RATES_OF_ONE_SEED + 3 * settings.seeds
    left = 0
    for cell in settings.cells():
        done = sum(map(len, cells.get(cell, {}).values()))
        left += max(1, each - done) if missing(cell, cells, settings) else 0
    return left
