"""Reads the folders of trainings: runs, scores, timelines of learners, and notes.

docs/report.md says which files are recognised by their names, anywhere below a folder.
Hidden folders are skipped, because they hold unfinished work.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from lightning_adpsgd.report.curves import read_series
from lightning_adpsgd.report.lanes import SUFFIX, read_lanes
from lightning_adpsgd.report.reading import read_json, read_table
from lightning_adpsgd.report.words import UTTERANCES, read_score, read_utterances

_METRICS, _ROW, _SCORE, _NOTES = "metrics.csv", ".run.csv", "score.json", ".page.json"
_SETTING = re.compile(r"^run/(\w+): (.*)$", re.MULTILINE)
_NOTED = {"title": str, "facts": dict, "notes": list, "tables": list, "hide": list}

_AXES = ("samples", "seconds", "bytes", "steps")

Listed = list[dict[str, Any]]


@dataclass
class Report:
    """The contents of a page, as JSON values.

    Attributes:
        runs: For each run its name, its settings and results, and series of figures.
        lanes: For each timeline the name of the run, and a lane per learner.
        scores: For each score the name of the run, and its word error rates.
        words: For each score the name of the run, and its utterances.
        notes: Contents of each `*.page.json`.
    """

    runs: Listed = field(default_factory=list)
    lanes: Listed = field(default_factory=list)
    scores: Listed = field(default_factory=list)
    words: Listed = field(default_factory=list)
    notes: Listed = field(default_factory=list)


def collect(folders: Sequence[Path]) -> Report:
    """Reads all recognised files below folders.

    Raises:
        ValueError: A folder is missing, is a file or holds no file of a run; or the
            contents of a file are not as expected, and the message names its line.
    """
    report = Report()
    for folder in folders:
        found = _collect(folder)
        if len(folders) > 1:
            prefix = folder.resolve().name
            for one in (*found.runs, *found.lanes, *found.scores, *found.words):
                one["name"] = f"{prefix}: {one['name']}"
            for chart in _charts(found.notes):
                chart["runs"] = [f"{prefix}: {name}" for name in chart["runs"]]
        for name, listed in vars(found).items():
            getattr(report, name).extend(listed)
    taken: dict[str, int] = {}  # equal names get numbers
    for run in report.runs:
        taken[run["name"]] = number = taken.get(run["name"], 0) + 1
        run["name"] += f" ({number})" if number > 1 else ""
    return report


def _collect(folder: Path) -> Report:
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder that it is in")
    if not folder.is_dir():
        raise ValueError(f"the folder {folder} does not exist")
    files = list(_files_below(folder))
    runs = {path: _run(folder, path) for path in _outermost(files)}
    rows = {path: _read_row(path) for path in files if path.name.endswith(_ROW)}
    report = Report(list(runs.values()))
    _add_rows(report, rows, runs)
    report.lanes = list(_lanes(files, runs))
    for path in files:
        _add_scores(report, path)
    report.notes = [_read_notes(path) for path in files if path.name.endswith(_NOTES)]
    if not any(vars(report).values()):
        raise ValueError(
            f"{folder} has no files of a run: no {_METRICS} of a CSVLogger, *{_ROW}, "
            f"*{SUFFIX}, {_SCORE} or *{_NOTES}"
        )
    return report


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent) / name for name in sorted(files))


# --- runs


def _outermost(files: Iterable[Path]) -> Iterator[Path]:
    """The outermost folders of figures; those below are of parts of the same run."""
    kept: list[Path] = []
    for path in files:  # the files of a folder precede those of its subfolders
        if path.name == _METRICS and not any(map(path.parent.is_relative_to, kept)):
            kept.append(path.parent)
            yield path.parent


def _run(folder: Path, path: Path) -> dict[str, Any]:
    rows = [_read_row(row) for row in path.glob("*" + _ROW)]
    beside = rows[0] if len(rows) == 1 else {}
    saved = path / "hparams.yaml"
    text = saved.read_text("utf-8", "replace") if saved.exists() else ""
    found = {name: value.strip("'\"") for name, value in _SETTING.findall(text)}
    settings = {**_typed(found), **beside}
    inside = path.relative_to(folder).as_posix()
    name = folder.resolve().name if inside == "." else inside
    name = settings.get("name", name)
    series = read_series(path / _METRICS)
    return {"name": name, "settings": settings, "series": series}


def _add_rows(
    report: Report, rows: dict[Path, dict[str, Any]], runs: dict[Path, dict[str, Any]]
) -> None:
    """Adds rows to runs of the same name, or as new runs.

    Of several, the one beside comes first, and then the last.
    """
    for path, row in rows.items():
        beside = [runs[path.parent]] if path.parent in runs else []
        candidates = (*beside, *reversed(runs.values()))
        same = (one for one in candidates if one["name"] == row["name"])
        if (run := next(same, None)) is not None:
            run["settings"].update(row)
        else:
            report.runs.append({"name": row["name"], "settings": row, "series": {}})


def _read_row(path: Path) -> dict[str, Any]:
    for _, cells in read_table(path):
        return _typed({"name": path.name.removesuffix(_ROW), **cells})
    raise ValueError(f"{path}, line 2: the row of the run is missing")


def _typed(cells: dict[str, str]) -> dict[str, Any]:
    # A name such as "001" stays as it is.
    return {k: cell if k == "name" else _value(cell) for k, cell in cells.items()}


def _value(cell: str) -> Any:
    try:
        return int(cell) if re.fullmatch(r"-?\d+", cell) else float(cell)
    except ValueError:
        return cell


# --- timelines, scores and notes


def _lanes(
    files: Iterable[Path], runs: dict[Path, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    timelines = (path for path in files if path.name.endswith(SUFFIX))
    for folder, paths in groupby(timelines, attrgetter("parent")):
        above = (runs[one]["name"] for one in (folder, *folder.parents) if one in runs)
        yield {"name": next(above, folder.parent.name), **read_lanes(paths)}


def _add_scores(report: Report, path: Path) -> None:
    if path.name != _SCORE or (score := read_score(path)) is None:
        return
    report.scores.append(score)
    if (words := path.with_name(UTTERANCES)).exists():
        found = {"name": score["name"], "utterances": read_utterances(words)}
        report.words.append(found)


def _read_notes(path: Path) -> dict[str, Any]:
    notes = read_json(path)
    for name, kind in _NOTED.items():
        if not isinstance(notes.get(name, kind()), kind):
            raise ValueError(f"{path}: `{name}` must be a JSON {kind.__name__}")
    for chart in _charts([notes]):
        if not isinstance(chart.get("runs"), list) or chart.get("against") not in _AXES:
            allowed = ", ".join(_AXES)
            raise ValueError(
                f"{path}: a `chart` must have a list of `runs`, and `against` one of "
                f"{allowed}; got {chart}"
            )
    return notes


def _charts(notes: Listed) -> list[Any]:
    tables = (one for note in notes for one in note.get("tables", []))
    return [one["chart"] for one in tables if one.get("chart")]
