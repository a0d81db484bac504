"""Finds the utterance behind a name in Kaldi, by recording, side and times.

Kaldi's recipes build names in several ways. `sw02001-A_000098-001156` rounds halves up,
`en_4156-A_030185-030248` cuts times off, and `fe_03_00001-A-000398-000476` also writes
a hyphen before them. So a name that is not found unchanged is parsed. It means the
utterance of the same recording and side whose begin and end are each within 10 ms.
Names without times are looked up in the `segments` of a data directory, or mean the
only utterance of the recording of that name.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.tables import (
    Cut,
    channel_of,
    read_channels,
    read_segments,
)

TOLERANCE_CS = 1.0
LEAST_COVERAGE = 0.95
NUM_NAMED = 10
_ROUNDING = 1e-6
_NAME = re.compile(
    r"(sp[\d.]+-)?(.+)[-_]([AB12])[-_](\d{4,8})[-_](\d{4,8})", re.IGNORECASE
)
_SIDE = re.compile(r"(.+)[-_]([AB12])", re.IGNORECASE)
_SWITCHBOARD = re.compile(r"sw0*(\d+)")


class Side(NamedTuple):
    """One side of a recording, at one speed.

    Attributes:
        recording: Stem in lower case, Switchboard's without leading zeros: `sw2001`.
        channel: 0 for A, 1 for B.
        speed: Prefix of a copy at another speed, `sp0.9-`; empty for others.
    """

    recording: str
    channel: int
    speed: str = ""


class Span(NamedTuple):
    """A stretch of a side, in hundredths of a second."""

    side: Side
    start_cs: float
    end_cs: float

    def distance_cs(self, other: "Span") -> float:
        """The larger one of the distances between begins and between ends."""
        start, end = self.start_cs - other.start_cs, self.end_cs - other.end_cs
        return max(abs(start), abs(end))


def parse_name(name: str) -> Span | None:
    """The stretch in a name; None if the name has none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    speed, recording, channel, start, end = match.groups()
    side = side_of(recording, channel, (speed or "").lower())
    return Span(side, int(start), int(end))


def side_of(recording: str, channel: str, speed: str = "") -> Side:
    """The side of a recording; channels are A and B, or 1 and 2."""
    return Side(stem_of(recording), channel_of(channel), speed)


def stem_of(recording: str) -> str:
    """The stem of a recording, as `Side` has it."""
    match = _SWITCHBOARD.fullmatch(stem := recording.lower())
    return f"sw{match[1]}" if match else stem


class Names:
    """The utterances of a store, by the names that Kaldi may give them.

    Args:
        ids: The names here.
        spans: Stretches of names without times, from `read_spans`.
    """

    def __init__(
        self, ids: Iterable[str], spans: Mapping[str, Span] | None = None
    ) -> None:
        self._ids = {str(name) for name in ids}
        self._spans = spans or {}
        self._by_start: dict[tuple[Side, int], list[str]] = {}
        for name in sorted(self._ids):
            if span := parse_name(name):
                key = span.side, int(span.start_cs)
                self._by_start.setdefault(key, []).append(name)
        recordings = Counter(map(_recording_of, self._ids))
        self._alone = {
            _recording_of(name): name
            for name in self._ids
            if recordings[_recording_of(name)] == 1
        }

    def find(self, name: str) -> str | None:
        """The name here of an utterance of Kaldi's; None if there is no such one."""
        if name in self._ids:
            return name
        for span in (parse_name(name), self._spans.get(name)):
            if span is not None and (found := self._nearest(span)):
                return found
        return self._alone.get(name)

    def _nearest(self, span: Span) -> str | None:
        near = (
            (span.distance_cs(found), name)
            for name in self._beginning_near(span)
            if (found := parse_name(name))
        )
        distance, name = min(near, default=(math.inf, ""))
        return name if distance <= TOLERANCE_CS + _ROUNDING else None

    def _beginning_near(self, span: Span) -> Iterator[str]:
        first = math.floor(span.start_cs - TOLERANCE_CS)
        for start in range(first, math.ceil(span.start_cs + TOLERANCE_CS) + 1):
            yield from self._by_start.get((span.side, start), ())


def _recording_of(name: str) -> str:
    """The recording of an utterance here, as its name has it."""
    return name.rsplit("-", 2)[0]


def read_spans(folder: Path) -> dict[str, Span]:
    """The utterances of a Kaldi data directory, by name.

    `segments` has their times, and `reco2file_and_channel`, where there is one, tells
    which side a recording is. Those without an end are left out.

    Raises:
        KaldiError: There is no `segments`, or a line is malformed.
    """
    sides = {
        recording: Side(stem_of(file), channel)
        for recording, (file, channel) in read_channels(folder).items()
    }
    return {
        name: Span(
            sides.get(cut.recording) or _named_side(cut),
            100 * cut.start_s,
            100 * cut.end_s,
        )
        for name, cut in read_segments(folder).items()
        if cut.end_s is not None
    }


def _named_side(cut: Cut) -> Side:
    match = _SIDE.fullmatch(cut.recording)
    if match is None:
        raise KaldiError(
            f"{cut.where}: no side in the recording {cut.recording!r}; expected a name "
            "like sw02001-A, or a line of reco2file_and_channel"
        )
    return side_of(*match.groups())


def check_coverage(
    what: str, missing: Sequence[str], total: int, least: float = LEAST_COVERAGE
) -> str:
    """The share of utterances that are not missing, in words.

    Raises:
        KaldiError: It is below `least`; the message names the first ten.
    """
    share = 1 - len(missing) / max(1, total)
    said = f"{total - len(missing)} of {total} utterances ({share:.1%}) have {what}"
    if share >= least:
        return said
    more = f" and {len(missing) - NUM_NAMED} more" if len(missing) > NUM_NAMED else ""
    raise KaldiError(
        f"{said}, at least {least:.0%} must; missing: "
        f"{', '.join(missing[:NUM_NAMED])}{more}. kaldi.data=DIR names directories "
        "whose `segments` has the times of other names; kaldi.least_coverage=SHARE "
        "accepts fewer"
    )
