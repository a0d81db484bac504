"""The number of samples in an MP3 file, by its frames.

libsndfile takes the length from the first frame, where encoders note it, or guesses it
from the bits of that frame, and reads no further. So it passes over all but the first
of files that were put together, and most of a file of varying bitrate without the note.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

WRONG_LENGTH = (
    "the length at its beginning is not that of the file, as of MP3 files that were "
    "put together, or written to a pipe with varying bitrate; write it anew by "
    "`ffmpeg -i old.mp3 new.wav`"
)
_MARGIN = 8  # frames: the note itself, and what encoders add at both ends
_KBITS = {  # by version, of layer III
    3: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}


class _Frame(NamedTuple):
    """The header of a frame: what all of a file share, and its length in bytes."""

    shared: tuple[int, int]  # version and rate
    num_samples: int
    num_bytes: int


def is_longer(path: Path, num_samples: int) -> bool:
    """Whether the frames of an MP3 file have more samples than libsndfile says.

    Args:
        path: The file.
        num_samples: Number of samples that libsndfile says.

    Raises:
        OSError: The file cannot be read.
    """
    found = 0
    for frame in _frames(path.read_bytes()):
        found += frame.num_samples
        if found > num_samples + _MARGIN * frame.num_samples:
            return True
    return False


def _frames(content: bytes) -> Iterator[_Frame]:
    """The frames like the first one that another follows."""
    first, at = None, content.find(b"\xff")
    while at >= 0:
        frame = _frame_at(content, at)
        if first is None and frame and _ends_at_a_frame(content, at, frame):
            first = frame.shared
        if frame is None or frame.shared != first:
            at = content.find(b"\xff", at + 1)
        else:
            yield frame
            at += frame.num_bytes


def _ends_at_a_frame(content: bytes, at: int, frame: _Frame) -> bool:
    after = _frame_at(content, at + frame.num_bytes)
    return after is not None and after.shared == frame.shared


def _frame_at(content: bytes, at: int) -> _Frame | None:
    """The frame of layer III whose header stands at a place; none if none does."""
    if len(content) < at + 4 or content[at] != 0xFF or content[at + 1] & 0xE6 != 0xE2:
        return None
    version = content[at + 1] >> 3 & 3
    bits, rate = content[at + 2] >> 4, content[at + 2] >> 2 & 3
    if version == 1 or not 0 < bits < 15 or rate == 3:
        return None
    kbits = _KBITS[3 if version == 3 else 2][bits - 1]
    num_samples = 1152 if version == 3 else 576
    length = num_samples * 125 * kbits // _RATES[version][rate]
    padding = content[at + 2] >> 1 & 1
    return _Frame((version, rate), num_samples, length + padding)
