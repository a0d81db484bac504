"""The spoken segments of a recording, by the level of its frames.

A conversation side is silent half of the time. A segment is a run of frames above a
threshold between the quiet and the loud frames, with a margin around it. A segment that
is too long is cut at its quietest frame.
"""

from collections.abc import Iterator

import numpy as np

from lightning_adpsgd.asr.sound.features import DIGITAL_SILENCE

_QUIET, _LOUD = 10, 95  # percentiles of the level
_SPEECH = 0.3  # of the way from quiet to loud
_LEAST_RANGE = 3.0  # log energy: between whispering and silence
_MARGIN = 25
_SMOOTH = 11


def find_segments(
    level: np.ndarray, longest: int = 2000, margin: int = _MARGIN
) -> list[tuple[int, int]]:
    """The segments of speech, each as its first frame and the frame after its last.

    Args:
        level: Mean log energy of each frame, [frames].
        longest: Largest number of frames of a segment.
        margin: Number of frames kept on each side of speech.
    """
    audible = level[level > DIGITAL_SILENCE]
    if not len(audible):
        return []
    quiet, loud = np.percentile(level, [_QUIET, _LOUD])
    if loud <= DIGITAL_SILENCE:  # little is said in a long silence
        loud = np.percentile(audible, _LOUD)
    if loud - quiet < _LEAST_RANGE:  # all speech or none, which the search decides
        return list(_cut(level, 0, len(level), longest))
    smooth = _summed(level, np.ones(_SMOOTH) / _SMOOTH)
    is_speech = smooth > quiet + _SPEECH * (loud - quiet)
    wide = _summed(is_speech, np.ones(2 * margin + 1)) > 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wide, [False]])))
    return [
        piece
        for first, last in edges.reshape(-1, 2).tolist()
        for piece in _cut(level, first, last, longest)
    ]


def _summed(frames: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weighed sum around each frame; `same` may be as long as the weights."""
    sums = np.convolve(frames, weights)
    return sums[len(weights) // 2 :][: len(frames)]


def _cut(
    level: np.ndarray, first: int, last: int, longest: int
) -> Iterator[tuple[int, int]]:
    while last - first > longest:
        # Not before the middle, so that no piece is much shorter than it could be.
        start = first + longest // 2
        middle = start + int(np.argmin(level[start : first + longest])) + 1
        yield first, middle
        first = middle
    yield first, last
