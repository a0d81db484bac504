"""The detection of 16-bit samples whose two bytes are swapped.

A header with the wrong byte order turns any speech into full-scale noise, and nothing
else is wrong with the file. Speech is smooth: neighbouring samples are similar. With
swapped bytes they are not, except for samples too quiet to need the higher byte, which
swapping multiplies by 256. So each short frame is examined both ways, and the smoother
way is counted. Noise is equally rough both ways.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

_STRETCHES = 32  # of a recording, from its begin to its end
_STRETCH_S = 0.25
_FRAME = 160  # samples: 20 ms of a telephone's
_SMOOTH = 0.6  # of 1, which is noise
_MUCH = 1.5  # the ratio of roughness that is more than chance
_FRAMES, _TIMES = 20, 10  # least number, and least multiple of the opposite ones


def is_swapped(path: Path) -> bool:
    """Whether the bytes of an uncompressed sound file are not in its header's order.

    It reads some seconds of the file. It is false for all formats but 16-bit PCM.

    Raises:
        soundfile.LibsndfileError: The file cannot be read.
    """
    name: Any = os.fsencode(path)  # may be no text, which libsndfile's types leave out
    with soundfile.SoundFile(name) as file:
        if file.subtype != "PCM_16" or file.format == "FLAC":
            return False
        frames = np.concatenate([_framed(stretch) for stretch in _stretches(file)])
    return sounds_swapped(frames)


def sounds_swapped(frames: np.ndarray) -> bool:
    """Whether frames are smoother with the bytes of their samples swapped.

    Args:
        frames: int16 [frames, samples].
    """
    stored, swapped = roughness(frames), roughness(frames.byteswap())
    wrong = np.sum((swapped < _SMOOTH) & (stored > _MUCH * swapped))
    right = np.sum((stored < _SMOOTH) & (swapped > _MUCH * stored))
    return bool(wrong >= max(_FRAMES, _TIMES * right))


def roughness(frames: np.ndarray) -> np.ndarray:
    """1 - r(1) of each frame, where r is the correlation of neighbouring samples.

    It is half the mean square of their differences over their variance: near 0 for
    smooth sound, 1 for white noise and for silence.

    Args:
        frames: [frames, samples].

    Returns:
        float64 [frames].
    """
    samples = frames.astype(np.float64)
    variance = samples.var(axis=1)
    steps = np.square(np.diff(samples, axis=1)).mean(axis=1) / 2
    return np.divide(steps, variance, out=np.ones_like(steps), where=variance > 0)


def _stretches(file: Any) -> Iterator[np.ndarray]:
    """Samples [samples, channels] from all over the file."""
    length = round(_STRETCH_S * file.samplerate)
    last = max(file.frames - length, 0)
    for start in sorted({last * number // _STRETCHES for number in range(_STRETCHES)}):
        file.seek(start)
        yield file.read(length, dtype="int16", always_2d=True)


def _framed(stretch: np.ndarray) -> np.ndarray:
    """Cuts [samples, channels] into [frames, samples] of all channels."""
    whole = len(stretch) // _FRAME * _FRAME
    return stretch[:whole].T.reshape(-1, _FRAME)
