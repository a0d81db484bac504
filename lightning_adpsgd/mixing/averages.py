"""The arithmetic of an average, in which all modes and all writings round alike."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_adpsgd.topology.topology import Shares


def average(
    rows: Mapping[int, Tensor] | Sequence[Tensor], takes: Shares, into: Tensor
) -> None:
    """``sum_j T[j, i] w_j``, of what `i` takes from whom."""
    # In the order of the index, so that all writings round alike.
    (first, share), *others = sorted(takes.items())
    torch.mul(rows[first], share, out=into)
    for j, share in others:
        into.add_(rows[j], alpha=share)


def keep_change(average: Tensor, own: Tensor, gain: float) -> Tensor:
    """Turns an average into what it changes: ``gamma (sum_j T[j, i] w_j - w_i)``.

    Returns:
        Whether it was refused, as a tensor of one truth.
    """
    return leave_out_if_not_finite(average.sub_(own).mul_(gain))


def leave_out_if_not_finite(change: Tensor) -> Tensor:
    """Makes a change zero that is not finite, and says whether, as a tensor.

    A diverged super-learner must not take the others with it. A GPU is not asked
    whether one has: that would stop the thread until it comes to it.
    """
    refused = ~torch.isfinite(change.sum())
    if change.device.type != "cpu" or refused:
        change.masked_fill_(refused, 0.0)
    return refused
