"""Which run is next: the best learning rate of each cell, then all seeds around it.

A cell (an algorithm at a batch) begins at one learning rate and one seed and goes on
until the best rate of those tried has both its neighbours of the grid tried and, like
those of its neighbours that are close behind, all seeds. The papers' own rule is
trained too: a rate in proportion to the batch, from the baseline's best. Nothing but
the outcomes decides what is next, so that a sweep which was interrupted goes on as if
it had not been.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from recipes.batch_size.outcomes import Outcome
from recipes.batch_size.settings import BASELINE, Cell, Run, Settings

Losses = dict[int, dict[int, float]]
"""Losses of one cell, by step of the grid and by seed."""

# A neighbour whose loss is larger than this times the best is not trained further.
_CLOSE = 1.03


class Best(NamedTuple):
    """A cell at its best learning rate.

    Attributes:
        step: step of the grid.
        losses: loss by seed; infinite where a run diverged.
        at_edge: whether the grid ends there, so that a better rate may lie beyond it.
    """

    step: int
    losses: Mapping[int, float]
    at_edge: bool

    @property
    def rate(self) -> float:
        """Peak learning rate."""
        return 2 ** (self.step / 2)

    @property
    def mean(self) -> float:
        """Loss, mean over the seeds; infinite if one of them diverged."""
        return _mean(self.losses)


def by_cell(outcomes: Iterable[Outcome]) -> dict[Cell, Losses]:
    """The losses of all runs."""
    cells: dict[Cell, Losses] = defaultdict(dict)
    for outcome in outcomes:
        losses = cells[outcome.run.cell].setdefault(outcome.step, {})
        losses[outcome.seed] = math.inf if outcome.diverged else outcome.loss
    return dict(cells)


def missing(cell: Cell, cells: Mapping[Cell, Losses], settings: Settings) -> list[Run]:
    """Runs that a cell needs next, given those of all cells so far; none: finished."""
    losses, grid = cells.get(cell, {}), settings.grid
    if not losses:
        return [Run(cell, first_step(cell, cells, settings), 0)]
    best = _best_step(losses)
    around = [step for step in (best, best + 1, best - 1) if step in grid]
    untried = [Run(cell, step, 0) for step in around if step not in losses]
    if untried:
        return untried[:1]
    close = [step for step in around if _is_close(losses[step], losses[best])]
    todo = [
        Run(cell, step, seed)
        for step in close
        for seed in range(settings.seeds)
        if seed not in losses[step]
    ]
    return todo or _by_the_rule(cell, cells, settings)


def rule_step(
    cell: Cell, cells: Mapping[Cell, Losses], settings: Settings
) -> int | None:
    """The rate that the papers' rule gives a cell: in proportion to the batch.

    It starts from the baseline's best rate; none where the grid does not reach it.
    """
    baseline = next(settings.cells())
    best = best_of(cells[baseline], settings).step
    step = best + round(2 * math.log2(cell.batch / baseline.batch))
    return step if step in settings.grid else None


def first_step(cell: Cell, cells: Mapping[Cell, Losses], settings: Settings) -> int:
    """Where a cell begins: at what was best for the batch before it, or for SSGD."""
    grid = settings.grid
    batches = settings.all_batches
    before = batches[max(0, batches.index(cell.batch) - 1)]
    for other in (
        Cell(cell.algorithm, before),
        Cell(BASELINE, cell.batch),
        Cell(BASELINE, before),
    ):
        if other in cells:
            return min(max(_best_step(cells[other]), grid[0]), grid[-1])
    return grid[len(grid) // 2]


def best_of(losses: Losses, settings: Settings) -> Best:
    """The rate with the least mean loss, of those that all seeds were trained at.

    A rate at which a seed diverged is worse than any at which none did.
    """
    complete = {k: v for k, v in losses.items() if len(v) >= settings.seeds}
    step = _best_step(complete or losses)
    return Best(step, losses[step], step in (settings.grid[0], settings.grid[-1]))


def at_rule(cells: Mapping[Cell, Losses], settings: Settings) -> dict[Cell, Best]:
    """Each cell at the rate that the papers' rule gives it, where it was trained."""
    steps = {cell: rule_step(cell, cells, settings) for cell in cells}
    return {
        cell: Best(step, cells[cell][step], at_edge=False)
        for cell, step in steps.items()
        if step is not None and len(cells[cell].get(step, {})) >= settings.seeds
    }


def _by_the_rule(
    cell: Cell, cells: Mapping[Cell, Losses], settings: Settings
) -> list[Run]:
    step = rule_step(cell, cells, settings)
    if step is None:
        return []
    done = cells[cell].get(step, {})
    return [Run(cell, step, n) for n in range(settings.seeds) if n not in done]


def _is_close(losses: Mapping[int, float], best: Mapping[int, float]) -> bool:
    return math.isfinite(_mean(losses)) and _mean(losses) <= _CLOSE * _mean(best)


def _best_step(losses: Losses) -> int:
    """The best step; the lowest of equal ones, as when all diverge."""
    return min(losses, key=lambda step: (_mean(losses[step]), step))


def _mean(losses: Mapping[int, float]) -> float:
    return sum(losses.values()) / len(losses)
