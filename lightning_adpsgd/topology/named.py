"""The named topologies, as pure functions.

The shares that super-learner `index` takes in a round are column `index` of the mixing
matrix. Random topologies draw from a generator seeded by ``(seed, round)``, so that all
learners draw the same matrix.

docs/extending.md describes how to add one; all tests of properties then cover it.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lightning_adpsgd.topology.custom import (
    Matching,
    MatrixOfRound,
    from_function,
    from_sequence,
)
from lightning_adpsgd.topology.topology import (
    Shares,
    Topology,
    equal_shares,
    never_repeats,
)

TopologyLike = (
    str
    | Topology
    | Tensor
    | Sequence[Tensor]
    | Sequence[Matching]
    | Sequence[Sequence[float]]
    | MatrixOfRound
)


def ring_shares(index: int, size: int, round: int = 0, seed: int = 0) -> Shares:
    """The papers' fixed ring: a third each from itself and its two neighbours.

    For S = 2, where left and right are the same, it takes a half of each. For S >= 3,
    lambda_2 is ``(1 + 2 cos(2 pi / S)) / 3``.
    """
    return equal_shares((index, (index - 1) % size, (index + 1) % size))


def random_ring_shares(index: int, size: int, round: int, seed: int) -> Shares:
    """The ring over a random order, redrawn in each round: P^T T P."""
    order, places = _drawn_order(size, round, seed)
    place = places[index]
    return equal_shares(order[p % size] for p in (place, place - 1, place + 1))


def alternating_pairs_shares(
    index: int, size: int, round: int, seed: int = 0
) -> Shares:
    """Pair averages, in turn with the left and the right neighbour on the ring.

    With an odd S one super-learner sits out, a different one in each round.
    """
    shift = round % _two_or_all(size)
    place = _paired_place((index - shift) % size, size)
    return equal_shares((index, (place + shift) % size))


def random_pairs_shares(index: int, size: int, round: int, seed: int) -> Shares:
    """Pair averages over a random perfect matching, redrawn in each round."""
    order, places = _drawn_order(size, round, seed)
    return equal_shares((index, order[_paired_place(places[index], size)]))


def hypercube_shares(index: int, size: int, round: int, seed: int = 0) -> Shares:
    """Pair averages along the dimensions of the hypercube, one after the other.

    log2 S rounds give the exact mean. S is a power of two.
    """
    return equal_shares((index, index ^ _hop(size, round) if size > 1 else index))


def exponential_shares(index: int, size: int, round: int, seed: int = 0) -> Shares:
    """One peer at distance 2^k, where k grows by one in each round; for any S.

    Super-learner i takes half of its own weights and half of those of i + 2^k (mod S).
    If S is a power of two, this is the hypercube; otherwise it is not symmetric.
    """
    if _is_power_of_two(size):
        return hypercube_shares(index, size, round, seed)
    return equal_shares((index, (index + _hop(size, round)) % size))


def _exponential_gives(index: int, size: int, round: int, seed: int) -> Shares:
    if _is_power_of_two(size):
        return hypercube_shares(index, size, round, seed)
    return equal_shares((index, (index - _hop(size, round)) % size))


def complete_shares(index: int, size: int, round: int = 0, seed: int = 0) -> Shares:
    """Shares of 1/S of all super-learners: one round gives the mean."""
    return equal_shares(range(size))


def grid_shares(index: int, size: int, round: int = 0, seed: int = 0) -> Shares:
    """A torus of rows x columns, as square as S allows; for a prime S it is a ring."""
    sides = range(math.isqrt(size), 0, -1)
    num_rows = next(side for side in sides if size % side == 0)
    num_columns = size // num_rows
    if num_rows == 1:
        return ring_shares(index, size)
    row, column = divmod(index, num_columns)
    shares: Shares = {}
    for c, share in ring_shares(column, num_columns).items():
        shares[row * num_columns + c] = share / 2
    for r, share in ring_shares(row, num_rows).items():
        place = r * num_columns + column
        shares[place] = shares.get(place, 0.0) + share / 2
    return shares


def _always_the_same(num_super_learners: int) -> int:
    return 1


def _two_or_all(num_super_learners: int) -> int:
    return 2 if num_super_learners % 2 == 0 else num_super_learners


def _one_per_bit(num_super_learners: int) -> int:
    return max(1, (num_super_learners - 1).bit_length())


def _check_power_of_two(num_super_learners: int) -> None:
    if not _is_power_of_two(num_super_learners):
        raise ValueError(
            '`topology="hypercube"` needs a power of two super-learners, got '
            f'{num_super_learners}; "exponential" takes any number'
        )


TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("ring", ring_shares, _always_the_same),
        Topology("random_ring", random_ring_shares, never_repeats),
        Topology("alternating_pairs", alternating_pairs_shares, _two_or_all),
        Topology("random_pairs", random_pairs_shares, never_repeats),
        Topology("exponential", exponential_shares, _one_per_bit, _exponential_gives),
        Topology(
            "hypercube", hypercube_shares, _one_per_bit, check_size=_check_power_of_two
        ),
        Topology("complete", complete_shares, _always_the_same),
        Topology("grid", grid_shares, _always_the_same),
    )
}


def find_topology(topology: TopologyLike) -> Topology:
    """The topology for the argument `topology` of a strategy.

    Args:
        topology: name; `Topology`; one mixing matrix, as a tensor, array or rows;
            several matrices or matchings (lists of pairs), which take turns; or a
            function, see `from_function`.

    Raises:
        ValueError: The argument is none of these, or not a topology.
    """
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, str):
        if topology not in TOPOLOGIES:
            names = ", ".join(repr(known) for known in TOPOLOGIES)
            raise ValueError(f"`topology` must be one of {names}, got {topology!r}")
        return TOPOLOGIES[topology]
    if callable(topology):
        return from_function(topology)
    return from_sequence(topology)


def _paired_place(place: int, size: int) -> int:
    """The other member of the pair (0, 1), (2, 3), ...; itself if it has none."""
    other = place ^ 1
    return other if other < size else place


def _is_power_of_two(num: int) -> bool:
    return num & (num - 1) == 0


def _hop(size: int, round: int) -> int:
    return 1 << round % _one_per_bit(size)


@lru_cache(maxsize=16)  # the super-learners of a process share one draw
def _drawn_order(size: int, round: int, seed: int) -> tuple[list[int], list[int]]:
    """A random order, and its inverse."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + round) % 2**63)
    order = torch.randperm(size, generator=generator, device="cpu")
    return order.tolist(), order.argsort().tolist()
