"""Scores a recognised test set like NIST's `hubscr.pl -h hub5`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from lightning_adpsgd.asr.scoring.aligner import Pair, align, count
from lightning_adpsgd.asr.scoring.errors import Errors, total_of
from lightning_adpsgd.asr.scoring.filters import filter_ctm, filter_stm, sort_lines
from lightning_adpsgd.asr.scoring.glm import Glm, Line
from lightning_adpsgd.asr.scoring.segments import (
    Segment,
    assign,
    parse_ctm,
    parse_stm,
    read_lines,
)
from lightning_adpsgd.asr.scoring.words import (
    ALL_MARKS,
    Choice,
    Word,
    WordOptions,
    network_of,
    parse_text,
)

Key = TypeVar("Key")


class ScoredSegment(NamedTuple):
    """A segment of the reference, aligned with its hypothesis."""

    segment: Segment
    pairs: tuple[Pair, ...]

    @property
    def errors(self) -> Errors:
        """The errors of the segment."""
        return count(self.pairs)


class Scores(NamedTuple):
    """The segments of a test set, in the order of the sorted reference."""

    segments: tuple[ScoredSegment, ...]

    @property
    def total(self) -> Errors:
        """The errors of all segments."""
        return total_of(scored.errors for scored in self.segments)

    @property
    def by_speaker(self) -> dict[str, Errors]:
        """The errors of each speaker, in the order in which they appear."""
        return self.by(lambda segment: segment.speaker)

    @property
    def by_speaker_of_file(self) -> dict[tuple[str, str], Errors]:
        """The errors of each speaker and file."""
        return self.by(lambda segment: (segment.speaker, segment.side[0]))

    def by(self, key: Callable[[Segment], Key]) -> dict[Key, Errors]:
        """The errors of the segments with one key, for each."""
        sums: dict[Key, Errors] = {}
        for scored in self.segments:
            name = key(scored.segment)
            sums[name] = sums.get(name, Errors()).plus(scored.errors)
        return sums

    def part(self, prefix: str) -> "Scores":
        """The files whose names begin with `prefix`."""
        kept = (s for s in self.segments if s.segment.side[0].startswith(prefix))
        return Scores(tuple(kept))


def score_files(
    stm: str | Path,
    ctm: str | Path,
    glm: Glm | None = None,
    options: WordOptions = ALL_MARKS,
) -> Scores:
    """Aligns a hypothesis with its reference.

    Args:
        stm: Reference file, with lines `file channel speaker begin end <labels> words`.
        ctm: Hypothesis file, with lines `file channel begin duration word confidence`.
        glm: Rules for both; without rules, words are compared unchanged (plain sclite).
        options: Which markup to interpret, e.g. `(uh)` optional, `dog-` a fragment.

    Raises:
        ScoringError: A file is unusable; the message names file and line.
        OSError: A file cannot be read.
    """
    return score_lines(read_lines(stm), read_lines(ctm), glm, options, (stm, ctm))


def score_lines(
    stm: Iterable[Line],
    ctm: Iterable[Line],
    glm: Glm | None,
    options: WordOptions = ALL_MARKS,
    names: tuple[str | Path, str | Path] = ("stm", "ctm"),
) -> Scores:
    """Scores the lines of both files, as `score_files` does."""
    reference_name, hypothesis_name = map(str, names)
    if glm is None:
        stm = _in_order(sort_lines(stm, 3, reference_name))
        ctm = _in_order(sort_lines(ctm, 2, hypothesis_name))
    else:
        stm = filter_stm(stm, glm.reference, reference_name)
        ctm = filter_ctm(ctm, glm.hypothesis, hypothesis_name)
    segments = list(parse_stm(stm, reference_name))
    spoken = list(parse_ctm(ctm, options, hypothesis_name))
    return Scores(
        tuple(
            _scored(segment, heard, options, reference_name)
            for segment, heard in assign(segments, spoken)
        )
    )


def _scored(
    segment: Segment, heard: list[Word | Choice], options: WordOptions, name: str
) -> ScoredSegment:
    said = parse_text(segment.text, options, f"{name}:{segment.line}")
    pairs = align(network_of(said), network_of(heard))
    return ScoredSegment(segment, tuple(pairs))


def _in_order(sides: Iterable[list[Line]]) -> list[Line]:
    return [line for side in sides for line in side]
