"""Changes to training frames that leave their labels true.

Speakers differ most in the length of their vocal tract, which stretches the frequency
axis. Stretching it at random gives the model voices that the corpus does not have
(vocal tract length perturbation, Jaitly and Hinton 2013), here on log-mel energies.
"""

import torch
from torch import Tensor


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
    """Warps each chunk by a factor drawn evenly from 1 - most to 1 + most."""
    draws = torch.rand(len(frames), device=frames.device, dtype=frames.dtype)
    return warp_frequencies(frames, 1 + most * (2 * draws - 1))
