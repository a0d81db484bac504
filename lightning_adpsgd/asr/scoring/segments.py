"""Segments of a reference (stm), words of a hypothesis (ctm), and their assignment.

A word goes to the first segment of its file and channel that ends after the word's
middle, whether the segment has begun or not. Words after the last segment go to the
last one. Words in a segment marked IGNORE_TIME_SEGMENT_IN_SCORING do not count.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from lightning_adpsgd.asr.scoring.errors import ScoringError
from lightning_adpsgd.asr.scoring.filters import is_comment, seconds_of
from lightning_adpsgd.asr.scoring.glm import Line, to_lower
from lightning_adpsgd.asr.scoring.words import (
    NOTHING,
    Choice,
    Word,
    WordOptions,
    make_word,
)

_IGNORED = ("ignore_time_segment_in_scoring", "ignoretimesegmentinscoring")
_BEGIN, _OR, _END = "<alt_begin>", "<alt>", "<alt_end>"

Side = tuple[str, str]
"""File and channel, in lower case."""


class Segment(NamedTuple):
    """A line of a reference.

    Attributes:
        line: Its number in the file, from 1.
        side: File and channel.
        speaker: Speaker, in lower case.
        start_s: Begin in seconds.
        end_s: End in seconds.
        labels: `<o,sw>`, or empty.
        text: Reference words, in lower case.
    """

    line: int
    side: Side
    speaker: str
    start_s: float
    end_s: float
    labels: str
    text: str

    @property
    def is_ignored(self) -> bool:
        """Whether this time is excluded from scoring."""
        return any(mark in self.text for mark in _IGNORED)


class Spoken(NamedTuple):
    """A word of a hypothesis, or a choice, with its middle in seconds."""

    side: Side
    item: Word | Choice
    middle_s: float


_Placed = TypeVar("_Placed", Segment, Spoken)


def read_lines(path: str | Path) -> list[Line]:
    """The lines of a text file with their numbers."""
    text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    return list(enumerate(text.split("\n"), start=1))


def parse_stm(lines: Iterable[Line], name: str) -> Iterator[Segment]:
    """The segments of a reference.

    Raises:
        ScoringError: A line has too few fields, or its time is not numeric.
    """
    for number, line in lines:
        if not is_comment(line):
            yield _parse_stm_line(number, to_lower(line), f"{name}:{number}")


def _parse_stm_line(number: int, line: str, where: str) -> Segment:
    fields = line.split(maxsplit=5)
    if len(fields) < 5:
        problem = "expected `file channel speaker begin end words`"
        raise ScoringError(f"{where}: {problem}, got {line.strip()[:60]!r}")
    text = fields[5] if len(fields) > 5 else ""
    labels = ""
    if text.startswith("<"):
        labels, _, text = text.partition(" ")
    start_s, end_s = (_single(seconds_of(field, where)) for field in fields[3:5])
    side = fields[0], fields[1]
    return Segment(number, side, fields[2], start_s, end_s, labels, text)


def _single(seconds: float) -> float:
    # sclite keeps the times of segments in single precision, those of words in double:
    # whether a word ends at 2.61 or after it depends on it.
    return struct.unpack("f", struct.pack("f", seconds))[0]


def parse_ctm(
    lines: Iterable[Line], options: WordOptions, name: str
) -> Iterator[Spoken]:
    """The words of a hypothesis; `<ALT_BEGIN> <ALT> <ALT_END>` enclose alternatives.

    Raises:
        ScoringError: A line cannot be used, or an alternation is not closed.
    """
    words = (_parse_ctm_line(line, options, name) for line in lines if _counts(line))
    for side, number, word in words:
        if options.alternatives and to_lower(word.text) == _BEGIN:
            yield _choice(side, words, f"{name}:{number}")
        else:
            yield Spoken(side, word, _middle(word))


def _counts(line: Line) -> bool:
    return not is_comment(line[1])


def _parse_ctm_line(
    numbered: Line, options: WordOptions, name: str
) -> tuple[Side, int, Word]:
    number, line = numbered
    fields = to_lower(line).split()
    where = f"{name}:{number}"
    if len(fields) < 5:
        problem = "expected `file channel begin duration word [confidence]`"
        raise ScoringError(f"{where}: {problem}, got {line.strip()[:60]!r}")
    start_s, duration_s = (seconds_of(field, where) for field in fields[2:4])
    word = make_word(fields[4], options, start_s, duration_s)
    return (fields[0], fields[1]), number, word


def _choice(side: Side, words: Iterator[tuple[Side, int, Word]], where: str) -> Spoken:
    alternatives: list[list[Word]] = [[]]
    for _, _, word in words:
        if word.text == _END:
            break
        if word.text == _OR:
            alternatives.append([])
        else:
            alternatives[-1].append(word)
    else:
        raise ScoringError(f"{where}: <ALT_BEGIN> without <ALT_END>")
    # a choice has the place of its last word
    middles = (_middle(word) for several in alternatives for word in several)
    filled = tuple(
        several or [Word(NOTHING, is_nothing=True)] for several in alternatives
    )
    return Spoken(side, Choice(filled), max(middles, default=0.0))


def _middle(word: Word) -> float:
    return word.start_s + word.duration_s / 2.0


def assign(
    segments: Sequence[Segment], spoken: Sequence[Spoken]
) -> Iterator[tuple[Segment, list[Word | Choice]]]:
    """Every segment that counts, with the words recognised in it.

    Args:
        segments: Segments of all files, sorted by file, channel and time.
        spoken: Sorted in the same way.

    Raises:
        ScoringError: Words belong to a file or channel without reference.
    """
    sides = _by_side(segments)
    heard = _by_side(spoken)
    for side in heard:
        if side not in sides:
            raise ScoringError(
                f"the hypothesis has words in file {side[0]!r}, channel {side[1]!r}, "
                "for which there is no reference"
            )
    for side, several in sides.items():
        yield from _assign_side(several, heard.get(side, []))


def _by_side(items: Iterable[_Placed]) -> dict[Side, list[_Placed]]:
    sides: dict[Side, list[_Placed]] = {}
    for item in items:
        sides.setdefault(item.side, []).append(item)
    return sides


def _assign_side(
    segments: Sequence[Segment], spoken: Sequence[Spoken]
) -> Iterator[tuple[Segment, list[Word | Choice]]]:
    at = 0
    for position, segment in enumerate(segments):
        begin = at
        is_last = position == len(segments) - 1
        while at < len(spoken) and (is_last or spoken[at].middle_s < segment.end_s):
            at += 1
        if not segment.is_ignored:
            yield segment, [word.item for word in spoken[begin:at]]
