"""The rows, bounds and curves of a race."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from benchmarks.racing.columns import (
    COLUMNS,
    FAST,
    OWN_FAST,
    OWN_SLOW,
    OWN_STRAGGLER,
    SLOW,
    STRAGGLER,
)
from benchmarks.racing.entrants import DEFAULTS, ENTRANTS, FLOOR
from benchmarks.racing.runs import Cell
from benchmarks.racing.schedule import Standing
from benchmarks.results import Curve, Row, Target
from benchmarks.timing import mean_with_interval, print_row

ABOVE_FLOOR = {
    **dict.fromkeys((FAST, OWN_FAST), 1.005),
    **dict.fromkeys((SLOW, OWN_SLOW), 1.01),
    **dict.fromkeys((STRAGGLER, OWN_STRAGGLER), 1.02),
}
Means = Mapping[Cell, float]


def means_of(standings: Sequence[Standing]) -> Means:
    """The mean losses of the cells that could be run."""
    return {s.cell: fmean(r["loss"] for r in s.results) for s in standings if s.results}


def rows_of(standings: Sequence[Standing]) -> Iterator[Row]:
    """The row of each method in each column, least loss first."""
    means = means_of(standings)
    by_cell = {standing.cell: standing for standing in standings}
    columns = list(COLUMNS)
    for cell in sorted(
        means, key=lambda c: (c.problem, columns.index(c.column), means[c])
    ):
        yield _row(by_cell[cell], means)


def _row(standing: Standing, means: Means) -> Row:
    cell, results = standing.cell, standing.results
    column, setting = COLUMNS[cell.column].title, standing.setting
    assert setting is not None
    loss = mean_with_interval([result["loss"] for result in results])
    details = {
        "steps": fmean(fmean(result["steps"]) for result in results),
        "exchanges a step": fmean(result["exchanges a step"] for result in results),
        "MB sent a step": fmean(result["MB a step"] for result in results),
        "rate": setting.rate,
        "seeds": float(len(results)),
        "s": max(result["seconds"] for result in results),
    }
    if setting.option:
        details["period or share"] = setting.option
    floor = means.get(Cell(cell.problem, cell.column, FLOOR))
    ratio = means[cell] / floor if floor else None
    print_row(f"{cell.problem}, {cell.column}, {cell.method}", f"{loss:.4f}")
    case = {"model": cell.problem, "column": column, "method": cell.method}
    return Row(case, loss, "nats", ratio, table=cell.problem, details=details)


def targets_of(means: Means) -> Iterator[Target]:
    """The bounds that were set beforehand, for the package's defaults."""
    for cell, loss in means.items():
        where = f"{cell.problem}, {COLUMNS[cell.column].title}, {cell.method}"
        floor = means.get(Cell(cell.problem, cell.column, FLOOR))
        if cell.method not in DEFAULTS:
            continue
        if floor and (bound := ABOVE_FLOOR.get(cell.column)):
            yield Target(f"{where}: loss, of the floor's", bound, loss / floor, False)
        others = {
            other.method: found
            for other, found in means.items()
            if (other.problem, other.column) == (cell.problem, cell.column)
            and other.method != FLOOR
            and not ENTRANTS[other.method].is_ours
        }
        if others:
            name = min(others, key=lambda method: others[method])
            claim = f"{where}: loss of the best other method ({name}), of its own"
            yield Target(claim, 1.0, others[name] / loss)


def curves_of(standings: Sequence[Standing], seconds: float) -> Iterator[Curve]:
    """The curves of loss against time, each the mean over seeds of the mean model's."""
    for standing in standings:
        if standing.results:
            cell = standing.cell
            column = COLUMNS[cell.column]
            panel, end = f"{cell.problem}, {column.title}", seconds * column.slow_motion
            yield Curve(panel, cell.method, *_mean_curve(standing, end))


def _mean_curve(
    standing: Standing, seconds: float
) -> tuple[list[float], list[float | None]]:
    """The mean curve, with a gap where a seed was not finite."""
    times, losses = [], []
    for points in zip(*(result["curve"] for result in standing.results), strict=False):
        times.append(round(fmean(point[0] for point in points), 2))
        found = [point[1] for point in points]
        losses.append(None if None in found else round(fmean(found), 5))
    ends = [result["loss"] for result in standing.results]
    return [*times, seconds], [*losses, round(fmean(ends), 5)]
