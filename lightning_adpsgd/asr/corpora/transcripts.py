"""MS-State transcripts of Switchboard: lines of `id start end words`, normalised.

The transcribers' marks become words that a recogniser can output. Silences and asides
are removed, a laughed word becomes the word, and a truncated word keeps its spoken part
and a hyphen. Noises stay as words, and case is ignored.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_adpsgd.asr.corpora.acronyms import spell
from lightning_adpsgd.asr.corpora.corpus import Caller, CorpusError, Skipped
from lightning_adpsgd.asr.corpora.turns import (
    LINE_LEFT_OUT,
    Turn,
    parse_times,
    read_lines,
)
from lightning_adpsgd.asr.corpora.utf8 import in_one_form

NOISES = ("[noise]", "[vocalized-noise]", "[laughter]")
_DROPPED = {"[silence]", "<b_aside>", "<e_aside>"}
_NAME = re.compile(r"sw(\d+)([ab])-ms98-a-trans\.text(?:;\d+)?", re.IGNORECASE)
_LABEL = re.compile(r"sw(\d+)([ab])-", re.IGNORECASE)

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
        (r"_\d", ""),  # them_1 -> them, them_1's -> them's: variants of one word
    )
]


def normalise_word(token: str) -> str | None:
    """The word of a token in a transcript or dictionary; None if it has none."""
    word = in_one_form(token)
    if word in _DROPPED:
        return None
    if word in NOISES:
        return word
    for pattern, replacement in _REWRITES:
        word = pattern.sub(replacement, word)
    return word or None


def normalise_words(
    text: str, acronyms: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The words of a transcript line.

    Args:
        text: Text of the line after its times.
        acronyms: Words in capitals that are spelled out, with their written form,
            `IBM` with `i._b._m.`; see `acronyms.py`.
    """
    tokens = spell(text.split(), acronyms) if acronyms else text.split()
    words = (normalise_word(token) for token in tokens)
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
    return f"sw{int(match[1]):05d}", "AB".index(match[2].upper())


def parse_line(
    path: Path, number: int, line: str, acronyms: Mapping[str, str] | None = None
) -> Turn:
    """One line `id start end words`; a silence has no words.

    Raises:
        CorpusError: Too few fields, the label of another side, or times that are not
            0 <= start < end.
    """
    fields = line.split(maxsplit=3)
    if len(fields) < 4:
        problem = f"expected `id start end words`, got {line.strip()[:60]!r}"
        raise CorpusError.at(path, number, problem)
    start_s, end_s = parse_times(path, number, fields[1], fields[2])
    channel = _channel(path, number, fields[0])
    return Turn(number, channel, start_s, end_s, normalise_words(fields[3], acronyms))


def _channel(path: Path, number: int, label: str) -> int:
    """The side of the file, which must also be that of the line's label."""
    if _NAME.fullmatch(path.name) is None:
        return 0
    stem, channel = side_of(path)
    match = _LABEL.match(label)
    if match and (int(match[1]), match[2].upper()) != (int(stem[2:]), "AB"[channel]):
        problem = f"expected a line of {stem} {'AB'[channel]}, got one of {label!r}"
        raise CorpusError.at(path, number, problem)
    return channel


def read_transcript(
    path: Path, skipped: Skipped, acronyms: Mapping[str, str] | None = None
) -> Iterator[Turn]:
    """The turns of one side; malformed lines are counted in `skipped`.

    Raises:
        CorpusError: The file cannot be read.
    """
    for number, line in read_lines(path, skipped):
        try:
            turn = parse_line(path, number, line, acronyms)
        except CorpusError as error:
            skipped.add("malformed transcript line", str(error), remedy=LINE_LEFT_OUT)
            continue
        if turn.words:
            yield turn


def read_speakers(path: Path, skipped: Skipped) -> dict[tuple[str, int], Caller]:
    """Callers by conversation side, from `conv.tab`.

    A line is `conversation, topic, caller of A, caller of B, ...`, comma-separated and
    possibly quoted. Lines of another form are counted: the side is the speaker.
    """
    callers: dict[tuple[str, int], Caller] = {}
    for number, line in read_lines(path, skipped):
        fields = [field.strip(' "\t') for field in line.split(",")]
        if len(fields) < 4 or not all(f.isdecimal() for f in (fields[0], *fields[2:4])):
            if number > 1:  # the first may be the names of the columns
                where = f"{path}:{number}: {line.strip()[:60]!r}"
                skipped.add("malformed line of callers", where, remedy=LINE_LEFT_OUT)
            continue
        for channel in (0, 1):
            key = f"sw{int(fields[0]):05d}", channel
            callers[key] = Caller(f"sw{fields[2 + channel]}")
    return callers
