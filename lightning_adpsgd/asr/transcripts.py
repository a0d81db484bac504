"""MS-State transcripts of Switchboard: lines of `id start end words`, normalised.

The marks of the transcribers become what a recogniser can say: silences and asides go,
a word that was laughed is the word, a word cut short keeps what was heard and a hyphen,
noises stay as words of their own. Upper and lower case are one.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpus import CorpusError, Skipped

NOISES = ("[noise]", "[vocalized-noise]", "[laughter]")
_DROPPED = {"[silence]", "<b_aside>", "<e_aside>"}
_NAME = re.compile(r"sw(\d+)([AB])-ms98-a-trans\.text")

# In this order: a laughed word may itself be cut short, and so on.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^\[laughter-(.+)\](-?)$", r"\1\2"),  # [laughter-yes] -> yes
        (r"^\[(.+)/[^/]+\](-?)$", r"\1\2"),  # [it'n/isn't] -> it'n
        (r"^-?\[[^\[\]]+\]-?(.+)$", r"-\1"),  # -[an]y -> -y
        (r"^(.+?)-?\[[^\[\]]+\]-?$", r"\1-"),  # ab[solute]- -> ab-
        (r"(\w)\[[^\[\]]+\](\w)", r"\1-\2"),  # ammu[n]it- -> ammu-it-
        (r"^([^\[\]]+)\[.+\]$", r"\1-"),  # ex[specially]-/especially] -> ex-
        (r"^\{(.+)\}$", r"\1"),  # {yuppiedom} -> yuppiedom, a coinage
        (r"_\d$", ""),  # them_1 -> them, a variant of pronunciation
    )
]


class Segment(NamedTuple):
    """One line of a transcript.

    Attributes:
        line: Its number in the file, from 1.
        start_s: Begin in seconds.
        end_s: End in seconds.
        words: Normalised; empty for a silence.
    """

    line: int
    start_s: float
    end_s: float
    words: tuple[str, ...]


def normalise_word(token: str) -> str | None:
    """The word that a token of a transcript or dictionary stands for; None for none."""
    word = token.lower()
    if word in _DROPPED:
        return None
    if word in NOISES:
        return word
    for pattern, replacement in _REWRITES:
        word = pattern.sub(replacement, word)
    return word or None


def normalise_words(text: str) -> tuple[str, ...]:
    """The words of a transcript line."""
    words = (normalise_word(token) for token in text.split())
    return tuple(word for word in words if word is not None)


def side_of(path: Path) -> tuple[str, int]:
    """Recording and channel of a transcript file: `sw2001A-...` is (`sw02001`, 0).

    Raises:
        CorpusError: The name is not that of a transcript.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CorpusError(
            f"{path}: expected a name like sw2001A-ms98-a-trans.text, got {path.name!r}"
        )
    return f"sw{int(match[1]):05d}", "AB".index(match[2])


def parse_line(path: Path, number: int, line: str) -> Segment:
    """One line `id start end words`.

    Raises:
        CorpusError: Too few fields, or times that are not 0 <= start < end.
    """
    fields = line.split(maxsplit=3)
    if len(fields) < 4:
        problem = f"expected `id start end words`, got {line.strip()[:60]!r}"
        raise CorpusError.at(path, number, problem)
    start_s, end_s = parse_times(path, number, fields[1], fields[2])
    return Segment(number, start_s, end_s, normalise_words(fields[3]))


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


def read_transcript(path: Path, skipped: Skipped) -> Iterator[Segment]:
    """The segments that hold words; malformed lines are counted in `skipped`.

    Raises:
        CorpusError: The file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            segment = parse_line(path, number, line)
        except CorpusError as error:
            skipped.add("malformed transcript line", str(error))
            continue
        if segment.words:
            yield segment


def read_speakers(path: Path) -> dict[tuple[str, int], str]:
    """Callers' numbers by conversation side, from `conv.tab`.

    A line is `conversation, topic, caller of A, caller of B, ...`, comma-separated and
    possibly quoted. Lines of another form are passed over: the side is the speaker.
    """
    speakers: dict[tuple[str, int], str] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        fields = [field.strip(' "\t') for field in line.split(",")]
        if len(fields) < 4 or not all(f.isdigit() for f in (fields[0], *fields[2:4])):
            continue
        for channel in (0, 1):
            speakers[f"sw{int(fields[0]):05d}", channel] = f"sw{fields[2 + channel]}"
    return speakers
