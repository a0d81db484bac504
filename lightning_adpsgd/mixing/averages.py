"""The arithmetic of averages in rounds, the same for all, so that rounding agrees."""

import cmath
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_adpsgd.topology.topology import Shares
from lightning_adpsgd.weights.replica import as_real

_CACHED = 1 << 16


def average(
    rows: Mapping[int, Tensor] | Sequence[Tensor], takes: Shares, into: Tensor
) -> None:
    """Computes ``sum_j T[j, i] w_j``; `takes` is column i of T without its zeros."""
    # In the order of indices, so that all learners round alike.
    (first, share), *others = sorted(takes.items())
    torch.mul(rows[first], share, out=into)
    for j, share in others:
        into.add_(rows[j], alpha=share)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements of all tensors are finite."""
    # The sum is quick. It is finite only if all elements are; large ones may overflow.
    return all(
        cmath.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())
        for tensor in tensors
    )


def squared_norm(vector: Tensor) -> Tensor:
    """The squared norm of a vector of any dtype, [n]: float64 []."""
    # A conversion of all of it takes ten times as long as that of what a cache holds.
    pieces = as_real(vector).split(_CACHED if vector.device.type == "cpu" else 1 << 30)
    norms = [torch.linalg.vector_norm(p, dtype=torch.float64) for p in pieces]
    return torch.stack(norms).square().sum()


def keep_change(average: Tensor, own: Tensor, gain: float) -> Tensor:
    """Turns an average into a change: ``gamma (sum_j T[j, i] w_j - w_i)``.

    A diverged super-learner must not spread to others. On a GPU the result stays a
    tensor, because reading it would block the thread until the GPU has computed it.

    Returns:
        Whether the change was zeroed as non-finite, a boolean tensor [].
    """
    change = average.sub_(own).mul_(gain)
    refused = ~torch.isfinite(change.sum())
    if change.device.type != "cpu" or refused:
        change.masked_fill_(refused, 0.0)
    return refused
