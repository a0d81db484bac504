"""Plots of a table's rows: a dot for the median, a line from quartile to quartile."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    LogLocator,
    MaxNLocator,
    NullLocator,
    StrMethodFormatter,
)

# Otherwise an SVG has new random names each time, and equal figures differ.
matplotlib.rcParams["svg.hashsalt"] = "benchmarks"

Row = Mapping[str, Any]
Rows = Sequence[Row]
# Okabe and Ito: colours that any colour vision can distinguish.
OURS, CONTROL, PEER, PREDICTED = "#0072B2", "#000000", "#D55E00", "#CC79A7"
_MARKERS = {OURS: "o", CONTROL: "s", PEER: "D", PREDICTED: "x"}
_MEANINGS = {
    OURS: "this package",
    CONTROL: "control",
    PEER: "other method",
    PREDICTED: "predicted",
}
_PEERS = re.compile(r"Decent-DP|torchft|^torch |^(local SGD|DiLoCo|random share)")
_CONTROLS = re.compile(
    r"^(solo|ddp|single device|one learner|no averages|floor|one average)|limit|copy_"
    r"|one copy"
)
_DASHES = ("-", "--", "-.", ":")
_COLUMNS = 2
_WIDTH, _ROW_HEIGHT, _FRAME_HEIGHT, _LEGEND_HEIGHT = 5.2, 0.26, 0.9, 0.3  # inches


def write(rows: Rows, title: str, folder: Path) -> Path:
    """Writes an SVG of a table and returns its path."""
    return _save(draw(rows), title, folder)


def write_curves(curves: Rows, title: str, folder: Path) -> Path:
    """Writes an SVG of loss against time, all curves in one panel on log axes."""
    return _save(draw_curves(curves), title, folder)


def _save(figure: Figure, title: str, folder: Path) -> Path:
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.svg"
    # Without a date, so that equal figures give equal files.
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def draw_curves(curves: Rows) -> Figure:
    """Draws curves, each named at its end, in the order of the losses there."""
    figure = pyplot.figure(figsize=(7.2, 5.0), layout="constrained")
    axes = figure.add_subplot()
    dashes = {colour: itertools.cycle(_DASHES) for colour in _MEANINGS}
    for curve in curves:
        _draw_curve(axes, curve, next(dashes[colour_of(curve["label"])]))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("seconds", fontsize=8)
    axes.set_ylabel("held-out loss, nats", fontsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(10, (1, 1.5, 2, 3, 5, 7)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.set_title(curves[0]["panel"], fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    _name_at_ends(axes, curves)
    return figure


def _draw_curve(axes: Axes, curve: Row, dashes: str) -> None:
    losses = [math.nan if loss is None else loss for loss in curve["losses"]]
    colour = colour_of(curve["label"])
    width = 2.0 if colour == OURS else 1.2
    axes.plot(curve["seconds"], losses, dashes, color=colour, linewidth=width)


def _name_at_ends(axes: Axes, curves: Rows) -> None:
    """Names right of the axes, evenly spread, each led to the end of its curve."""
    ended = sorted(
        (curve for curve in curves if curve["losses"][-1] is not None),
        key=lambda curve: -curve["losses"][-1],
    )
    for place, curve in enumerate(ended):
        height = 1 - (place + 0.5) / len(ended)
        loss = curve["losses"][-1]
        axes.annotate(
            f"{loss:.3f}  {curve['label']}",
            xy=(curve["seconds"][-1], loss),
            xytext=(1.06, height),
            textcoords="axes fraction",
            color=colour_of(curve["label"]),
            fontsize=7,
            va="center",
            # To the left edge of the name, so that no line crosses another name.
            arrowprops={
                **{"arrowstyle": "-", "color": "0.7", "linewidth": 0.5},
                **{"relpos": (0.0, 0.5), "shrinkA": 1.0},
            },
        )


def draw(rows: Rows) -> Figure:
    """One panel for each combination of all but the last part of a row's case."""
    panels = _panels(rows)
    figure = _figure([len(part) for part in panels.values()])
    for axes, (name, part) in zip(figure.axes, panels.items(), strict=True):
        _draw_panel(axes, name, part)
    # All share the first one's axis, and a marker at either end is whole.
    end = max(map(_end_of, rows))
    begin = _begin_of(rows, end)
    figure.axes[0].set_xlim(begin, end + 0.04 * (end - begin))
    colours = {colour for row in rows for _, colour in _dots(row)}
    _explain(figure, [colour for colour in _MEANINGS if colour in colours])
    return figure


def colour_of(label: str) -> str:
    """The colour of ours, a control or a peer, by the name in the row."""
    if _PEERS.search(label):
        return PEER
    return CONTROL if _CONTROLS.search(label) else OURS


def _panels(rows: Rows) -> dict[str, list[Row]]:
    panels: dict[str, list[Row]] = {}
    for row in rows:
        *general, _ = (f"{k}: {_shown(value)}" for k, value in row["case"].items())
        panels.setdefault(", ".join(general), []).append(row)
    return panels


def _figure(lengths: Sequence[int]) -> Figure:
    """One panel for each number of rows, as high as the longest beside it."""
    columns = min(_COLUMNS, len(lengths))
    lines = [lengths[n : n + columns] for n in range(0, len(lengths), columns)]
    heights = [_FRAME_HEIGHT + _ROW_HEIGHT * max(line) for line in lines]
    size = (_WIDTH * columns, sum(heights) + _LEGEND_HEIGHT)
    figure = pyplot.figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(len(lines), columns, height_ratios=heights)
    first = None
    for place in range(len(lengths)):
        axes = figure.add_subplot(grid[divmod(place, columns)], sharex=first)
        first = first or axes
    return figure


def _draw_panel(axes: Axes, name: str, rows: Rows) -> None:
    for place, row in enumerate(rows):
        value, ((_, colour), *_) = row["value"], _dots(row)
        axes.hlines(place, value["low"], value["high"], color=colour, linewidth=2)
        for dot, colour in _dots(row):
            axes.plot(dot, place, _MARKERS[colour], color=colour)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(rows[0]["unit"], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.set_title(name, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _explain(figure: Figure, colours: Sequence[str]) -> None:
    """Adds a legend, unless all markers are of one kind."""
    if len(colours) > 1:
        kinds = [
            Line2D(
                [], [], color=c, marker=_MARKERS[c], linestyle="", label=_MEANINGS[c]
            )
            for c in colours
        ]
        figure.legend(
            handles=kinds,
            loc="outside lower center",
            ncols=len(kinds),
            fontsize=8,
            frameon=False,
        )


def _dots(row: Row) -> list[tuple[float, str]]:
    """The markers of a row and their colours, the measured one first."""
    measured = colour_of(str(row["case"].get("method", _label(row))))
    dots = [(row["value"]["median"], measured)]
    if (predicted := row["details"].get("predicted")) is not None:
        dots.append((predicted, PREDICTED))
    return dots


def _begin_of(rows: Rows, end: float) -> float:
    """The start of the axis: zero, except for losses, which differ by little."""
    if not rows[0]["unit"].startswith("nats"):
        return 0.0
    least = min(row["value"]["low"] for row in rows)
    return least - 0.04 * (end - least)


def _end_of(row: Row) -> float:
    return max(row["value"]["high"], *(dot for dot, _ in _dots(row)))


def _label(row: Row) -> str:
    return _shown([*row["case"].values()][-1])


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
