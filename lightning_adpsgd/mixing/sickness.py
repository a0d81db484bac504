"""Rounds of averaging in which some learner's weights are infinite or not a number."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_adpsgd.topology.topology import Shares


class SickLearner(FloatingPointError):
    """A learner's weights went astray more often than it may take those of others."""


def once_too_often(what: str, limit: int) -> SickLearner:
    """What ends a learner that has used up its reloads.

    Args:
        what: Whose weights went astray, how, and when.
        limit: `max_reloads`, all of which are done.
    """
    return SickLearner(
        f"{what}, after {limit} reloads from its peers (`max_reloads={limit}`): look "
        "at its data and its device, or lower the learning rate"
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether all of it is, and its sum."""
    return bool(torch.isfinite(tensor.sum()))


def healthy_shares(rows: Mapping[int, Tensor], takes: Shares, own: int) -> Shares:
    """What is taken from whom where those are left out whose row is not finite.

    What they would have given comes from the own row, so that two who leave each other
    out change nothing for a third. If the own row is not finite itself, the shares of
    the rest grow until they are an average again.

    Returns:
        Shares that sum to 1; empty if no row is finite.
    """
    fine = {j: share for j, share in takes.items() if is_finite(rows[j])}
    if is_finite(rows[own]):
        return {**fine, own: 1.0 - sum(s for j, s in fine.items() if j != own)}
    total = sum(fine.values())
    return {j: share / total for j, share in fine.items()}
