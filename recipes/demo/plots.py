"""The plots of the report: what training did, by samples and by time.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines
also differ in their dashes.
"""

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.demo.results import Result
from recipes.hybrid.training.metrics import (
    by_step,
    last_figures,
    series,
    staleness_histogram,
)

STYLES = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"))


def loss_against_samples(results: Sequence[Result]) -> Figure:
    """Training loss (thin) and held-out loss of the consensus model (marked)."""
    return _losses(results, "samples", "samples of all learners (chunks)")


def loss_against_time(results: Sequence[Result]) -> Figure:
    """The same against training time, validation not counted."""
    return _losses(results, "time", "training time (s)")


def consensus_distance(results: Sequence[Result]) -> Figure:
    """Distance of the super-learners from their mean, relative to its length."""
    figure, axes = _axes("samples of all learners (chunks)", "relative distance")
    for result, (colour, dash) in _styled(results):
        points = series(
            by_step(result.rows),
            "learners/global_samples",
            "gossip/relative_consensus_distance",
        )
        if points:
            _line(axes, points, result.name, colour, dash, marker="o")
    axes.set_ylim(bottom=0)
    return _with_legend(figure, axes)


def staleness(results: Sequence[Result]) -> Figure:
    """How many steps old the averages were when they were merged."""
    figure, axes = _axes("staleness (optimizer steps)", "share of merged exchanges")
    for result, (colour, _) in _styled(results):
        histogram = staleness_histogram(last_figures(result.rows))
        total = sum(histogram.values())
        if total:
            shares = [count / total for count in histogram.values()]
            axes.bar(list(histogram), shares, color=colour, label=result.name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _with_legend(figure, axes)


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _losses(results: Sequence[Result], against: str, label: str) -> Figure:
    names = {"samples": "global_samples", "time": "train_seconds"}
    figure, axes = _axes(label, "frame cross-entropy (nats)")
    for result, (colour, dash) in _styled(results):
        rows = by_step(result.rows)
        curve = series(rows, f"curve/{names[against]}", "curve/loss")
        axes.plot(*_columns(curve), color=colour, linewidth=0.8, alpha=0.35)
        points = series(rows, f"learners/{names[against]}", "val_loss")
        if points:
            _line(axes, points, f"{result.name}, held out", colour, dash, marker="o")
    return _with_legend(figure, axes)


def _styled(
    results: Sequence[Result],
) -> list[tuple[Result, tuple[str, str]]]:
    trained = [result for result in results if result.rows]
    return [(r, STYLES[i % len(STYLES)]) for i, r in enumerate(trained)]


def _line(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    label: str,
    colour: str,
    dash: str,
    marker: str,
) -> None:
    axes.plot(
        *_columns(points),
        color=colour,
        linestyle=dash,
        marker=marker,
        markersize=3,
        label=label,
    )


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    return figure


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes
