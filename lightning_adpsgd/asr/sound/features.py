"""Acoustic features: normalised log-mel energies and their differences (deltas).

Frames of 25 ms every 10 ms; frame i is centred on (i + 1/2) · 10 ms, so n samples give
round(n / 80) frames. The first and second differences are Kaldi's:

    Δ x(t) = Σ_{k=1,2} k · (x(t+k) − x(t−k)) / 10,    ΔΔ x = Δ(Δ x)

where frames beyond the ends of an utterance repeat its first and last frame. Only the
log-mel energies are stored; differences are taken in the batch, on its device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torchaudio.compliance import kaldi

from lightning_adpsgd.asr.sound.sphere import SAMPLE_RATE

FRAME_SHIFT_S = 0.01
CONTEXT = 4  # frames on each side that the second difference reaches
_SHIFT = round(SAMPLE_RATE * FRAME_SHIFT_S)
_WINDOW = round(SAMPLE_RATE * 0.025)
_FULL_SCALE = 32768.0  # Kaldi's features are those of 16-bit integers
DIGITAL_SILENCE = 0.0  # the log energy of silence without any noise: the floor


def num_frames(num_samples: int) -> int:
    """The number of frames in `num_samples` samples at 8 kHz."""
    return (num_samples + _SHIFT // 2) // _SHIFT


def log_mel(
    samples: np.ndarray, num_mels: int = 40, floor: float = DIGITAL_SILENCE
) -> Tensor:
    """Kaldi's log-mel filter-bank energies, without dither.

    Args:
        samples: Samples in [-1, 1) at 8 kHz, float32 [samples].
        num_mels: Number of filters between 20 Hz and 4 kHz.
        floor: Smallest log energy. Without it, digital silence would be at −16, ten
            times farther from the mean than any sound.

    Returns:
        Log energies, float32 [frames, num_mels].

    Raises:
        ValueError: The samples are not one finite channel of at least 25 ms.
    """
    if samples.ndim != 1 or len(samples) < _WINDOW:
        raise ValueError(
            f"`samples` must be one channel of at least {_WINDOW} samples (25 ms), "
            f"got shape {samples.shape}"
        )
    if not np.isfinite(samples).all():
        first = int(np.flatnonzero(~np.isfinite(samples))[0])
        raise ValueError(
            f"`samples` must be finite, sample {first} is {samples[first]}"
        )
    energies = kaldi.fbank(
        torch.from_numpy(np.asarray(samples, np.float32))[None] * _FULL_SCALE,
        num_mel_bins=num_mels,
        sample_frequency=SAMPLE_RATE,
        dither=0.0,
        snip_edges=False,
    )
    return energies.clamp_min(floor)


class Normalisation(NamedTuple):
    """The mean and standard deviation of a conversation side, per dimension.

    They are computed over all utterances of the side together, which preserves
    differences in level between a speaker's utterances. Frames of digital silence (a
    gate, a lost packet) count only where there are no others. They lie some ten log
    units below any sound, and a few of them would move the mean of all speech.
    """

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, utterances: Sequence[Tensor]) -> "Normalisation":
        """Computes mean and deviation over utterances, [frames, dims] each.

        Utterances are added one at a time, so that only one is in double precision at
        once.

        Raises:
            ValueError: There is no frame.
        """
        if not sum(map(len, utterances)):
            raise ValueError("`utterances` must have at least one frame, got none")
        heard = [_is_heard(part) for part in utterances]
        if not any(bool(one.any()) for one in heard):
            heard = [torch.ones_like(one) for one in heard]
        count = sum(int(one.sum()) for one in heard)
        mean = torch.zeros(utterances[0].shape[1], dtype=torch.float64)
        for part, one in zip(utterances, heard, strict=True):
            mean += part[one].double().sum(dim=0) / count
        variance = torch.zeros_like(mean)
        for part, one in zip(utterances, heard, strict=True):
            variance += (part[one].double() - mean).square().sum(dim=0) / count
        return cls(mean, variance.sqrt().clamp_min(1e-3))

    def apply(self, utterance: Tensor) -> Tensor:
        """The normalised frames of an utterance, float32 [frames, dims]."""
        return ((utterance.double() - self.mean) / self.deviation).float()


def _is_heard(utterance: Tensor) -> Tensor:
    """Which frames are not digital silence, bool [frames]."""
    return (utterance != DIGITAL_SILENCE).any(dim=1)


def normalise_side(utterances: Sequence[Tensor]) -> list[Tensor]:
    """Subtracts the mean of a conversation side and divides by its deviation.

    Args:
        utterances: All utterances of the side, [frames, dims] each.
    """
    return list(map(Normalisation.of(utterances).apply, utterances))


def add_differences(frames: Tensor) -> Tensor:
    """Appends Δ and ΔΔ; uses up the context of ΔΔ at both ends.

    Args:
        frames: Frames with their context, [..., frames + 2 · CONTEXT, dims].

    Returns:
        Tensor of [..., frames, 3 · dims].

    Raises:
        ValueError: There are no more frames than the context of ΔΔ.
    """
    if frames.shape[-2] <= 2 * CONTEXT:
        raise ValueError(
            f"`frames` must have more than {2 * CONTEXT} frames, their context, "
            f"got shape {tuple(frames.shape)}"
        )
    first = _difference(frames)
    second = _difference(first)
    edge = CONTEXT // 2
    parts = (frames[..., CONTEXT:-CONTEXT, :], first[..., edge:-edge, :], second)
    return torch.cat(parts, dim=-1)


def _difference(frames: Tensor) -> Tensor:
    # [..., frames, dims] to [..., frames - 4, dims]
    near = frames[..., 3:-1, :] - frames[..., 1:-3, :]
    far = frames[..., 4:, :] - frames[..., :-4, :]
    return near / 10 + far / 5


def with_differences(frames: Tensor) -> Tensor:
    """Appends Δ and ΔΔ to one whole utterance.

    Args:
        frames: Frames of the utterance, [frames, dims].

    Returns:
        Tensor of [frames, 3 · dims].

    Raises:
        ValueError: `frames` is not [frames, dims], or has no frame.
    """
    if frames.ndim != 2 or len(frames) == 0:
        raise ValueError(
            f"`frames` must be [frames, dims] with a frame, got {tuple(frames.shape)}"
        )
    extended = pad(frames.T[None], (CONTEXT, CONTEXT), mode="replicate")[0].T
    return add_differences(extended)
