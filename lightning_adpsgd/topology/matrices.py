"""Mixing matrices: their requirements, and how fast they mix.

A mixing matrix T is doubly stochastic, S x S, float64; column i says what super-learner
i takes from whom: ``w_i <- sum_j T[j, i] w_j`` (arXiv 2110.11199; AD-PSGD, 1710.06952).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Below this the mean is exact: 1024 products of numbers rounded to float64.
_ROUNDING = 1e-12
_TOLERANCE = 1e-9  # allowed error of the sum of a row or column


def identity(num_super_learners: int) -> Tensor:
    """The matrix of a round without exchanges."""
    return torch.eye(num_super_learners, dtype=torch.float64, device="cpu")


def complete(num_super_learners: int) -> Tensor:
    """The matrix with which each takes 1/S of all, so that one round gives the mean."""
    shape = (num_super_learners, num_super_learners)
    return torch.full(shape, 1 / num_super_learners, dtype=torch.float64, device="cpu")


def with_gain(mixing: Tensor, gain: float) -> Tensor:
    """T_gamma = (1 - gamma) I + gamma T: the mixing matrix with gain gamma."""
    return (1 - gain) * identity(len(mixing)) + gain * mixing


def contraction(rounds: Sequence[Tensor]) -> float:
    """The factor per round by which the slowest disagreement shrinks, over a period.

    It is the spectral radius of the product of the rounds on the vectors of mean zero,
    to the power of one over the number of rounds. It is 0 if the product is the exact
    mean. For one matrix it is |lambda_2|, and 1 - |lambda_2| is the spectral gap.
    """
    product = identity(len(rounds[0]))
    for mixing in rounds:
        product = product @ mixing
    rest = product - complete(len(product))
    if float(rest.abs().max()) < _ROUNDING:
        return 0.0
    return float(torch.linalg.eigvals(rest).abs().max()) ** (1 / len(rounds))


def check_mixing(mixing: Tensor) -> None:
    """Raises ValueError for a matrix that is not doubly stochastic."""
    if mixing.ndim != 2 or mixing.shape[0] != mixing.shape[1]:
        raise ValueError(
            f"a mixing matrix must be square, got shape {tuple(mixing.shape)}"
        )
    if not bool((mixing >= 0).all()):
        raise ValueError(
            f"a mixing matrix must have no negative entry, got {mixing.min()}"
        )
    for axis, name in enumerate(("column", "row")):
        error = (mixing.sum(axis) - 1).abs().max().item()
        if error > _TOLERANCE:
            raise ValueError(
                f"each {name} of a mixing matrix must sum to 1, one is off by "
                f"{error:.3g}; thirds and the like need `dtype=torch.float64`"
            )


def check_consensus(rounds: Sequence[Tensor]) -> None:
    """Raises ValueError for a period of matrices that never reaches consensus."""
    size = len(rounds[0])
    edges = (edge for mixing in rounds for edge in mixing.nonzero().tolist())
    check_connected(size, edges)
    # Where each keeps a share of its own in each round, any disagreement shrinks.
    keeps_own = all(bool((mixing.diagonal() > 0).all()) for mixing in rounds)
    if size > 1 and not keeps_own and contraction(rounds) > 1 - _ROUNDING:
        raise ValueError(
            "`topology` preserves a disagreement, so that consensus is never "
            "reached; leave each super-learner a share of its own weights, as "
            "(I + T) / 2 does"
        )


def check_connected(size: int, edges: Iterable[Sequence[int]]) -> None:
    """Raises ValueError for edges that do not connect all super-learners."""
    apart = _apart(size, edges)
    if apart:
        some = ", ".join(map(str, apart[:8])) + (", ..." if len(apart) > 8 else "")
        raise ValueError(
            f"`topology` must connect all {size} super-learners within its period, but "
            f"no path leads from super-learner 0 to {some}; add edges between the parts"
        )


def _apart(size: int, edges: Iterable[Sequence[int]]) -> list[int]:
    links: list[set[int]] = [set() for _ in range(size)]
    for i, j in edges:
        links[i].add(j)
        links[j].add(i)
    reached, frontier = {0}, [0]
    while frontier:
        found = links[frontier.pop()] - reached
        reached |= found
        frontier += found
    return sorted(set(range(size)) - reached)
