"""The figures of a training run: the rows of `metrics.csv`, and their summary."""

import csv
from collections.abc import Iterable
from pathlib import Path

from lightning_adpsgd.files import written_whole

Row = dict[str, float]


def read_rows(path: Path, *, cut_off: bool = False) -> list[Row]:
    """The rows of a `metrics.csv`, each with the figures that it has.

    Args:
        path: the file.
        cut_off: whether lines are left out that a full disk or a power failure has cut
            off or filled with zeros.

    Raises:
        ValueError: A cell is not a number; the message has file and line.
    """
    lines = path.read_text().splitlines(keepends=True)
    if cut_off:
        lines = [one for one in lines if one.endswith("\n") and "\0" not in one]
    rows = csv.DictReader(lines)
    return [_row(path, number, cells) for number, cells in enumerate(rows, 2)]


def _row(path: Path, line: int, cells: dict[str, str | None]) -> Row:
    try:
        return {name: float(cell) for name, cell in cells.items() if cell}
    except ValueError as error:
        raise ValueError(f"{path}, line {line}: expected numbers: {error}") from error


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes a `metrics.csv`, whole or not at all."""
    listed = list(rows)
    names = sorted({name for row in listed for name in row})
    with written_whole(path, newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(listed)


def by_step(rows: Iterable[Row]) -> list[Row]:
    """One row per step, in the order of steps; later figures win."""
    merged: dict[float, Row] = {}
    for row in rows:
        merged.setdefault(row.get("step", 0.0), {}).update(row)
    return [merged[step] for step in sorted(merged)]


def series(rows: Iterable[Row], x: str, y: str) -> list[tuple[float, float]]:
    """The points (x, y) of the rows that have both."""
    return [(row[x], row[y]) for row in rows if x in row and y in row]


def last_figures(rows: Iterable[Row]) -> Row:
    """The last value of every figure."""
    figures: Row = {}
    for row in rows:
        figures.update(row)
    return figures


def staleness_histogram(figures: Row) -> dict[int, float]:
    """Steps of staleness and how often, from `gossip/staleness_{steps}`."""
    prefix = "gossip/staleness_"
    counts = {
        int(name.removeprefix(prefix)): count
        for name, count in figures.items()
        if name.removeprefix(prefix).isdigit()
    }
    return dict(sorted(counts.items()))


def summarize_run(rows: Iterable[Row]) -> dict[str, object]:
    """The contents of `summary.json`: the last figures of a run, by plain names.

    `frame_loss` (nats) and `frame_accuracy` are those of the consensus model on the
    held-out speakers; consensus distances are means over the validations; what a
    strategy does not have is None.
    """
    rows = list(rows)
    last = last_figures(rows)
    return {
        "frame_loss": last.get("val_loss"),
        "frame_accuracy": last.get("val_accuracy"),
        "global_samples": last.get("learners/global_samples"),
        "samples_per_second": last.get("learners/samples_per_second"),
        "exposed_fraction": last.get("learners/exposed_fraction"),
        "consensus_distance": _mean_of(rows, "gossip/consensus_distance"),
        "relative_consensus_distance": _mean_of(
            rows, "gossip/relative_consensus_distance"
        ),
        "exchanges_per_second": last.get("gossip/exchanges_per_second"),
        "staleness": staleness_histogram(last),
        "refused": last.get("gossip/refused"),
        "train_seconds": last.get("learners/train_seconds"),
        "wall_seconds": last.get("curve/wall_seconds"),
        "steps": last.get("step", -1) + 1,
    }


def _mean_of(rows: Iterable[Row], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None


def attempts(output: Path) -> list[Path]:
    """The folders of all attempts at the training in `output`, the first one first."""
    return sorted(
        (output / "logs").glob("attempt_*"), key=lambda p: int(p.name.split("_")[1])
    )


def gather_figures(output: Path) -> list[Row]:
    """One row per step, of all attempts at the training in `output`."""
    files = [attempt / "metrics.csv" for attempt in attempts(output)]
    return by_step(
        row for file in files if file.exists() for row in read_rows(file, cut_off=True)
    )
