"""eSpeak NG through ctypes: text to samples, and text to its phonemes.

The library is the one inside the `espeakng-loader` wheel, so that no system package is
needed. It keeps its state in C globals and a sentence depends a little on those spoken
before it. To get the same samples every time, speak the same sentences in the same
order in a process of its own (see corpus.py).
"""

import ctypes
from functools import cache
from typing import Any

import espeakng_loader
import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 22_050

# From speak_lib.h: espeak_AUDIO_OUTPUT, espeak_PARAMETER, flags of espeak_Synth.
_SYNCHRONOUS = 2
_RATE, _PITCH = 1, 3
_UTF8, _PHONEMES_IN_BRACKETS = 1, 0x100
_IPA = 2

_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


def speak(text: str, *, voice: str, rate: int, pitch: int) -> NDArray[np.float64]:
    """Synthesise `text` and cut the silence off both ends.

    Args:
        text: words; `[[...]]` holds eSpeak's phoneme names instead of a word.
        voice: such as `en-us+m3`: an accent and a variant.
        rate: words a minute, 80 to 450.
        pitch: 0 to 100 around the variant's own pitch at 50.

    Returns:
        Samples in -1 ... 1 at `SAMPLE_RATE`.
    """
    library, pieces, _ = _library()
    _select_voice(voice)
    library.espeak_SetParameter(_RATE, rate, 0)
    library.espeak_SetParameter(_PITCH, pitch, 0)
    pieces.clear()
    data = text.encode()
    flags = _UTF8 | _PHONEMES_IN_BRACKETS
    library.espeak_Synth(data, len(data) + 1, 0, 1, 0, flags, None, None)
    return _trim(np.concatenate(pieces)) if pieces else np.zeros(0)


def phonemes(text: str, *, voice: str, ipa: bool = True) -> str:
    """Return how `text` is said, in IPA or eSpeak's own names, joined by `_`."""
    library, *_ = _library()
    _select_voice(voice)
    pointer = ctypes.c_char_p(text.encode())
    mode = (_IPA if ipa else 0) | ord("_") << 8
    return library.espeak_TextToPhonemes(ctypes.byref(pointer), _UTF8, mode).decode()


def library_path() -> str:
    """Return the path of the shared library that is loaded."""
    return str(espeakng_loader.get_library_path())


@cache
def _library() -> tuple[ctypes.CDLL, list[NDArray[np.int16]], object]:
    """Load the library once a process.

    Returns:
        The library, the list that receives the samples of a text, and the callback,
        which must live as long as the library does.
    """
    library = ctypes.CDLL(library_path())
    library.espeak_TextToPhonemes.restype = ctypes.c_char_p
    data = str(espeakng_loader.get_data_path()).encode()
    if library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0) != SAMPLE_RATE:
        raise RuntimeError(
            f"eSpeak NG did not start from `{library_path()}`: "
            "reinstall the package espeakng-loader"
        )
    # The breath in some voices is drawn at random, by default from the time of day.
    library.espeak_ng_SetRandSeed(ctypes.c_long(1))
    pieces: list[NDArray[np.int16]] = []
    callback = _Callback(lambda samples, n, _: _receive(samples, n, pieces))
    library.espeak_SetSynthCallback(callback)
    return library, pieces, callback


def _receive(samples: Any, count: int, pieces: list[NDArray[np.int16]]) -> int:
    if samples and count > 0:
        pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
    return 0


def _select_voice(voice: str) -> None:
    library, *_ = _library()
    if library.espeak_SetVoiceByName(voice.encode()) != 0:
        raise ValueError(f"`voice` must be one that eSpeak NG has, got {voice!r}")


def _trim(samples: NDArray[np.int16]) -> NDArray[np.float64]:
    """Cut both ends where the samples stay below 0.5 % of the full scale."""
    scaled = samples / 32768.0
    loud = np.flatnonzero(np.abs(scaled) > 0.005)
    return scaled[loud[0] : loud[-1] + 1] if loud.size else np.zeros(0)
