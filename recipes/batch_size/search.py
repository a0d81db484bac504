"""Which run is next: the best setting of each cell, then all seeds around it.

A cell (an algorithm at a batch) begins at one setting and one seed; a baseline, on
which all limits rest, at rates of the whole grid. It continues until all neighbours of
its best setting on the grid are tried. The best setting, and those of other rates that
are close behind, also get all seeds. Settings are chosen by held-out
samples other than those whose loss is reported. The papers' own rule is trained too: a
rate in proportion to the batch, from the baseline's best. Nothing but the outcomes
decides what is next, so that a sweep which was interrupted continues as if it had not
been.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from recipes.batch_size.outcomes import Outcome
from recipes.batch_size.settings import Cell, Run, Setting, Settings


class Score(NamedTuple):
    """What a run reached on both halves of the held-out samples.

    Attributes:
        choice: loss by which settings are chosen; infinite where the run diverged.
        loss: loss that is reported.
    """

    choice: float
    loss: float


Scores = dict[Setting, dict[int, Score]]
"""Those of one cell, by setting and by seed."""

# A neighbour whose loss is larger than this times the best is not trained further.
_CLOSE = 1.03


class Best(NamedTuple):
    """A cell at its best setting.

    Attributes:
        setting: point of the grid.
        losses: loss by seed; infinite where a run diverged.
        at_edge: whether the grid ends there, so that a better one may lie beyond it.
    """

    setting: Setting
    losses: Mapping[int, float]
    at_edge: bool

    @property
    def mean(self) -> float:
        """Loss, mean over the seeds; infinite if one of them diverged."""
        return sum(self.losses.values()) / len(self.losses)


def by_cell(outcomes: Iterable[Outcome]) -> dict[Cell, Scores]:
    """The scores of all runs."""
    cells: dict[Cell, Scores] = defaultdict(dict)
    for outcome in outcomes:
        run = outcome.run
        score = Score(outcome.choice, outcome.loss)
        if outcome.diverged:
            score = Score(math.inf, math.inf)
        cells[run.cell].setdefault(run.setting, {})[run.seed] = score
    return dict(cells)


def missing(cell: Cell, cells: Mapping[Cell, Scores], settings: Settings) -> list[Run]:
    """Runs that a cell needs next, given those of all cells so far; none: finished."""
    return _unseen(cell, cells, settings) or climb(cell, cells, settings)


def _unseen(cell: Cell, cells: Mapping[Cell, Scores], settings: Settings) -> list[Run]:
    """Every second rate of a baseline that is not tried yet.

    Losses may have a second valley at large rates, where a climb from the middle of the
    grid ends.
    """
    if cell != Cell(cell.control, settings.baseline_batch):
        return []
    clip, scores = _first_clip(cell, settings), cells.get(cell, {})
    coarse = [Setting(step, clip) for step in settings.grid if step % 2 == 0]
    return [Run(cell, setting, 0) for setting in coarse if setting not in scores]


def climb(cell: Cell, cells: Mapping[Cell, Scores], settings: Settings) -> list[Run]:
    """Runs that a cell needs next, wherever it began."""
    scores = cells.get(cell, {})
    if not scores:
        return [Run(cell, first_setting(cell, cells, settings), 0)]
    best = _best_setting(scores)
    for setting in (best, *neighbours(best, settings)):
        if setting not in scores:
            return [Run(cell, setting, 0)]
    other_rates = [best._replace(step=best.step + by) for by in (1, -1)]
    close = [s for s in other_rates if s in scores and _is_close(scores, s, best)]
    todo = [
        Run(cell, setting, seed)
        for setting in (best, *close)
        for seed in range(settings.seeds)
        if seed not in scores[setting] and math.isfinite(_mean(scores[setting]))
    ]
    return todo or _by_the_rule(cell, cells, settings)


def neighbours(setting: Setting, settings: Settings) -> list[Setting]:
    """Settings one step away.

    Where the norm of most gradients is clipped, rate and norm count by their product
    alone. So those on the diagonal, of the same product, are neighbours too.
    """
    step, clip = setting
    found = [Setting(step + 1, clip), Setting(step - 1, clip)]
    if clip is not None:
        found += [Setting(step + 2, clip - 1), Setting(step - 2, clip + 1)]
        found += [Setting(step, clip - 1), Setting(step, clip + 1)]
    return [s for s in found if s.step in settings.grid and _has_clip(s, settings)]


def rule_setting(
    cell: Cell, cells: Mapping[Cell, Scores], settings: Settings
) -> Setting | None:
    """What the papers' rule gives a cell: a rate in proportion to the batch.

    It starts from its baseline's best setting; none where the grid does not reach it.
    """
    baseline = Cell(cell.control, settings.baseline_batch)
    best = best_of(cells[baseline], settings).setting
    step = best.step + round(2 * math.log2(cell.batch / baseline.batch))
    return best._replace(step=step) if step in settings.grid else None


def first_setting(
    cell: Cell, cells: Mapping[Cell, Scores], settings: Settings
) -> Setting:
    """Where a cell begins: at what was best for the batch before it, or for SSGD."""
    grid, batches = settings.grid, settings.all_batches
    before = batches[max(0, batches.index(cell.batch) - 1)]
    for other in (
        Cell(cell.algorithm, before),
        Cell(cell.control, cell.batch),
        Cell(cell.control, before),
    ):
        if other in cells:
            best = _best_setting(cells[other])
            return best._replace(step=min(max(best.step, grid[0]), grid[-1]))
    return Setting(grid[len(grid) // 2], _first_clip(cell, settings))


def _first_clip(cell: Cell, settings: Settings) -> int | None:
    return settings.clips[len(settings.clips) // 2] if cell.is_clipped else None


def best_of(scores: Scores, settings: Settings) -> Best:
    """The setting of the least mean, of those that all seeds were trained at.

    A setting at which a seed diverged is worse than any at which none did.
    """
    complete = {k: v for k, v in scores.items() if len(v) >= settings.seeds}
    setting = _best_setting(complete or scores)
    losses = _losses(scores[setting], settings)
    at_edge = setting.step in _ends(settings.grid) or (
        setting.clip in _ends(settings.clips)
    )
    return Best(setting, losses, at_edge)


def at_rule(cells: Mapping[Cell, Scores], settings: Settings) -> dict[Cell, Best]:
    """Each cell at the rate that the papers' rule gives it, where it was trained."""
    found = {}
    for cell, scores in cells.items():
        setting = rule_setting(cell, cells, settings)
        of_seeds = scores.get(setting, {}) if setting else {}
        if setting and len(of_seeds) >= settings.seeds:
            losses = _losses(of_seeds, settings)
            found[cell] = Best(setting, losses, at_edge=False)
    return found


def _by_the_rule(
    cell: Cell, cells: Mapping[Cell, Scores], settings: Settings
) -> list[Run]:
    setting = rule_setting(cell, cells, settings)
    if setting is None:
        return []
    done = cells[cell].get(setting, {})
    return [Run(cell, setting, n) for n in range(settings.seeds) if n not in done]


def _losses(scores: Mapping[int, Score], settings: Settings) -> dict[int, float]:
    """Of the seeds that all cells have; some have more, of an earlier sweep."""
    return {n: score.loss for n, score in scores.items() if n < settings.seeds}


def _has_clip(setting: Setting, settings: Settings) -> bool:
    return setting.clip is None or setting.clip in settings.clips


def _ends(grid: range) -> tuple[int, int]:
    return grid[0], grid[-1]


def _is_close(scores: Scores, setting: Setting, best: Setting) -> bool:
    mean = _mean(scores[setting])
    return math.isfinite(mean) and mean <= _CLOSE * _mean(scores[best])


def _best_setting(scores: Scores) -> Setting:
    """The best; the lowest rate of equal ones, as when all diverge."""
    return min(scores, key=lambda setting: (_mean(scores[setting]), setting.step))


def _mean(scores: Mapping[int, Score]) -> float:
    return sum(score.choice for score in scores.values()) / len(scores)
