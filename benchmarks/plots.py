"""Plots of a table's rows: a dot for the median, a line from quartile to quartile."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
# Okabe and Ito: told apart with any colour vision.
OURS, CONTROL, PEER = "#0072B2", "#000000", "#D55E00"
_MARKERS = {OURS: "o", CONTROL: "s", PEER: "D"}
_CONTROLS = re.compile(r"solo|ddp|limit|single.device|copy_|alone")
_OURS = re.compile(r"psgd|merge|snapshot|exchange|swap|work.sharing|engine")
_COLUMNS = 2


def write(rows: Rows, title: str, folder: Path) -> Path:
    """Writes an SVG of a table and returns its path.

    One panel for each combination of all but the last part of a row's case.
    """
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        *general, _ = (f"{key}: {value}" for key, value in row["case"].items())
        panels.setdefault(", ".join(general), []).append(row)
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    height = 0.9 + 0.26 * max(map(len, panels.values()))
    figure, axes = pyplot.subplots(
        lines,
        columns,
        figsize=(5.2 * columns, height * lines),
        squeeze=False,
        sharex=True,
    )
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (name, part) in zip(axes.flat, panels.items(), strict=False):
        _draw(panel, name, part)
    # Once all have drawn: it ends the scaling of the axis that they share.
    axes.flat[0].set_xlim(left=0)
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.svg"
    figure.tight_layout()
    # Without a date, so that equal figures give equal files.
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _draw(axes: Axes, name: str, rows: Rows) -> None:
    labels = [str([*row["case"].values()][-1]) for row in rows]
    for place, row in enumerate(rows):
        colour, value = (
            colour_of(str(row["case"].get("method", labels[place]))),
            row["value"],
        )
        axes.hlines(place, value["low"], value["high"], color=colour, linewidth=2)
        axes.plot(value["median"], place, _MARKERS[colour], color=colour)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(rows[0]["unit"], fontsize=8)
    axes.tick_params(axis="x", labelsize=8, labelbottom=True)
    axes.set_title(name, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def colour_of(label: str) -> str:
    """Ours, a control, or a peer, by the name of what was measured."""
    if _OURS.search(label):
        return OURS
    return CONTROL if _CONTROLS.search(label) else PEER
