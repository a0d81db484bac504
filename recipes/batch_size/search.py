"""Which run is next: the best learning rate of each cell, then all seeds around it.

A cell (an algorithm at a batch) begins at one learning rate and one seed and goes on
until the best rate of those tried has both its neighbours of the grid tried and, like
those of its neighbours that did not diverge, all seeds. Nothing but the outcomes decides
what is next, so that a sweep which was interrupted goes on as if it had not been.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from recipes.batch_size.outcomes import Outcome
from recipes.batch_size.settings import BASELINE, Cell, Run, Settings

Losses = dict[int, dict[int, float]]
"""Of one cell: step of the grid, seed, loss."""


class Best(NamedTuple):
    """A cell at its best learning rate.

    Attributes:
        step: Of the grid.
        losses: By seed; infinite where a run diverged.
        at_edge: Whether the grid ends there, so that a better rate may lie beyond it.
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
    trained = [step for step in around if math.isfinite(_mean(losses[step]))]
    return [
        Run(cell, step, seed)
        for step in trained
        for seed in range(settings.seeds)
        if seed not in losses[step]
    ]


def first_step(
    cell: Cell, cells: Mapping[Cell, Losses], settings: Settings
) -> int:
    """Where a cell begins: at what was best for the batch before it, or for SSGD."""
    batches = (settings.baseline_batch, *settings.batches)
    before = batches[max(0, batches.index(cell.batch) - 1)]
    for other in (
        Cell(cell.algorithm, before),
        Cell(BASELINE, cell.batch),
        Cell(BASELINE, before),
    ):
        if other in cells:
            return _best_step(cells[other])
    return settings.grid[len(settings.grid) // 2]


def best_of(losses: Losses, settings: Settings) -> Best:
    """The rate with the least mean loss, of those that all seeds were trained at.

    A rate at which a seed diverged is worse than any at which none did.
    """
    complete = {k: v for k, v in losses.items() if len(v) >= settings.seeds}
    step = _best_step(complete or losses)
    return Best(step, losses[step], step in (settings.grid[0], settings.grid[-1]))


def _best_step(losses: Losses) -> int:
    """Of equal ones, as of those that all diverge, the lowest."""
    return min(losses, key=lambda step: (_mean(losses[step]), step))


def _mean(losses: Mapping[int, float]) -> float:
    return sum(losses.values()) / len(losses)
