"""Hub5'00: the segments to be recognised (pem) and their references (stm).

Both are tables with a line per segment. A segment of the pem gets the words of every
reference segment of its channel whose middle lies inside it, the rule by which NIST's
tools assign words. Scoring by the rules of the GLM is not done here.
"""

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.turns import LINE_LEFT_OUT, parse_times, read_lines
from lightning_adpsgd.asr.corpora.utf8 import in_one_form

PARTS = {"swb": "sw_", "ch": "en_"}
_IGNORED = "ignore_time_segment_in_scoring"
_ALTERNATIVES = re.compile(r"\{([^{}/]*)/[^{}]*\}")
_OPTIONAL = re.compile(r"\([^()]*\)")
_ASIDE = re.compile(r"<[be]_aside>", re.IGNORECASE)


class EvalSegment(NamedTuple):
    """A line of a pem or stm file.

    Attributes:
        line: Its number in the file, from 1.
        recording: Stem of the SPHERE file, in lower case: `sw_4390`.
        channel: 0 for A, 1 for B.
        start_s: Begin in seconds.
        end_s: End in seconds.
        text: Reference as written; empty in a pem file.
    """

    line: int
    recording: str
    channel: int
    start_s: float
    end_s: float
    text: str = ""

    @property
    def middle_s(self) -> float:
        """The middle of the segment in seconds."""
        return (self.start_s + self.end_s) / 2

    @property
    def is_ignored(self) -> bool:
        """Whether the reference excludes this time from scoring."""
        return _IGNORED in self.text.lower()


def part_of(recording: str) -> str | None:
    """The part of the test set, `swb` or `ch`, or None for neither."""
    return next((p for p, begin in PARTS.items() if recording.startswith(begin)), None)


def read_pem(path: Path, skipped: Skipped) -> list[EvalSegment]:
    """Lines of `file channel speaker start end`; malformed ones are counted."""
    return _read(path, skipped, "malformed pem line")


def read_stm(path: Path, skipped: Skipped) -> list[EvalSegment]:
    """Lines of `file channel speaker start end <labels> words`, `;;` for comments."""
    return _read(path, skipped, "malformed stm line")


def _read(path: Path, skipped: Skipped, reason: str) -> list[EvalSegment]:
    segments = []
    for number, line in read_lines(path, skipped):
        if not line.lstrip().startswith((";;", "#")):
            try:
                segments.append(_parse(path, number, line))
            except CorpusError as error:
                skipped.add(reason, str(error), remedy=LINE_LEFT_OUT)
    return segments


def _parse(path: Path, number: int, line: str) -> EvalSegment:
    fields = line.split(maxsplit=5)
    if len(fields) < 5 or fields[1].upper() not in ("A", "B", "1", "2"):
        problem = f"expected `file A|B speaker start end`, got {line.strip()[:60]!r}"
        raise CorpusError.at(path, number, problem)
    start_s, end_s = parse_times(path, number, fields[3], fields[4])
    channel = 0 if fields[1].upper() in ("A", "1") else 1
    text = fields[5] if len(fields) > 5 else ""
    return EvalSegment(number, fields[0].lower(), channel, start_s, end_s, text)


def repaired(stm: str) -> str:
    """A reference as NIST's tools accept it, as in Kaldi's recipe for this test set.

    Doubled parentheses become single ones. Marks of asides are removed, but their words
    are kept.
    """
    single = stm.replace("((", "(").replace("))", ")")
    return _ASIDE.sub("", single)


def extended(segments: Iterable[EvalSegment], seconds: float) -> list[EvalSegment]:
    """Extends segments at both ends, without creating overlaps.

    Kaldi's recipe for this test set extends each by 0.1 s at both ends. If two segments
    of a channel are closer than twice that, they meet in the middle; if they overlap,
    those ends stay unchanged.
    """
    result = list(segments)
    sides: dict[tuple[str, int], list[int]] = {}
    for place, segment in enumerate(result):
        sides.setdefault((segment.recording, segment.channel), []).append(place)
    for places in sides.values():
        places.sort(key=lambda place: result[place].start_s)
        gaps = [
            result[after].start_s - result[before].end_s
            for before, after in pairwise(places)
        ]
        more = [min(seconds, gap / 2) if gap > 0 else 0.0 for gap in gaps]
        for place, before, after in zip(
            places, [seconds, *more], [*more, seconds], strict=True
        ):
            old = result[place]
            start_s = max(0.0, old.start_s - before)
            result[place] = old._replace(start_s=start_s, end_s=old.end_s + after)
    return result


def reference_words(text: str) -> tuple[str, ...]:
    """The words of a reference that must be recognised, in lower case and NFC.

    Labels `<O,sw,M>` and asides are removed. Of alternatives `{ a / b }`, only the
    first is kept. Words in parentheses, whose deletion is not an error, are left out.
    """
    text = _ASIDE.sub(" ", in_one_form(text))
    text = re.sub(r"^\s*<[^>]*>", " ", text)
    text = text.replace("((", "(").replace("))", ")")
    text = _OPTIONAL.sub(" ", _ALTERNATIVES.sub(r" \1 ", text))
    return tuple(word for word in text.split() if word != "@")


def assign(
    pem: Iterable[EvalSegment],
    stm: Iterable[EvalSegment],
    skipped: Skipped,
    stm_path: Path,
) -> list[tuple[EvalSegment, list[EvalSegment]]]:
    """Every pem segment with its reference segments, in order of time.

    References outside of all pem segments are counted in `skipped`.
    """
    found: dict[tuple[str, int], list[tuple[EvalSegment, list[EvalSegment]]]] = {}
    for segment in pem:
        found.setdefault((segment.recording, segment.channel), []).append((segment, []))
    for reference in sorted(stm, key=lambda r: r.start_s):
        places = found.get((reference.recording, reference.channel), [])
        for segment, references in places:
            if segment.start_s <= reference.middle_s <= segment.end_s:
                references.append(reference)
                break
        else:
            where = f"{stm_path}:{reference.line}"
            seconds = reference.end_s - reference.start_s
            skipped.add("reference outside every pem segment", where, seconds)
    return [pair for side in found.values() for pair in side]
