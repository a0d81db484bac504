"""The figures of a run, from the `metrics.csv` of Lightning's `CSVLogger`."""

from collections.abc import Iterator
from pathlib import Path

from lightning_adpsgd.report.reading import number_in, read_table

Series = list[tuple[float, float]]
"""Pairs of an optimizer step and the figure at that step, in ascending order."""

_GROUPS = ("convergence/", "curve/", "gossip/", "learners/", "run/", "wer/")
_OTHERS = ("val_loss", "wer")
_MOST_POINTS = 1000


def read_series(path: Path) -> dict[str, Series]:
    """The callbacks' figures, `val_loss` and `wer`, each as a series over steps.

    A long series is thinned to at most a thousand points, each the mean of neighbours.
    """
    found: dict[str, dict[float, float]] = {}
    for where, cells in read_table(path):
        step = number_in(where, "step", cells.get("step", "0"))
        # A program may log other figures, too, which are not read.
        for name, cell in cells.items():
            if name in _OTHERS or name.startswith(_GROUPS):
                values = found.setdefault(name, {})
                values[step] = number_in(where, name, cell)
    return {name: list(_thinned(sorted(one.items()))) for name, one in found.items()}


def _thinned(points: Series) -> Iterator[tuple[float, float]]:
    size = -(-len(points) // _MOST_POINTS)
    for at in range(0, len(points), size or 1):
        steps, values = zip(*points[at : at + size], strict=True)
        yield sum(steps) / len(steps), sum(values) / len(values)
