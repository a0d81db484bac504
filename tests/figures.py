"""Figures in documents, and the marks behind them that say where they come from.

A mark is a comment of Markdown. It speaks for the figures before it, back to the mark
before or to the beginning of the line:

    <!-- benchmarks/results/straggler.json: ratio where method=ddp, straggler=10 x -->
    <!-- recipes/demo/RESULTS.md#recorded-speech: WER total where ddp -->
    <!-- docs/log.md#2026-11-24-half-a-byte-per-weight: "in place of 1.0430" -->
    <!-- not compared: notebook 00 -->

Selectors are divided by semicolons. After a file of JSON, the values that they select
must be, in their order and rounded as they are written, the figures.

After a page stands the anchor of a section. `COLUMN where ROW` selects one cell of a
table in it. A row is named by its first cell, or by its first few with commas between;
where a name has a semicolon, a comma stands for it. Of the cell, the first figure must
be cited, and those behind it may be: a mean needs no interval, but an interval has both
ends. `COLUMN[2]` begins at the second figure. Percentages in the name of a column may
be cited as well, and a cell without figures is named for them alone. What stands
between quotes must be words of the section outside of its tables, and all figures among
them must be cited.

What no file holds is not compared, and the mark says where it comes from.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.pages.tables import Table, plain, sections, tables, without_tables

ROOT = Path(__file__).parents[1]
# GitHub shows a comment that has two hyphens within.
MARK = re.compile(
    r"<!-- (?P<source>[^:>#]+?\.(?:json|md)|not compared)"
    r"(?:#(?P<section>\w+(?:-\w+)*))?(?:: (?P<rest>(?:(?!--)[^>])*?))? -->"
)
FIGURE = re.compile(r"(?<![\w.,/-])-?\d+(?:\.\d+(?= %)|\.\d+|(?= %))(?![\w]|\.\d)")
# Numbers of papers, and what is code or an address.
NO_FIGURES = re.compile(r"`[^`]*`|\]\([^)]*\)|\b\d{4}\.\d{5}\b")
# Of a page: words between quotes, or a cell, whose name may have quotes too.
SELECTOR = re.compile(r'\s*("[^"]*"|[^;]+)(?:;|$)')
CELL = re.compile(r"(?P<column>.+?)(?:\[(?P<first>\d+)\])? where (?P<row>.+)")
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
        selectors: What the figures are in the file.
        section: Anchor of the part of a page.
    """

    line: int
    figures: list[str]
    source: str | None
    selectors: str
    section: str = ""


def marked(text: str, first_line: int = 1) -> Iterator[Marked]:
    """The stretches of a document that have figures or a mark."""
    for number, line in enumerate(text.splitlines(), first_line):
        begin = 0
        for mark in MARK.finditer(line):
            found = figures_in(line[begin : mark.start()])
            rest, part = mark["rest"] or "", mark["section"] or ""
            yield Marked(number, found, mark["source"], rest, part)
            begin = mark.end()
        if rest := figures_in(line[begin:]):
            yield Marked(number, rest, None, "")


def figures_in(text: str) -> list[str]:
    """Numbers with a decimal point, and percentages."""
    bare = NO_FIGURES.sub(" ", text)
    return [
        found[0] + (" %" if bare[found.end() :].startswith(" %") else "")
        for found in FIGURE.finditer(bare)
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
    return _misplaced(stretch, path.read_text(encoding="utf-8"))


def _misplaced(stretch: Marked, page: str) -> str | None:
    """What is wrong with figures of a page."""
    place = f"{stretch.source}#{stretch.section}"
    selectors = [found.strip() for found in SELECTOR.findall(stretch.selectors)]
    if not stretch.section or not selectors:
        return f"the mark does not say where in {stretch.source}"
    if (text := sections(page).get(stretch.section)) is None:
        return f"there is no {place}"
    margins = {margin for selector in selectors for margin in _margins(selector)}
    figures = [figure for figure in stretch.figures if figure not in margins]
    found = _unlike(figures, text, selectors)
    return f"{place}: {found}" if found else None


def _unlike(figures: list[str], text: str, selectors: list[str]) -> str | None:
    """How figures differ from those that selectors name in a section."""
    for selector in selectors:
        is_quote = selector.startswith('"')
        known = (_quoted if is_quote else _cell)(text, selector)
        if known is None:
            return f"there is not exactly one {selector}"
        count = _agreeing(figures, known)
        if count < (len(known) if is_quote else min(1, len(known))):
            return f"{figures} are not {known} of {selector}"
        # One end of an interval is no citation: it is the next figure, by chance.
        figures = figures[1 if count == 2 < len(known) else count :]
    return f"{figures} are not among {'; '.join(selectors)}" if figures else None


def _margins(selector: str) -> list[str]:
    """The percentages in the name of a column."""
    named = CELL.fullmatch(selector)
    found = re.findall(r"([\d.]+) ?%", named["column"]) if named else []
    return [f"{number} %" for number in found]


def _quoted(text: str, selector: str) -> list[str] | None:
    """The figures of words that a section has outside of its tables."""
    words = plain(selector.strip('"'))
    if not re.search(r"[^\W\d_]{2}", words):
        return None  # a bare figure says nothing about what it is
    whole = rf"(?<![\w.]){re.escape(words)}(?!\w|\.\d)"
    found = re.search(whole, plain(without_tables(text)))
    return figures_in(words) if found else None


def _cell(text: str, selector: str) -> list[str] | None:
    """The figures of the one cell that a selector names."""
    if not (named := CELL.fullmatch(selector)):
        return None
    place = named["column"], named["row"]
    cells = [cell for table in tables(text) for cell in _cells(table, *place)]
    first = int(named["first"] or 1) - 1
    return figures_in(cells[0])[first:] if len(cells) == 1 else None


def _cells(table: Table, column: str, row: str) -> Iterator[str]:
    heads = [plain(head) for head in table.head]
    for cells in table.rows:
        if _is_named(cells, row):
            pairs = zip(heads, cells, strict=True)
            yield from (cell for head, cell in pairs if head == column)


def _is_named(cells: list[str], row: str) -> bool:
    names = [plain(cell).replace(";", ",") for cell in cells]
    return any(", ".join(names[:count]) == row for count in range(1, len(names)))


def _agreeing(figures: list[str], known: list[str]) -> int:
    """How many figures, from the first on, are those of a place."""
    pairs = zip(figures, known, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: _rounds(*pair), pairs))


def _rounds(figure: str, known: str) -> bool:
    """Whether a figure is another one with as many digits or fewer."""
    number, other = (text.removesuffix(" %") for text in (figure, known))
    digits, of_other = (len(text.partition(".")[2]) for text in (number, other))
    of_same_kind = number == figure or other != known
    return of_same_kind and digits <= of_other and is_rounded(number, float(other))


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
