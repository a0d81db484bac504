"""Augmentation of training frames that keeps their labels valid.

Speakers differ most in the length of their vocal tract, which stretches the frequency
axis. Stretching it at random gives the model voices that the corpus does not have
(vocal tract length perturbation, Jaitly and Hinton 2013), here on log-mel energies.
Speakers also differ in speed. Stretching time as well as frequency has the effect of
playing a recording faster or slower (speed perturbation, Ko and others 2015). It takes
no storage, and differs in each epoch. Masks over bands and over frames (SpecAugment,
Park and others 2019) make the model use all of its input.
"""

import torch
from torch import Tensor
from torchaudio.functional import mask_along_axis_iid

from lightning_adpsgd.asr.frames.store import IGNORE


def warp_frequencies(frames: Tensor, factors: Tensor) -> Tensor:
    """Stretches the mel axis: band m of the output is band m * factor of the input.

    Values between bands are interpolated linearly; beyond the last band it repeats.

    Args:
        frames: [batch, time, mel].
        factors: [batch], around 1; below 1 moves everything to higher bands.

    Returns:
        [batch, time, mel].
    """
    last = frames.shape[-1] - 1
    bands = torch.arange(last + 1, device=frames.device, dtype=frames.dtype)
    places = (bands * factors[:, None]).clamp(max=last)  # (batch, mel)
    lower = places.floor().long().clamp(max=max(last - 1, 0))
    share = (places - lower)[:, None]
    index = lower[:, None].expand_as(frames)
    upper = (index + 1).clamp(max=last)
    return torch.lerp(frames.gather(2, index), frames.gather(2, upper), share)


def random_warp(frames: Tensor, most: float) -> Tensor:
    """Warps each chunk by a factor drawn uniformly from 1 - most to 1 + most."""
    return warp_frequencies(frames, random_factors(frames, most))


def random_factors(frames: Tensor, most: float) -> Tensor:
    """A factor for each chunk, drawn uniformly from 1 - most to 1 + most, [batch]."""
    draws = torch.rand(len(frames), device=frames.device, dtype=frames.dtype)
    return 1 + most * (2 * draws - 1)


def stretch_time(frames: Tensor, factors: Tensor) -> Tensor:
    """Stretches the time axis of each chunk around its middle.

    Frame t of the output is frame c + (t - c) * factor of the input, where c is the
    middle. Values between frames are interpolated linearly; beyond the ends the
    outermost frame is repeated.

    Args:
        frames: [batch, time, feature].
        factors: [batch], around 1; above 1 is faster speech.

    Returns:
        [batch, time, feature].
    """
    last = frames.shape[1] - 1
    places = _stretched(last, factors.to(frames.dtype)).clamp(0, last)
    lower = places.floor().long().clamp(max=max(last - 1, 0))
    upper = (lower + 1).clamp(max=last)
    index = torch.arange(len(frames), device=frames.device)[:, None]
    share = (places - lower)[..., None]
    return torch.lerp(frames[index, lower], frames[index, upper], share)


def stretch_labels(labels: Tensor, factors: Tensor) -> Tensor:
    """The labels after `stretch_time`, taken from the nearest frames.

    Args:
        labels: [batch, time]; the frames may have an equal margin on both sides.
        factors: [batch].

    Returns:
        [batch, time]; IGNORE for speech from beyond the chunk.
    """
    last = labels.shape[1] - 1
    places = _stretched(last, factors).round().long()
    moved = labels.gather(1, places.clamp(0, last))
    return moved.masked_fill((places < 0) | (places > last), IGNORE)


def random_masks(frames: Tensor, bands: int, length: int) -> Tensor:
    """Sets a random run of bands and one of frames to 0, the mean, in each chunk.

    Args:
        frames: [batch, time, feature].
        bands: largest width of the mask over features; all widths are equally likely.
        length: the same over frames.

    Returns:
        [batch, time, feature].
    """
    # The library draws a width strictly below its bound.
    for axis, widest in ((2, bands), (1, length)):
        if widest:
            frames = mask_along_axis_iid(frames, widest + 1, 0.0, axis)
    return frames


def _stretched(last: int, factors: Tensor) -> Tensor:
    offsets = torch.arange(last + 1, device=factors.device, dtype=factors.dtype)
    offsets = offsets - last / 2
    return last / 2 + offsets * factors[:, None]  # (batch, time)
