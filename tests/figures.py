"""Figures in documents, and the marks behind them that say where they come from.

A mark is a comment of Markdown. It speaks for the figures before it, back to the mark
before or to the beginning of the line:

    <!-- benchmarks/results/straggler.json: ratio where method=ddp, straggler=10 x -->
    <!-- recipes/batch_size/RESULTS.md -->
    <!-- not compared: notebook 00 -->

After a file of JSON stand selectors, divided by semicolons; the values that they select
must be, in their order and rounded as they are written, the figures. After another file
stands nothing: each figure must be a number of it, as it is written or rounded. What no
file holds is not compared, and the mark says where it comes from.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
MARK = re.compile(
    r"<!-- (?P<source>[^:>]+?\.(?:json|md)|not compared)(?:: (?P<rest>[^>]*?))? -->"
)
FIGURE = re.compile(r"(?<![\w.,/-])-?\d+(?:\.\d+(?= %)|\.\d+|(?= %))(?![\w]|\.\d)")
# Numbers of papers, and what is code or an address.
NO_FIGURES = re.compile(r"`[^`]*`|\]\([^)]*\)|\b\d{4}\.\d{5}\b")
SHORT = {
    "value": ("value", "median"),
    "low": ("value", "low"),
    "high": ("value", "high"),
}


class Marked(NamedTuple):
    """A stretch of a line.

    Attributes:
        line: Number of the line.
        figures: As they are written, "%" included.
        source: A file, or "not compared"; none: a mark is missing.
        selectors: Of a file of JSON.
    """

    line: int
    figures: list[str]
    source: str | None
    selectors: str


def marked(text: str, first_line: int = 1) -> Iterator[Marked]:
    """The stretches of a document that have figures or a mark."""
    for number, line in enumerate(text.splitlines(), first_line):
        begin = 0
        for mark in MARK.finditer(line):
            found = figures_in(line[begin : mark.start()])
            yield Marked(number, found, mark["source"], mark["rest"] or "")
            begin = mark.end()
        if rest := figures_in(line[begin:]):
            yield Marked(number, rest, None, "")


def figures_in(text: str) -> list[str]:
    """Numbers with a decimal point, and percentages."""
    plain = NO_FIGURES.sub(" ", text)
    return [
        found[0] + (" %" if plain[found.end() :].startswith(" %") else "")
        for found in FIGURE.finditer(plain)
    ]


def complaint(stretch: Marked, root: Path = ROOT) -> str | None:
    """What is wrong with a stretch; none if nothing is."""
    if stretch.source is None:
        return f"{stretch.figures} have no mark that says where they come from"
    if stretch.source == "not compared":
        return None if stretch.selectors else "the mark does not say why"
    path = root / stretch.source
    if not path.exists():
        return f"there is no {stretch.source}"
    if path.suffix == ".json":
        return _differs(stretch, json.loads(path.read_text()))
    known = figures_in(path.read_text())
    missing = [f for f in stretch.figures if not any(_rounds(f, k) for k in known)]
    return f"{missing} are not in {stretch.source}" if missing else None


def _rounds(figure: str, known: str) -> bool:
    """Whether a figure is another one with as many digits or fewer."""
    number, other = (text.removesuffix(" %") for text in (figure, known))
    digits, of_other = (len(text.partition(".")[2]) for text in (number, other))
    return digits <= of_other and is_rounded(number, float(other))


def _differs(stretch: Marked, content: dict[str, Any]) -> str | None:
    values = [
        value
        for selector in stretch.selectors.split(";")
        for value in selected(content, selector.strip())
    ]
    if len(values) != len(stretch.figures):
        return f"{stretch.figures} are not as many as {values}"
    wrong = [
        f"{figure} for {value:.5g}"
        for figure, value in zip(stretch.figures, values, strict=True)
        if not is_rounded(figure, value)
    ]
    return f"{stretch.source} has other figures: {', '.join(wrong)}" if wrong else None


def selected(content: dict[str, Any], selector: str) -> list[float]:
    """The values of `FIELD where KEY=VALUE, KEY!=VALUE`, in the order of the rows.

    A value may contain commas: a condition ends where a key of the rows follows.
    """
    field, _, conditions = selector.partition(" where ")
    if not conditions:
        return [_value(content, field)]
    rows = content["rows"]
    keys = "|".join({"table"}.union(*(map(re.escape, row["case"]) for row in rows)))
    wanted = re.split(rf",\s*(?=(?:{keys})!?=)", conditions)
    chosen = [row for row in rows if all(_holds(row, part) for part in wanted)]
    return [_value(row, field) for row in chosen]


def _holds(row: dict[str, Any], condition: str) -> bool:
    key, _, value = condition.partition("=")
    found = (
        row["table"] if key.rstrip("!") == "table" else row["case"].get(key.rstrip("!"))
    )
    return (str(found) == value) != key.endswith("!")


def _value(row: dict[str, Any], field: str) -> float:
    found: Any = row
    for key in SHORT.get(field, tuple(field.split("."))):
        found = found[key]
    return found


def is_rounded(figure: str, value: float) -> bool:
    """Whether a figure is a value, rounded to the digits that it has."""
    number = figure.removesuffix(" %")
    if number != figure:
        value *= 100
    digits = len(number.partition(".")[2])
    return abs(float(number) - value) <= 0.5001 * 10**-digits
