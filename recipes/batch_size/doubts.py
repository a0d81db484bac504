"""Signs that a baseline was trained at a bad rate, on which no limit should rest."""

from collections.abc import Iterator, Mapping

from recipes.batch_size.search import Best
from recipes.batch_size.settings import CLIPPED, Cell, Settings

# By which factor a baseline's loss may exceed another: seeds differ by about the first,
# and clipping may help by the second.
_LARGER_BATCH, _CLIPPED_TWIN = 1.01, 1.05


def doubts(bests: Mapping[Cell, Best], settings: Settings) -> list[str]:
    """A warning for each baseline whose loss is above those that it should be below.

    Args:
        bests: cells, each at its best setting.
        settings: settings of the sweep.
    """
    baselines = (Cell(name, settings.baseline_batch) for name in settings.controls)
    better = {c: list(_better(c, bests)) for c in baselines if c in bests}
    return [_warning(cell, bests, better[cell]) for cell in better if better[cell]]


def _better(baseline: Cell, bests: Mapping[Cell, Best]) -> Iterator[Cell]:
    """Larger batches of the same algorithm, and the same batch clipped."""
    algorithm, batch = baseline
    loss = bests[baseline].mean
    for cell, best in bests.items():
        is_larger = cell.algorithm == algorithm and cell.batch > batch
        if is_larger and loss > _LARGER_BATCH * best.mean:
            yield cell
        is_clipped_twin = cell == Cell(algorithm + CLIPPED, batch)
        if is_clipped_twin and loss > _CLIPPED_TWIN * best.mean:
            yield cell


def _warning(baseline: Cell, bests: Mapping[Cell, Best], better: list[Cell]) -> str:
    best = bests[baseline]
    others = ", ".join(
        f"{cell.algorithm} at batch {cell.batch} ({bests[cell].mean:.3f})"
        for cell in better
    )
    return (
        f"Warning: the baseline {baseline.algorithm} at batch {baseline.batch} has a "
        f"loss of {best.mean:.3f} at rate {best.setting.rate:.3g}, above that of "
        f"{others}. It was likely trained at a bad rate, and limits and ratios that "
        "rest on it mean little: extend the grids of rates (a lower `--min-rate`) and "
        "of clips."
    )
