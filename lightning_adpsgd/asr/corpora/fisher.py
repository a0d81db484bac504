"""Fisher transcripts (LDC2004T19, LDC2005T19): lines of `start end A: words`.

Rules as in Kaldi's `fisher_swbd`: an utterance that the transcriber did not
understand, marked `(( ))`, is not used; noises of the mouth are `[noise]`, laughter is
`[laughter]`. Acronyms stay as they are written, `i._b._m.`; punctuation and marks
outside dictionaries go. Callers are in `fe_03_p1_calldata.tbl`, a table with commas.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from lightning_adpsgd.asr.corpora.acronyms import WRITTEN
from lightning_adpsgd.asr.corpora.corpus import Caller, CorpusError, Skipped
from lightning_adpsgd.asr.corpora.turns import (
    COPY_AGAIN,
    LINE_LEFT_OUT,
    Turn,
    parse_talker,
    parse_times,
    read_lines,
)
from lightning_adpsgd.asr.corpora.utf8 import in_one_form

NOT_UNDERSTOOD = "not understood by the transcriber, marked (( ))"
_NOISES = {"[laugh]": "[laughter]", "[laughter]": "[laughter]"}
_LEFT_OUT = re.compile(r"<[^>]*>|\[\[[^\]]*\]\]|\[pause\]")
_PUNCTUATION = re.compile(r"[*?,;!\"]")
_LINE = re.compile(r"\s*(\S+)\s+(\S+)\s+(\S+:)\s*(.*)")
# One begin lacks a digit; keyed by call, begin and end as they are written.
_REPAIRS = {("fe_03_11487", "31.09", "234.06"): "231.09"}
# Columns of a calldata table: CALL_ID, DATE_TIME, TOPICID, SIG_GRADE, CNV_GRADE,
# APIN, ASX.DL, APHNUM, APHSET, APHTYP, BPIN, BSX.DL, ...
_CALL, _CALLERS = 0, (5, 10)


def normalise_fisher(text: str) -> tuple[str, ...] | None:
    """The words of a line; None for one that was not understood."""
    if "((" in text:
        return None
    plain = _PUNCTUATION.sub(" ", _LEFT_OUT.sub(" ", in_one_form(text)))
    words = (_normalise(token) for token in plain.split())
    return tuple(word for word in words if word)


def _normalise(token: str) -> str:
    if token.startswith("["):
        return _NOISES.get(token, "[noise]")
    if WRITTEN.fullmatch(token):
        return token
    word = token.replace(".", "").strip("()")
    return "" if not word.strip("-'") else word


def read_fisher(path: Path, skipped: Skipped) -> Iterator[Turn]:
    """The turns of a call; lines that cannot be used are counted.

    Raises:
        CorpusError: The file cannot be read, or its head names another call.
    """
    for number, line in read_lines(path, skipped):
        if line.startswith("#"):
            _check_head(path, number, line)
            continue
        try:
            turn = _turn(path, number, line, skipped)
        except CorpusError as error:
            skipped.add("malformed transcript line", str(error), remedy=LINE_LEFT_OUT)
            continue
        if turn is not None and turn.words:
            yield turn


def _check_head(path: Path, number: int, line: str) -> None:
    named = re.fullmatch(r"#\s*(fe_03_\d+)\.sph\s*", line.lower())
    if named and not path.name.lower().startswith(named[1]):
        problem = f"the head names another call, {named[1]}; {COPY_AGAIN}"
        raise CorpusError.at(path, number, problem)


def _turn(path: Path, number: int, line: str, skipped: Skipped) -> Turn | None:
    match = _LINE.fullmatch(line.rstrip())
    if match is None:
        problem = f"expected `start end A: words`, got {line.strip()[:60]!r}"
        raise CorpusError.at(path, number, problem)
    start = _REPAIRS.get((path.name[:11].lower(), match[1], match[2]), match[1])
    start_s, end_s = parse_times(path, number, start, match[2])
    channel, _ = parse_talker(path, number, match[3])
    words = normalise_fisher(match[4])
    if words is None:
        skipped.add(NOT_UNDERSTOOD, f"{path}:{number}", end_s - start_s)
        return None
    return Turn(number, channel, start_s, end_s, words)


def read_calldata(path: Path, skipped: Skipped) -> dict[tuple[str, int], Caller]:
    """The callers by recording and channel, from a calldata table.

    Lines of another form are counted; a side without a number has no caller.
    """
    callers: dict[tuple[str, int], Caller] = {}
    for number, line in read_lines(path, skipped):
        fields = [field.strip(' "\t') for field in line.split(",")]
        if fields[_CALL].upper() == "CALL_ID":
            continue
        if len(fields) <= _CALLERS[1] + 1 or not fields[_CALL].isdecimal():
            where = f"{path}:{number}: {line.strip()[:60]!r}"
            skipped.add("malformed line of callers", where, remedy=LINE_LEFT_OUT)
            continue
        for channel, column in enumerate(_CALLERS):
            if fields[column].isdecimal() and int(fields[column]):
                key = f"fe_03_{int(fields[_CALL]):05d}", channel
                callers[key] = Caller(f"fe{fields[column]}", fields[column + 1][:1])
    return callers
