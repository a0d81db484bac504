"""Sound played faster or slower like a tape: pitch and formants move with the speed.

Speed perturbation (Ko and others 2015): copies of the training speech at 0.9 and 1.1
times its speed are like other voices with the same words. The sound is treated as if
sampled at `speed` times its rate, and resampled to that rate: n samples become n /
speed.
"""

import numpy as np
import torch
from torchaudio.functional import resample

_STEPS = 100  # speeds are hundredths, so that resampling is by small whole numbers


def at_speed(samples: np.ndarray, speed: float) -> np.ndarray:
    """Plays the sound `speed` times as fast.

    Args:
        samples: float32 [samples].
        speed: Speed factor, rounded to hundredths.

    Returns:
        float32 [samples_at(samples, speed)]; the input itself if the speed is 1.
    """
    if _hundredths(speed) == _STEPS:
        return samples
    played = resample(torch.tensor(samples), _hundredths(speed), _STEPS)
    return played[: samples_at(len(samples), speed)].numpy()


def samples_at(num_samples: int, speed: float) -> int:
    """Number of samples after the change of speed, rounded down."""
    return num_samples * _STEPS // _hundredths(speed)


def _hundredths(speed: float) -> int:
    return round(speed * _STEPS)
