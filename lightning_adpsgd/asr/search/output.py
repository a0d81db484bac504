"""Recognised words for other programs: NIST's CTM, Praat's TextGrid, JSON.

In all of them a word has its times in the recording, in seconds, and its confidence.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from lightning_adpsgd.asr.search.words import TimedWord

Sides = Mapping[str, Sequence[TimedWord]]
"""The words of each side of a recording, by the names of the sides."""


def ctm_name(file: str) -> str:
    """The name of a file in a CTM, whose fields are parted by blanks."""
    return "_".join(file.split()) or "_"


def ctm_line(file: str, side: str, word: TimedWord) -> str:
    """`file side begin duration word confidence`."""
    times = f"{word.start_s:.2f} {word.duration_s:.2f}"
    return f"{ctm_name(file)} {side} {times} {word.word} {word.confidence:.3f}"


def json_line(name: str, words: Sequence[TimedWord]) -> str:
    """One object: `name`, and `words` with word, start_s, duration_s, confidence."""
    rounded = [
        {
            "word": word.word,
            "start_s": round(word.start_s, 3),
            "duration_s": round(word.duration_s, 3),
            "confidence": round(word.confidence, 4),
        }
        for word in words
    ]
    return json.dumps({"name": name, "words": rounded}, ensure_ascii=False)


def text_grid(sides: Sides, duration_s: float) -> str:
    """A TextGrid with a tier for each side, and for its words' confidences.

    Args:
        sides: The words, in any order.
        duration_s: Length of the recording, in seconds.
    """
    tiers = []
    for name, words in sides.items():
        ordered = sorted(words, key=lambda word: word.start_s)
        sure = [word._replace(word=f"{word.confidence:.3f}") for word in ordered]
        tiers += [(name, ordered), (f"{name} confidence", sure)]
    ends = [w.start_s + w.duration_s for _, words in tiers for w in words]
    end_s = max([duration_s, *ends])
    lines = [
        'File type = "ooTextFile"',
        'Object class = "TextGrid"',
        "",
        "xmin = 0",
        f"xmax = {end_s:.3f}",
        "tiers? <exists>",
        f"size = {len(tiers)}",
        "item []:",
    ]
    for number, (name, words) in enumerate(tiers, start=1):
        lines += _tier(number, name, list(_intervals(words, end_s)), end_s)
    return "\n".join([*lines, ""])


def _tier(
    number: int, name: str, intervals: list[tuple[float, float, str]], end_s: float
) -> Iterator[str]:
    yield f"    item [{number}]:"
    yield '        class = "IntervalTier"'
    yield f"        name = {_quoted(name)}"
    yield "        xmin = 0"
    yield f"        xmax = {end_s:.3f}"
    yield f"        intervals: size = {len(intervals)}"
    for place, (begin, end, text) in enumerate(intervals, start=1):
        yield f"        intervals [{place}]:"
        yield f"            xmin = {begin:.3f}"
        yield f"            xmax = {end:.3f}"
        yield f"            text = {_quoted(text)}"


def _intervals(
    words: Sequence[TimedWord], end_s: float
) -> Iterator[tuple[float, float, str]]:
    """Words and the gaps between them; words that overlap are cut."""
    at = 0.0
    for word in words:
        begin = max(at, word.start_s)
        end = max(begin, word.start_s + word.duration_s)
        if begin > at:
            yield at, begin, ""
        if end > begin:
            yield begin, end, word.word
        at = end
    if end_s > at:
        yield at, end_s, ""


def _quoted(text: str) -> str:
    doubled = text.replace('"', '""')
    return f'"{doubled}"'
