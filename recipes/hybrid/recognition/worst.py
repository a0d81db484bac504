"""The utterances with most errors: aligned words, confidences, and sound to listen to.

`utterances.json` lists them, that with most errors first, for the report:

    file, channel, begin, end, part    where it is, in seconds
    words, errors                      counts
    pairs                              [kind, said, heard, confidence] in their order
    audio                              its sound, beside the list; absent if unknown

The kind is C, S, D or I as in NIST's tables. `confidence` is that of the recognised
word, null where there is none.
"""

import io
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

from lightning_adpsgd.asr.scoring.aligner import Pair
from lightning_adpsgd.asr.scoring.scorer import ScoredSegment
from lightning_adpsgd.asr.scoring.words import Word
from lightning_adpsgd.asr.sound.channels import read_channel
from lightning_adpsgd.asr.sound.sphere import SAMPLE_RATE
from lightning_adpsgd.files import bytes_written_whole, write_json

MOST_LISTED, MOST_HEARD = 50, 10
_FOLDER = "worst"


class Sound(NamedTuple):
    """Where the sound of a file and channel is, and the part of the test it is in."""

    part: str
    recording: Path
    channel: int


Sides = dict[tuple[str, str], Sound]


def worst(segments: Iterable[ScoredSegment]) -> list[ScoredSegment]:
    """The utterances, that with most errors first."""
    return sorted(segments, key=lambda one: -one.errors.num_errors)


def sound_of(one: ScoredSegment, sides: Sides) -> np.ndarray:
    """The samples [samples] of an utterance, in [-1, 1]; none if they are gone."""
    segment, sound = one.segment, sides[one.segment.side]
    ends = (int(time * SAMPLE_RATE) for time in (segment.start_s, segment.end_s))
    try:
        return np.asarray(read_channel(sound.recording, sound.channel)[slice(*ends)])
    except (ValueError, OSError):  # the discs may be gone by now
        return np.zeros(0, np.float32)


def write_worst(
    output: Path, segments: Iterable[ScoredSegment], ctm: Path, sides: Sides
) -> None:
    """Writes `utterances.json` and the sounds of the first of them.

    Args:
        output: folder of the score.
        segments: aligned segments; those without an error are left out.
        ctm: recognised words, with their confidences.
        sides: recordings of the test sets.
    """
    known = (one for one in segments if one.segment.side in sides)
    wrong = [one for one in worst(known) if one.errors.num_errors][:MOST_LISTED]
    confidences = Confidences(ctm)
    listed = [_described(one, sides, confidences) for one in wrong]
    for number, one in enumerate(wrong[:MOST_HEARD]):
        if (samples := sound_of(one, sides)).size:
            listed[number]["audio"] = f"{_FOLDER}/{number}.wav"
            _write_sound(output / _FOLDER / f"{number}.wav", samples)
    write_json(output / "utterances.json", listed)


class Confidences:
    """The confidence of recognised words, by file, channel and time.

    Args:
        ctm: file of them; a line without a confidence tells none.
    """

    def __init__(self, ctm: Path) -> None:
        self._words: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for line in ctm.read_text(encoding="utf-8").splitlines():
            file, channel, start, _, _, *sure = line.split()
            words = self._words.setdefault((file.lower(), channel.lower()), [])
            words.append((float(start), float(sure[0]) if sure else float("nan")))
        for words in self._words.values():
            words.sort()

    def of(self, side: tuple[str, str], word: Word | None) -> float | None:
        """That of the last word that begins before the middle of this one."""
        words = self._words.get(side, [])
        if word is None or not words:
            return None
        # Rules may have made several words of one; they lie within it.
        middle_s = word.start_s + word.duration_s / 2
        place = bisect_right(words, (middle_s, float("inf"))) - 1
        sure = words[max(0, place)][1]
        return None if np.isnan(sure) else sure


def _described(
    one: ScoredSegment, sides: Sides, confidences: Confidences
) -> dict[str, Any]:
    segment, errors = one.segment, one.errors
    pairs = [_pair(pair, segment.side, confidences) for pair in one.pairs]
    return {
        "part": sides[segment.side].part,
        "file": segment.side[0],
        "channel": segment.side[1],
        "begin": round(segment.start_s, 3),
        "end": round(segment.end_s, 3),
        "words": errors.num_words,
        "errors": errors.num_errors,
        "pairs": pairs,
    }


def _pair(pair: Pair, side: tuple[str, str], confidences: Confidences) -> list[Any]:
    said, heard = ("" if word is None else word.text for word in pair[1:])
    return [pair.kind, said, heard, confidences.of(side, pair.hypothesis)]


def _write_sound(path: Path, samples: np.ndarray) -> None:
    sound = io.BytesIO()
    soundfile.write(sound, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    with bytes_written_whole(path) as file:
        file.write(sound.getvalue())
