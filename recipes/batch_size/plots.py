"""The figures: loss against batch, and learning curves at one batch.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines
also differ in their dashes and markers.
"""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from recipes.batch_size.outcomes import Outcome
from recipes.batch_size.search import Best
from recipes.batch_size.settings import BASELINE, CLIPPED, Cell, without_clip
from recipes.batch_size.sweep import Sweep

# By algorithm: colour, dashes, marker.
STYLES = {
    "ssgd": ("#000000", "-", "o"),
    "sdpsgd": ("#E69F00", "--", "s"),
    "adpsgd": ("#D55E00", "-.", "^"),
    "adpsgd_random": ("#0072B2", "-", "D"),
    "d1psgd": ("#009E73", ":", "v"),
    "hadpsgd": ("#CC79A7", "--", "P"),
    "sdpsgd_random": ("#882255", "-.", "X"),
    "sdpsgd_complete": ("#999999", "-", "s"),
    "sdpsgd_pairs": ("#56B4E9", "-", "<"),
    "adpsgd_pairs": ("#0072B2", "--", ">"),
    "rdpsgd": ("#785EF0", "-", "*"),
}


def style_of(algorithm: str) -> tuple[str, str, str]:
    """Clipped algorithms have their colour, and dots of their own."""
    colour, dash, marker = STYLES[without_clip(algorithm)]
    return (
        (colour, ":", marker) if algorithm.endswith(CLIPPED) else (colour, dash, marker)
    )


def loss_against_batch(sweep: Sweep, cells: Mapping[Cell, Best]) -> Figure:
    """Held-out loss at a learning rate of each cell, mean and range over the seeds.

    Args:
        sweep: sweep with all its runs.
        cells: cells, each at the learning rate that is shown.
    """
    figure, axes = _axes("global batch (samples)", "held-out loss (nats)")
    _draw_margins(axes, sweep)
    for algorithm in sweep.settings.algorithms:
        points = _finite(cells, algorithm)
        if points:
            _draw_spread(axes, algorithm, points)
    _name_diverged(axes, cells)
    axes.set_xscale("log", base=2)
    batches = sorted({cell.batch for cell in cells})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    # Below the axes, where neither lines nor names of what diverged are.
    figure.legend(frameon=False, loc="outside lower center", ncols=3)
    return figure


def curves(sweep: Sweep, batch: int) -> Figure:
    """Held-out loss against samples, each algorithm at its best rate for the batch."""
    figure, axes = _axes(f"samples of all learners (global batch {batch})", "")
    axes.set_ylabel("held-out loss (nats)")
    for algorithm in sweep.settings.algorithms:
        cell = Cell(algorithm, batch)
        if cell in sweep.bests:
            _draw_curve(axes, algorithm, sweep.at_best_setting(cell))
    axes.legend(frameon=False)
    return figure


def _draw_margins(axes: Axes, sweep: Sweep) -> None:
    baseline = Cell(BASELINE, sweep.settings.baseline_batch)
    loss = sweep.bests[baseline].mean
    for margin in (0.0, *sweep.settings.margins):
        axes.axhline(loss * (1 + margin), color="#888888", linewidth=0.8, alpha=0.7)
        text = f"+{margin:.0%}" if margin else "baseline"
        axes.annotate(
            text,
            (1.0, loss * (1 + margin)),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="#555555",
        )


def _finite(cells: Mapping[Cell, Best], algorithm: str) -> list[tuple[int, Best]]:
    return sorted(
        (cell.batch, best)
        for cell, best in cells.items()
        if cell.algorithm == algorithm and math.isfinite(best.mean)
    )


def _name_diverged(axes: Axes, cells: Mapping[Cell, Best]) -> None:
    """Above the batches at which an algorithm has no loss to show."""
    names: dict[int, list[str]] = {}
    for cell, best in cells.items():
        if not math.isfinite(best.mean):
            names.setdefault(cell.batch, []).append(cell.algorithm)
    for batch, diverged in names.items():
        axes.annotate(
            "\n".join(["diverged:", *diverged]),
            (batch, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 0),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=7,
        )


def _draw_spread(
    axes: Axes, algorithm: str, points: Sequence[tuple[int, Best]]
) -> None:
    colour, dash, marker = style_of(algorithm)
    means = [best.mean for _, best in points]
    below = [best.mean - min(best.losses.values()) for _, best in points]
    above = [max(best.losses.values()) - best.mean for _, best in points]
    axes.errorbar(
        [batch for batch, _ in points],
        means,
        yerr=(below, above),
        color=colour,
        linestyle=dash,
        marker=marker,
        markersize=4,
        capsize=2,
        label=algorithm,
    )


def _draw_curve(axes: Axes, algorithm: str, outcomes: Sequence[Outcome]) -> None:
    """The mean over the seeds, and their range as a band."""
    colour, dash, marker = style_of(algorithm)
    rows = list(zip(*(outcome.losses for outcome in outcomes), strict=False))
    samples = outcomes[0].samples[: len(rows)]
    means = [sum(row) / len(row) for row in rows]
    axes.plot(
        samples,
        means,
        color=colour,
        linestyle=dash,
        marker=marker,
        markersize=3,
        label=algorithm,
    )
    lows, highs = [min(row) for row in rows], [max(row) for row in rows]
    axes.fill_between(samples, lows, highs, color=colour, alpha=0.15, linewidth=0)


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes
