"""Sound at another speed is the same sound on another scale of time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_adpsgd.asr.sound.speeds import at_speed, samples_at

RATE = 8000
SPEEDS = [0.5, 0.9, 0.97, 1.1, 2.0]


def chord(seconds: np.ndarray) -> np.ndarray:
    """Three tones, low enough to be heard at twice the speed."""
    tones = [(220, 0.1), (547, 0.3), (1310, 0.2)]
    waves = (level * np.sin(2 * np.pi * hertz * seconds) for hertz, level in tones)
    return sum(waves, np.zeros_like(seconds))


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_moment_comes_so_many_times_as_soon(speed: float):
    sound = chord(np.arange(RATE) / RATE).astype(np.float32)
    found = at_speed(sound, speed)
    expected = chord(speed * np.arange(len(found)) / RATE)
    inner = slice(200, -200)  # filters see beyond the ends
    np.testing.assert_allclose(found[inner], expected[inner], atol=5e-3)
    assert found.dtype == np.float32


@given(st.integers(200, 20_000), st.sampled_from(SPEEDS))
def test_the_number_of_samples_is_known_beforehand(num_samples: int, speed: float):
    sound = np.zeros(num_samples, np.float32)
    assert len(at_speed(sound, speed)) == samples_at(num_samples, speed)
    assert samples_at(num_samples, speed) == int(num_samples / speed + 1e-6)


def test_sound_at_its_own_speed_stays_as_it_is():
    sound = np.ones(100, np.float32)
    assert at_speed(sound, 1.0) is sound
    assert samples_at(100, 1.0) == 100
