"""The arithmetic of an average: one for all modes, so that they round alike."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_adpsgd.topology.topology import Shares


def average(
    rows: Mapping[int, Tensor] | Sequence[Tensor], takes: Shares, into: Tensor
) -> None:
    """Writes ``sum_j T[j, i] w_j``; `takes` is column i of T without its zeros."""
    # In the order of the index, so that all learners round alike.
    (first, share), *others = sorted(takes.items())
    torch.mul(rows[first], share, out=into)
    for j, share in others:
        into.add_(rows[j], alpha=share)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether the sums of all tensors are finite, and so all their elements."""
    return all(bool(torch.isfinite(tensor.sum())) for tensor in tensors)


def keep_change(average: Tensor, own: Tensor, gain: float) -> Tensor:
    """Turns an average into what it changes: ``gamma (sum_j T[j, i] w_j - w_i)``.

    Returns:
        Whether it was refused, as a boolean tensor of no dimension.
    """
    return leave_out_if_not_finite(average.sub_(own).mul_(gain))


def leave_out_if_not_finite(change: Tensor) -> Tensor:
    """Sets a non-finite change to zero; returns whether it did, as a tensor.

    A diverged super-learner must not take the others with it. On a GPU the answer stays
    a tensor: to read it would stop the thread until the GPU has come so far.
    """
    refused = ~torch.isfinite(change.sum())
    if change.device.type != "cpu" or refused:
        change.masked_fill_(refused, 0.0)
    return refused
