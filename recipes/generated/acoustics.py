"""Sound: sampling rate, the band of a telephone line, its noise, bursts and laughter.

Samples are float64 in -1 ... 1. Filters are gains applied to a spectrum, which keeps
every time exact.
"""

import numpy as np
from numpy.typing import NDArray

from recipes.generated import espeak

Samples = NDArray[np.float64]

SAMPLE_RATE = 8_000
# 22,050 to 8,000 Hz is 441 samples to 160: 20 ms are whole in both.
_FROM, _TO = 441, 160


def to_line_rate(samples: Samples) -> Samples:
    """Resample from eSpeak's rate to `SAMPLE_RATE`, padded to whole 20 ms."""
    assert espeak.SAMPLE_RATE * _TO == SAMPLE_RATE * _FROM
    blocks = -(-len(samples) // _FROM)
    spectrum = np.fft.rfft(samples, blocks * _FROM)[: blocks * _TO // 2 + 1]
    return np.fft.irfft(spectrum, blocks * _TO) * (_TO / _FROM)


def at_level(samples: Samples, level_db: float) -> Samples:
    """Scale to a root mean square of `level_db` against full scale, peaks below 0.9."""
    rms = np.sqrt(np.mean(samples**2)) if samples.size else 0.0
    if rms == 0:
        return samples
    gain = 10 ** (level_db / 20) / rms
    return samples * min(gain, 0.9 / np.abs(samples).max())


def telephone(samples: Samples, *, tilt_db: float) -> Samples:
    """Pass 300 to 3400 Hz, with a gain that changes by `tilt_db` across the band."""
    whole_seconds = -(-len(samples) // SAMPLE_RATE) * SAMPLE_RATE  # a fast FFT
    spectrum = np.fft.rfft(samples, whole_seconds)
    hertz = np.fft.rfftfreq(whole_seconds, 1 / SAMPLE_RATE)
    spectrum *= _band(hertz, 300, 3400) * _tilt(hertz, tilt_db)
    return np.fft.irfft(spectrum, whole_seconds)[: len(samples)]


def line_noise(count: int, level_db: float, rng: np.random.Generator) -> Samples:
    """Return `count` samples of hiss that is stronger at low frequencies."""
    pink = telephone(rng.standard_normal(count), tilt_db=-12)
    return at_level(pink, level_db)


def burst(kind: str, level_db: float, rng: np.random.Generator) -> Samples:
    """Return a sound that is no word.

    Args:
        kind: `[noise]`, a knock; `[vocalized-noise]`, a breath; `[laughter]`, a row of
            voiced puffs.
        level_db: root mean square against full scale.
        rng: draws length, colour and rhythm.
    """
    sounds = {"[noise]": _knock, "[vocalized-noise]": _breath, "[laughter]": _laughter}
    return at_level(sounds[kind](rng), level_db)


def laughed(word: Samples, rng: np.random.Generator) -> Samples:
    """Shake a spoken word at 5 to 7 Hz and breathe over it."""
    seconds = np.arange(len(word)) / SAMPLE_RATE
    shake = 0.65 + 0.35 * np.cos(2 * np.pi * rng.uniform(5, 7) * seconds)
    breath = _coloured(len(word), 600, 2800, rng) * shake
    rms = np.sqrt(np.mean(word**2)) if word.size else 0.0
    return word * shake + 0.2 * rms * breath


def _knock(rng: np.random.Generator) -> Samples:
    low = rng.uniform(300, 1500)
    noise = _coloured(_samples(rng.uniform(0.1, 0.3)), low, low + 1500, rng)
    return noise * np.exp(-np.arange(len(noise)) / _samples(0.04))


def _breath(rng: np.random.Generator) -> Samples:
    noise = _coloured(_samples(rng.uniform(0.25, 0.5)), 400, 1800, rng)
    return noise * np.hanning(len(noise))


def _laughter(rng: np.random.Generator) -> Samples:
    pitch = rng.uniform(140, 320)
    return np.concatenate([_puff(pitch, rng) for _ in range(rng.integers(3, 7))])


def _puff(pitch: float, rng: np.random.Generator) -> Samples:
    """Return one `ha`: breath, then a buzz with the formants of an open vowel."""
    count = _samples(rng.uniform(0.13, 0.19))
    seconds = np.arange(count) / SAMPLE_RATE
    harmonics = pitch * np.arange(1, int(3200 // pitch))
    gains = sum(np.exp(-(((harmonics - f) / 250) ** 2)) for f in (750, 1300, 2600))
    buzz = np.sin(2 * np.pi * np.outer(seconds, harmonics)) @ gains
    voiced = buzz * np.clip(np.sin(np.pi * (seconds / seconds[-1] * 1.5 - 0.5)), 0, 1)
    return voiced + 0.4 * _coloured(count, 500, 3000, rng) * np.hanning(count)


def _coloured(count: int, low: float, high: float, rng: np.random.Generator) -> Samples:
    """Return noise of unit power between two frequencies in Hz."""
    spectrum = np.fft.rfft(rng.standard_normal(count))
    spectrum *= _band(np.fft.rfftfreq(count, 1 / SAMPLE_RATE), low, high)
    noise = np.fft.irfft(spectrum, count)
    return noise / max(float(np.sqrt(np.mean(noise**2))), 1e-9)


def _band(hertz: NDArray[np.floating], low: float, high: float) -> Samples:
    """Return the gain of a fourth-order band-pass, -3 dB at both edges."""
    above = 1 / np.sqrt(1 + (low / np.maximum(hertz, 1e-3)) ** 8)
    return above / np.sqrt(1 + (hertz / high) ** 16)


def _tilt(hertz: NDArray[np.floating], tilt_db: float) -> Samples:
    octaves = np.log2(np.clip(hertz, 300, 3400) / 300) / np.log2(3400 / 300)
    return 10 ** (tilt_db * octaves / 20)


def _samples(seconds: float) -> int:
    return round(seconds * SAMPLE_RATE)
