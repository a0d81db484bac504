"""How notebooks show things: colours, axes, tables, and no chatter.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines
also differ in their dashes and markers.

A notebook imports this before it imports `recipes` or `benchmarks`: Jupyter finds what
lies beside a notebook, and an installation has the package alone.
"""

import csv
import logging
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from IPython.display import Markdown
from matplotlib import pyplot
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).parents[1]))

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
STYLES: list[dict[str, Any]] = [
    {"color": BLUE, "linestyle": "-", "marker": "o"},
    {"color": RED, "linestyle": "--", "marker": "s"},
    {"color": GREEN, "linestyle": "-.", "marker": "^"},
    {"color": PURPLE, "linestyle": ":", "marker": "D"},
    {"color": BLACK, "linestyle": "-", "marker": "v"},
    {"color": ORANGE, "linestyle": "--", "marker": "P"},
    {"color": SKY, "linestyle": "-.", "marker": "X"},
]
"""For lines that are to be told apart, in this order."""
DIVERGING, SEQUENTIAL = "PuOr", "cividis"
"""Colour maps: of values around a middle, and of values from nothing up."""


def begin(dots_per_inch: int = 80) -> None:
    """Called once, at the top: one thread, quiet libraries, equal pictures.

    One thread because learners that are forked from this process share its cores, and a
    pool of threads does not survive a fork.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pyplot.rcParams.update(
        {
            "figure.dpi": dots_per_inch,
            "figure.constrained_layout.use": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "legend.frameon": False,
            "lines.markersize": 4,
        }
    )


def heat_map(axes: Axes, values: Any, limit: float, title: str = "") -> Any:
    """Rows of numbers as colours, white at zero; returns the image for a colour bar."""
    image = axes.imshow(
        values,
        cmap=DIVERGING,
        vmin=-limit,
        vmax=limit,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_title(title)
    axes.grid(False)
    return image


def table(rows: Iterable[Mapping[str, Any]]) -> Markdown:
    """Rows with equal names as a table; floats with three significant digits."""
    listed = list(rows)
    names = list(listed[0])
    lines = [names, ["---"] * len(names)]
    lines += [[_cell(row[name]) for name in names] for row in listed]
    return Markdown("\n".join("| " + " | ".join(line) + " |" for line in lines))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def curve(folder: Path, x: str, y: str) -> tuple[list[float], list[float]]:
    """Two columns of the `metrics.csv` that a `CSVLogger` wrote, where both are."""
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get(x) and row.get(y)]
    return [float(row[x]) for row in rows], [float(row[y]) for row in rows]
