import numpy as np
import pytest

from recipes.generated import acoustics, espeak
from recipes.generated.acoustics import SAMPLE_RATE


def tone(hertz: float, rate: int, seconds: float = 1.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def rms_db(samples: np.ndarray) -> float:
    return 10 * float(np.log10(np.mean(samples**2)))


def test_resampling_keeps_a_tone():
    slow = acoustics.to_line_rate(tone(1000, espeak.SAMPLE_RATE))
    np.testing.assert_allclose(slow, tone(1000, SAMPLE_RATE), atol=1e-9)


def test_resampling_removes_what_8_khz_cannot_hold():
    assert np.abs(acoustics.to_line_rate(tone(5000, espeak.SAMPLE_RATE))).max() < 1e-9


def test_resampling_pads_to_whole_20_ms():
    assert len(acoustics.to_line_rate(np.ones(442))) == 320


def test_level_is_the_root_mean_square():
    assert rms_db(acoustics.at_level(tone(500, SAMPLE_RATE), -26)) == pytest.approx(-26)


def test_level_never_clips():
    click = np.zeros(8000)
    click[100] = 0.01
    assert np.abs(acoustics.at_level(click, -20)).max() == pytest.approx(0.9)


def test_silence_stays_silence_at_any_level():
    assert not acoustics.at_level(np.zeros(80), -20).any()


@pytest.mark.parametrize(
    ("hertz", "gain_db"), [(60, -50), (300, -3), (1000, 0), (3400, -3), (3990, -10)]
)
def test_telephone_passes_300_to_3400_hz(hertz, gain_db):
    sound = tone(hertz, SAMPLE_RATE)
    gain = rms_db(acoustics.telephone(sound, tilt_db=0)) - rms_db(sound)
    assert gain < gain_db + 0.1
    assert gain > gain_db - 8


def test_tilt_is_the_gain_across_the_band():
    gains = [
        rms_db(acoustics.telephone(tone(hertz, SAMPLE_RATE), tilt_db=-9))
        for hertz in (300, 3400)
    ]
    assert gains[1] - gains[0] == pytest.approx(-9, abs=0.05)


def test_line_noise_has_the_level_asked_for():
    noise = acoustics.line_noise(16_000, -45, np.random.default_rng(0))
    assert len(noise) == 16_000
    assert rms_db(noise) == pytest.approx(-45)


@pytest.mark.parametrize("kind", ["[noise]", "[laughter]", "[vocalized-noise]"])
def test_bursts_are_short_and_heard(kind):
    sound = acoustics.burst(kind, -26, np.random.default_rng(1))
    assert 0.1 <= len(sound) / SAMPLE_RATE <= 1.3
    assert np.isfinite(sound).all()
    assert rms_db(sound) > -40


def test_a_laughed_word_keeps_its_length():
    word = tone(400, SAMPLE_RATE, 0.3)
    assert len(acoustics.laughed(word, np.random.default_rng(2))) == len(word)
