"""CallHome American English transcripts (LDC97T14), without transcribers' marks.

Lines are `start end A: words`; a line without times continues the previous one. Several
people may share a telephone: `A1` is a second talker on side A. The LDC's `CH_ENG.TXT`
defines the marks:

    {laugh}          sound of the talker       [distortion] [/x]  other sound, its end
    [[drawn out]]    comment                   ((maybe))          not understood
    <French oui>     another language          //come in//        aside
    +mispronounced+  **coinage**  #at once#    %um &Joe           hesitation, name
    text- -text      word broken off           text --            turn that goes on

Laughter becomes `[laughter]`, other sounds `[noise]`; asides are ordinary words. A turn
that contains words not understood or in another language is not used.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.fisher import NOT_UNDERSTOOD
from lightning_adpsgd.asr.corpora.turns import (
    LINE_LEFT_OUT,
    Turn,
    parse_talker,
    parse_times,
    read_lines,
)
from lightning_adpsgd.asr.corpora.utf8 import in_one_form

FOREIGN = "in another language, marked < >"
# Removed marks come first, so that their contents are not mistaken for other marks.
_GONE = re.compile(
    r'<contraction\s[^"]*"[^"]*"\s*>|\[\[.*?\]\]|\[/[^\]]*\]', re.IGNORECASE
)
_LAUGHTER = re.compile(r"\{[^}]*laugh[^}]*\}", re.IGNORECASE)
_SOUND = re.compile(r"\{[^}]*\}|\[[^\]]*\]")
_MARKS = re.compile(r"//|\*\*|--|[+#%&?!,;\"]")
_LETTERS = re.compile(r"(?:[a-z][._]+)+[a-z]\.?|[a-z]\.")
_LINE = re.compile(r"\s*(\S+)\s+(\S+)\s+([A-Za-z]\d*:)\s*(.*)")
_COMMENT = re.compile(r"\s*#")
_WITHIN = re.compile(r"\s*#[^#:]+#")  # said at once with another: no comment
_TIMES = re.compile(r"\s*-?\d+(\.\d*)?\s+-?\d+(\.\d*)?\s")


def normalise_callhome(text: str) -> tuple[str, ...]:
    """The words of a turn that was understood completely."""
    # A sign that no mark contains stands for sounds while the marks are removed.
    plain = _SOUND.sub(" \1 ", _LAUGHTER.sub(" \2 ", _GONE.sub(" ", text)))
    tokens = in_one_form(_MARKS.sub(" ", plain)).split()
    words = (_normalise(token) for token in tokens)
    return tuple(word for word in words if word)


def _normalise(token: str) -> str:
    if token in "\1\2":
        return "[noise]" if token == "\1" else "[laughter]"
    if _LETTERS.fullmatch(token):
        return "._".join(re.findall("[a-z]", token)) + "."
    word = token.replace(".", "")
    return "" if not word.strip("-'_") else word


def read_callhome(path: Path, skipped: Skipped) -> Iterator[Turn]:
    """The turns of a call; counts the unusable ones.

    Raises:
        CorpusError: The file cannot be read.
    """
    for number, line in _whole_turns(path, skipped):
        try:
            turn = _turn(path, number, line, skipped)
        except CorpusError as error:
            skipped.add("malformed transcript line", str(error), remedy=LINE_LEFT_OUT)
            continue
        if turn is not None and turn.words:
            yield turn


def _whole_turns(path: Path, skipped: Skipped) -> Iterator[tuple[int, str]]:
    """Joins lines with their continuations."""
    begun: tuple[int, str] | None = None
    for number, line in read_lines(path, skipped, may_be_latin=True):
        if _COMMENT.match(line) and (begun is None or not _WITHIN.match(line)):
            continue
        if begun is None or _TIMES.match(line) or _LINE.fullmatch(line):
            if begun is not None:
                yield begun
            begun = number, line
        else:
            begun = begun[0], f"{begun[1]} {line.strip()}"
    if begun is not None:
        yield begun


def _turn(path: Path, number: int, line: str, skipped: Skipped) -> Turn | None:
    match = _LINE.fullmatch(line.rstrip())
    if match is None:
        problem = f"expected `start end A: words`, got {line.strip()[:60]!r}"
        raise CorpusError.at(path, number, problem)
    start_s, end_s = parse_times(path, number, match[1], match[2])
    channel, talker = parse_talker(path, number, match[3])
    text = _GONE.sub(" ", match[4])
    for reason, mark in ((NOT_UNDERSTOOD, "(("), (FOREIGN, "<")):
        if mark in text:
            skipped.add(reason, f"{path}:{number}", end_s - start_s)
            return None
    return Turn(number, channel, start_s, end_s, normalise_callhome(text), talker)
