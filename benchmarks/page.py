"""The page of results: tables and plots from the files in `results/`."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.results import RESULTS
from lightning_adpsgd.files import written_whole

File = Mapping[str, Any]
_HEAD = """# Results of the benchmarks

Written by `make bench` from the files beside it; what each benchmark measures, and how,
is in [benchmarks/README.md](../README.md). Values are a median with quartiles in
brackets, unless a note says otherwise. A bound that was missed is listed as missed. In
the plots, blue circles are this package, black squares controls, orange diamonds other
methods, crosses what was predicted; a line runs from one quartile to the other.
"""


def write(folder: Path = RESULTS) -> Path:
    """Writes `README.md` and the plots into the folder of results; returns the page."""
    folder.mkdir(exist_ok=True)
    files = [json.loads(p.read_text("utf-8")) for p in sorted(folder.glob("*.json"))]
    page = folder / "README.md"
    with written_whole(page) as file:
        file.write(render(files, folder))
    return page


def render(files: Iterable[File], folder: Path) -> str:
    """The page's text; plots are written into the folder."""
    files = list(files)
    parts = [_HEAD, _all_targets(files)]
    parts += [_section(file, folder) for file in files]
    return "\n".join(part for part in parts if part)


def _all_targets(files: Sequence[File]) -> str:
    rows = [
        [
            file["benchmark"],
            target["claim"],
            _bound(target),
            f"{target['value']:.4g}",
            "met" if target["met"] else "**missed**",
        ]
        for file in files
        for target in file.get("targets", ())
    ]
    header = ["benchmark", "what", "bound set beforehand", "measured", ""]
    return "## Bounds\n\n" + table(header, rows) if rows else ""


def _bound(target: File) -> str:
    return f"{'≥' if target['at_least'] else '≤'} {target['bound']:.4g}"


def _section(file: File, folder: Path) -> str:
    name = file["benchmark"]
    parts = [f"## {name}\n", f"{file.get('question', '')}\n", _circumstances(file)]
    if "rows" in file:
        parts += _tables(file, folder)
        parts += _curves(file, folder)
    else:
        parts.append(_figures(file))
    parts += [f"- {note}" for note in file.get("notes", ())]
    parts += [f"- Skipped: {k}: {v}" for k, v in file.get("skipped", {}).items()]
    return "\n".join(parts) + "\n"


def _circumstances(file: File) -> str:
    machine = file["machine"]
    return (
        f"{file['date']}, commit {file['commit']}, {machine['cores']} cores of "
        f"{machine['cpu']}, {machine['gpu'] or 'no GPU'}, torch {machine['torch']}, "
        f"`{file['command']}`, {file['seconds']:.0f} s\n"
    )


def _tables(file: File, folder: Path) -> Iterable[str]:
    for title, group in groupby(file["rows"], key=lambda row: row["table"]):
        rows = list(group)
        if title:
            yield f"### {title}\n"
        yield _table_of(rows, file.get("limit", "")) + "\n"
        if len(rows) > 2:
            plot = plots.write(rows, f"{file['benchmark']} {title}".strip(), folder)
            yield f"![{title or file['benchmark']}]({plot.name})\n"


def _curves(file: File, folder: Path) -> Iterable[str]:
    curves = file.get("curves", ())
    for panel in dict.fromkeys(curve["panel"] for curve in curves):
        shown = [curve for curve in curves if curve["panel"] == panel]
        plot = plots.write_curves(shown, f"{file['benchmark']} {panel}", folder)
        yield f"![loss against time, {panel}]({plot.name})\n"


def _table_of(rows: Sequence[File], limit: str) -> str:
    has_ratio = any(row["ratio"] is not None for row in rows)
    details = list(dict.fromkeys(key for row in rows for key in row["details"]))
    header = [*rows[0]["case"], rows[0]["unit"]]
    header += [f"of {rows[0].get('ratio_to') or limit}"] * has_ratio + details
    return table(header, [_cells(row, has_ratio, details) for row in rows])


def _cells(row: File, has_ratio: bool, details: Iterable[str]) -> list[str]:
    cells = [str(value) for value in row["case"].values()]
    median, low, high = (number(row["value"][key]) for key in ("median", "low", "high"))
    cells.append(f"{median} [{low}, {high}]")
    if has_ratio:
        cells.append("" if row["ratio"] is None else f"{row['ratio']:.3f}")
    shown = row["details"]
    return cells + [number(shown[name]) if name in shown else "" for name in details]


def _figures(file: File) -> str:
    """The section of a benchmark that returned a plain dictionary of figures."""
    known = ("benchmark", "date", "commit", "machine", "command", "seconds", "question")
    apart = ("notes", "skipped", "series")
    own = {key: value for key, value in file.items() if key not in known + apart}
    return table(["figure", "value"], [[k, _plain(v)] for k, v in _flat(own)]) + "\n"


def _flat(figures: File, above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}, ")
        else:
            yield f"{above}{key}", value


def _plain(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(x, float) for x in value):
        median, *quartiles = map(number, value)
        return f"{median} [{', '.join(quartiles)}]" if quartiles else median
    return number(value) if isinstance(value, float) else str(value)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as Markdown writes it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: float) -> str:
    """Three significant digits, and no exponent where none is needed."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = f"{value:.3g}"
        return f"{value:.0f}" if "e" in digits else digits
    return f"{value:.2e}"
