"""The sections of a page, and the tables in them."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from tests.pages.blocks import without_code

_HEADING = re.compile(r"^#{1,6} (.+)$", re.M)
_TABLE = re.compile(r"^\|.*\n\|[ :|-]+\|\n(?:\|.*(?:\n|\Z))*", re.M)
# What a reader does not see: comments, the targets of links, marks of emphasis.
_UNSEEN = re.compile(r"<!--.*?-->|\]\([^)]*\)|[`*\[\]]")


class Table(NamedTuple):
    """A table, its cells as they are written.

    Attributes:
        head: titles of the columns.
        rows: cells of each row.
    """

    head: list[str]
    rows: list[list[str]]


@cache
def sections(text: str) -> Mapping[str, str]:
    """What stands below each heading, up to the next of any level, by its anchor."""
    headings = list(_HEADING.finditer(without_code(text)))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    found: dict[str, str] = {}
    for heading, end in zip(headings, ends, strict=True):
        found[_free(anchor(heading[1]), found)] = text[heading.end() : end]
    return found


def anchor(title: str) -> str:
    """By which a link names a heading."""
    return re.sub(r"[^\w -]", "", plain(title).lower()).replace(" ", "-")


def _free(name: str, taken: dict[str, str]) -> str:
    """The name, with a number if an earlier heading has it."""
    numbered = re.compile(rf"{re.escape(name)}(-\d+)?")
    number = sum(numbered.fullmatch(t) is not None for t in taken)
    return f"{name}-{number}" if name in taken else name


def tables(text: str) -> Iterator[Table]:
    """The tables of a text, from top to bottom."""
    for found in _TABLE.finditer(text):
        head, _, *rows = map(_cells, found[0].splitlines())
        yield Table(head, rows)


def without_tables(text: str) -> str:
    """What of a text stands outside of them."""
    return _TABLE.sub("\n", text)


def plain(text: str) -> str:
    """A cell or title without its marks and comments."""
    return re.sub(r"\s+", " ", _UNSEEN.sub("", text)).strip()


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
