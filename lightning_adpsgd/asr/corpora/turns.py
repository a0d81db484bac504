"""Transcripts as text files: numbered lines, and the turns that are read from them.

A text file from a disc may be in UTF-8 or Latin-1, with the line ends of any system.
A file that cannot be text is refused; one without text is counted.
"""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped

SIDES = "AB"
COPY_AGAIN = "compare it with the disc and copy it again"
LINE_LEFT_OUT = "the line is left out and the rest of the file used; " + COPY_AGAIN
_LINE_END = re.compile(r"\r\n|\n|\r")


class Turn(NamedTuple):
    """The words that one talker says in one turn.

    Attributes:
        line: Number of its line in the transcript, from 1.
        channel: 0 for side A, 1 for side B.
        start_s: Begin in seconds.
        end_s: End in seconds.
        words: Normalised; at least one.
        talker: Name in the transcript, "A1" for a second one on side A; empty where
            each side has one.
    """

    line: int
    channel: int
    start_s: float
    end_s: float
    words: tuple[str, ...]
    talker: str = ""


def read_lines(
    path: Path, skipped: Skipped, may_be_latin: bool = False
) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1.

    Bytes that are not UTF-8 make the whole file Latin-1, which is counted unless it
    may be.

    Raises:
        CorpusError: The file cannot be opened, or is not text.
    """
    lines = all_lines(path, skipped, may_be_latin)
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        skipped.add("file without text", f"{path}:1", remedy=COPY_AGAIN)
    return numbered


def all_lines(path: Path, skipped: Skipped, may_be_latin: bool = False) -> list[str]:
    """The lines with the blank ones; see `read_lines`.

    Raises:
        CorpusError: The file cannot be read, or is not text.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise CorpusError(f"{path}: {problem}; see its permissions") from error
    return _LINE_END.split(_decoded(path, content, may_be_latin, skipped))


def _decoded(path: Path, content: bytes, may_be_latin: bool, skipped: Skipped) -> str:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16", errors="replace")
    if b"\0" in content:
        line = content[: content.index(b"\0")].count(b"\n") + 1
        problem = f"expected text, found a zero byte; {COPY_AGAIN}"
        raise CorpusError.at(path, line, problem)
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        remedy = "read as Latin-1; nothing to do unless words look wrong"
        if not may_be_latin:
            skipped.add("text that is not UTF-8", f"{path}:{line}", remedy=remedy)
        return content.decode("latin-1")


def parse_times(path: Path, number: int, start: str, end: str) -> tuple[float, float]:
    """Begin and end in seconds.

    Raises:
        CorpusError: They are not numbers with 0 <= start < end.
    """
    try:
        start_s, end_s = float(start), float(end)
    except ValueError:
        start_s, end_s = math.nan, math.nan
    if not 0 <= start_s < end_s < math.inf:
        problem = f"expected times 0 <= start < end in seconds, got {start!r} {end!r}"
        raise CorpusError.at(path, number, problem)
    return start_s, end_s


def parse_talker(path: Path, number: int, label: str) -> tuple[int, str]:
    """Channel and name of a talker: `A:` is (0, "A"), `B1:` is (1, "B1").

    Raises:
        CorpusError: The label is of another form.
    """
    match = re.fullmatch(r"([AB])(\d*):", label)
    if match is None:
        problem = f"expected a talker, `A:` or `B:`, got {label[:20]!r}"
        raise CorpusError.at(path, number, problem)
    return SIDES.index(match[1]), match[1] + match[2]


def overlapping(turns: Iterable[Turn], tolerance_s: float) -> Iterator[Turn]:
    """The turns that begin before the same talker has ended another one.

    Args:
        turns: Turns of one conversation, in any order.
        tolerance_s: Overlaps up to this are passed over, in seconds.
    """
    ends: dict[tuple[int, str], float] = {}
    for turn in sorted(turns, key=lambda turn: turn.start_s):
        who = turn.channel, turn.talker
        if turn.start_s < ends.get(who, 0.0) - tolerance_s:
            yield turn
        ends[who] = max(turn.end_s, ends.get(who, 0.0))
