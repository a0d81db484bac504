"""Words with times: the result of a search, and its construction from a path's phones.

Word times come from the HMM states along the best path, which spell the phones of the
words: determinization has moved the graph's output labels away from their frames.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

FRAME_SHIFT_S = 0.01


class TimedWord(NamedTuple):
    """A word and its times, in seconds from the start of the utterance.

    `confidence` is its posterior, in [0, 1]; 1 where none was computed.
    """

    word: str
    start_s: float
    duration_s: float
    confidence: float = 1.0


class Hypothesis(NamedTuple):
    """The recognised words.

    Attributes:
        is_complete: Whether a sentence within the beam ends at the last frame; if not,
            the words are those of the best unfinished path.
        fit: How well the sound fits the words (`GraphDecoder.decode_confidently`); None
            where it was not computed.
        num_listed: Number of alternatives from which they were chosen.
    """

    words: tuple[TimedWord, ...]
    is_complete: bool
    fit: float | None = None
    num_listed: int = 1

    @property
    def text(self) -> tuple[str, ...]:
        """The words without their times."""
        return tuple(timed.word for timed in self.words)


class Alternative(NamedTuple):
    """One of several word sequences, with its cost, in which acoustics are scaled.

    `timed` finds the times of its words, which takes a search of its own.
    """

    text: tuple[str, ...]
    cost: float
    timed: Callable[[], Hypothesis]


def even_spans(num_frames: int, num_words: int) -> list[tuple[int, int]]:
    """Even spans for the words of an unfinished path, whose last word is incomplete."""
    even = np.linspace(0, num_frames, num_words + 1).astype(int)
    return list(zip(even[:-1].tolist(), even[1:].tolist(), strict=True))


def timed_word(word: str, span: tuple[int, int]) -> TimedWord:
    """A word with the times of its frames."""
    start, end = span
    return TimedWord(word, start * FRAME_SHIFT_S, (end - start) * FRAME_SHIFT_S)


def place_words(
    phones: list[int], words: Sequence[list[list[int]]], silence: int
) -> list[tuple[int, int]] | None:
    """The phones of each word, or None if the words do not spell `phones`.

    Args:
        phones: Phones along the path.
        words: Pronunciations of each word.
        silence: Phone that may come before, between and after words.

    Returns:
        Index of the first phone of each word, and the index after its last one.
    """
    # position after the words so far -> ((..., first phone), position)
    reached: dict[int, tuple] = {0: ()}
    for pronunciations in words:
        following: dict[int, tuple] = {}
        for at, path in reached.items():
            for first in _skips(phones, at, silence):
                for pronunciation in pronunciations:
                    after = first + len(pronunciation)
                    if phones[first:after] == pronunciation:
                        following.setdefault(after, (path, (first, after)))
        reached = following
    for at, path in reached.items():
        if len(phones) in _skips(phones, at, silence):
            return _unlinked(path)
    return None


def _skips(phones: list[int], at: int, silence: int) -> list[int]:
    is_silence = at < len(phones) and phones[at] == silence
    return [at, at + 1] if is_silence else [at]


def _unlinked(path: tuple) -> list[tuple[int, int]]:
    spans = []
    while path:
        path, span = path
        spans.append(span)
    return spans[::-1]
