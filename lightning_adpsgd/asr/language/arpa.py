r"""Checks an ARPA n-gram file line by line.

kaldilm ends the whole process on a malformed file; this finds the line first.

    \data\            counts: `ngram 2=15`
    \1-grams:         a section per order: log10 probability, words, back-off weight
    \end\
"""

import codecs
import math
import re
from collections.abc import Iterator
from pathlib import Path

from lightning_adpsgd.asr.corpora.utf8 import utf8_lines

_COUNT = re.compile(r"ngram (\d+)\s*=\s*(\d+)")
SECTION = re.compile(r"\\(\d+)-grams:")
_ROUNDED = 1e-4  # by which a logarithm may be above 0


def check_arpa(path: str | Path, *, for_kaldilm: bool = True) -> dict[int, int]:
    """Checks the whole file.

    Args:
        path: ARPA file.
        for_kaldilm: Whether kaldilm will read it, which takes no byte order mark in
            front, no -inf, and no back-off weight of the longest n-grams.

    Returns:
        Number of n-grams of each order.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is malformed or missing; path and line are named.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"language model {path} does not exist")
    if for_kaldilm:
        _refuse_mark(path)
    lines = _lines(path)
    announced = _announced(path, lines)
    found = dict.fromkeys(announced, 0)
    order, longest = 1, max(announced)
    for number, line in lines:
        section = SECTION.fullmatch(line)
        if line == "\\end\\":
            _compare(path, number, announced, found)
            return found
        if section:
            order += 1
            if int(section[1]) != order or order > longest:
                wanted = f"\\{order}-grams:" if order <= longest else "\\end\\"
                raise ValueError(f"{path}:{number}: expected {wanted}, got {line!r}")
        else:
            _check_entry(path, number, line, order)
            if for_kaldilm:
                _check_for_kaldilm(path, number, line, order, longest)
            found[order] = found.get(order, 0) + 1
    raise ValueError(f"{path} is truncated: it has no line \\end\\")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in utf8_lines(path):
        if line.strip():
            yield number, line.strip()


def _refuse_mark(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            raise ValueError(
                f"{path}:1: expected no byte order mark in front of the first line; "
                f"remove it: sed -i '1s/^\\xEF\\xBB\\xBF//' {path}"
            )


def _announced(path: Path, lines: Iterator[tuple[int, str]]) -> dict[int, int]:
    """The counts of the header; consumes the lines up to the first section."""
    counts: dict[int, int] = {}
    in_header = False
    for number, line in lines:
        match = _COUNT.fullmatch(line)
        if line == "\\data\\":
            in_header = True
        elif in_header and match:
            counts[int(match[1])] = int(match[2])
        elif counts and line == "\\1-grams:":
            return counts
        elif in_header:
            raise ValueError(f"{path}:{number}: expected `ngram N=count`, got {line!r}")
    raise ValueError(
        f"{path} is not an ARPA n-gram file: it lacks \\data\\, counts or \\1-grams:"
    )


def _check_entry(path: Path, number: int, line: str, order: int) -> None:
    fields = line.split()
    if len(fields) not in (order + 1, order + 2):
        raise ValueError(
            f"{path}:{number}: expected a probability, {order} words and perhaps a "
            f"back-off weight, got {line!r}"
        )
    for text in (fields[0], *fields[order + 1 :]):
        if math.isnan(_number(text)):
            raise ValueError(f"{path}:{number}: {text!r} is not a number")
    if _number(fields[0]) > _ROUNDED:
        raise ValueError(
            f"{path}:{number}: expected a log10 probability, at most 0, got "
            f"{fields[0]!r}"
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _check_for_kaldilm(
    path: Path, number: int, line: str, order: int, longest: int
) -> None:
    fields = line.split()
    if order == longest and len(fields) > order + 1:
        raise ValueError(
            f"{path}:{number}: expected no back-off weight of the longest n-grams, "
            f"got {fields[-1]!r}"
        )
    for text in (fields[0], *fields[order + 1 :]):
        if math.isinf(_number(text)):
            raise ValueError(f"{path}:{number}: expected -99 for none, got {text!r}")


def _compare(
    path: Path, number: int, announced: dict[int, int], found: dict[int, int]
) -> None:
    for order, count in announced.items():
        if found[order] != count:
            raise ValueError(
                f"{path}:{number}: the header announces {count} {order}-grams, the "
                f"file has {found[order]}"
            )
