"""Readers of JSON and CSV files, whose errors name the file and the line."""

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json(path: Path, kind: type = dict) -> Any:
    """The value in a JSON file; raises ValueError unless it is of this kind."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}"
        raise ValueError(
            f"{where}: the file is not complete JSON: {error.msg}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, byte {error.start}: not UTF-8") from error
    if not isinstance(value, kind):
        found = type(value).__name__
        raise ValueError(f"{path}: expected a JSON {kind.__name__}, got {found}")
    return value


def read_table(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """File and number of each line of a CSV file, and its cells that are not empty.

    Raises:
        ValueError: A line has more or fewer cells than there are headings.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = csv.reader(file)
        names = next(lines, [])
        for cells in lines:
            where = f"{path}, line {lines.line_num}"
            if len(cells) != len(names):
                raise ValueError(
                    f"{where}: {len(cells)} cells under {len(names)} headings; the "
                    "file is incomplete"
                )
            yield where, {n: cell for n, cell in zip(names, cells, strict=True) if cell}


def number_in(where: str, name: str, cell: str) -> float:
    """The number in a cell; if there is none, a ValueError names the line."""
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"{where}: `{name}` must be a number, got {cell!r}") from None


def plain(value: Any) -> Any:
    """A value for JSON: numbers have eight digits, and non-finite ones become None."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.8g}") if math.isfinite(value) else None
    return value
