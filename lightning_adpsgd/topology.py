"""Who averages with whom: mixing matrices as pure functions of the round number.

A mixing matrix T is doubly stochastic, S x S, float64; column i says what super-learner
i takes from whom: ``w_i <- sum_j T[j, i] w_j`` (arXiv 2110.11199; AD-PSGD, 1710.06952).
Nothing here communicates, and nothing keeps state: random topologies draw from a
generator seeded by ``(seed, round)``, so that all learners draw the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MatrixOfRound = Callable[[int, int, int], Tensor]


@dataclass(frozen=True)
class Topology:
    """A named schedule of mixing matrices.

    Args:
        name: What `topology=` calls it.
        matrix: ``(num_super_learners, round, seed) -> T``, shape [S, S], float64.
        period: ``num_super_learners -> rounds`` until the schedule repeats; 0 for a
            schedule that never does (drawn at random), where anybody may meet anybody.
    """

    name: str
    matrix: MatrixOfRound
    period: Callable[[int], int]

    def peers(self, index: int, num_super_learners: int) -> list[int]:
        """All super-learners that `index` may ever average with, in ascending order."""
        period = self.period(num_super_learners)
        if period == 0:
            return [j for j in range(num_super_learners) if j != index]
        rounds = (self.matrix(num_super_learners, r, 0) for r in range(period))
        return sorted({j for mixing in rounds for j in neighbours(mixing, index)})


def identity(num_super_learners: int) -> Tensor:
    """The matrix of a round in which nobody meets anybody."""
    return torch.eye(num_super_learners, dtype=torch.float64)


def ring(num_super_learners: int, round: int = 0, seed: int = 0) -> Tensor:
    """The papers' fixed ring: a third each of oneself, the left and the right.

    For S = 2, where left and right are the same, both halves; lambda_2 is
    ``(1 + 2 cos(2 pi / S)) / 3`` for S >= 3.
    """
    if num_super_learners <= 2:
        return complete(num_super_learners)
    eye = identity(num_super_learners)
    return (eye + eye.roll(1, dims=0) + eye.roll(-1, dims=0)) / 3


def random_ring(num_super_learners: int, round: int, seed: int) -> Tensor:
    """The ring over a permutation drawn anew in each round: P^T T P."""
    order = _permutation(num_super_learners, round, seed)
    place = order.argsort()
    return ring(num_super_learners)[place][:, place]


def alternating_pairs(num_super_learners: int, round: int, seed: int = 0) -> Tensor:
    """Pair averages with the left and the right neighbour of the ring in turn.

    With an odd S one super-learner sits out, another one in each round.
    """
    shift = round % 2 if num_super_learners % 2 == 0 else round % num_super_learners
    order = torch.arange(num_super_learners).roll(-shift)
    return _pairs(order)


def random_pairs(num_super_learners: int, round: int, seed: int) -> Tensor:
    """Pair averages over a perfect matching drawn anew in each round."""
    return _pairs(_permutation(num_super_learners, round, seed))


def exponential(num_super_learners: int, round: int, seed: int = 0) -> Tensor:
    """One peer at distance 2^k, k growing by one in each round.

    For S a power of two these are the edges of the hypercube, and log2 S rounds give
    the exact mean; otherwise i takes half of i + 2^k (mod S), which is not symmetric.
    """
    if num_super_learners == 1:
        return identity(1)
    hop = 1 << round % _log2(num_super_learners)
    index = torch.arange(num_super_learners)
    power_of_two = num_super_learners & (num_super_learners - 1) == 0
    source = index ^ hop if power_of_two else (index + hop) % num_super_learners
    eye = identity(num_super_learners)
    return (eye + eye[:, source]) / 2


def complete(num_super_learners: int, round: int = 0, seed: int = 0) -> Tensor:
    """Everybody takes 1/S of everybody: one round gives the mean."""
    shape = (num_super_learners, num_super_learners)
    return torch.full(shape, 1 / num_super_learners, dtype=torch.float64)


def grid(num_super_learners: int, round: int = 0, seed: int = 0) -> Tensor:
    """A torus of rows x columns as square as S allows; a prime S makes it a ring."""
    rows = next(
        r
        for r in range(math.isqrt(num_super_learners), 0, -1)
        if num_super_learners % r == 0
    )
    columns = num_super_learners // rows
    if rows == 1:
        return ring(columns)
    along = torch.kron(identity(rows), ring(columns))
    across = torch.kron(ring(rows), identity(columns))
    return (along + across) / 2


def _always_the_same(num_super_learners: int) -> int:
    return 1


def _never_repeats(num_super_learners: int) -> int:
    return 0


def _two_or_all(num_super_learners: int) -> int:
    return 2 if num_super_learners % 2 == 0 else num_super_learners


def _one_per_bit(num_super_learners: int) -> int:
    return max(1, _log2(num_super_learners))


TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("ring", ring, _always_the_same),
        Topology("random_ring", random_ring, _never_repeats),
        Topology("alternating_pairs", alternating_pairs, _two_or_all),
        Topology("random_pairs", random_pairs, _never_repeats),
        Topology("exponential", exponential, _one_per_bit),
        Topology("complete", complete, _always_the_same),
        Topology("grid", grid, _always_the_same),
    )
}


def find_topology(topology: str | Topology) -> Topology:
    """The topology of that name; a `Topology` is returned as it is."""
    if isinstance(topology, Topology):
        return topology
    if topology not in TOPOLOGIES:
        names = ", ".join(repr(name) for name in TOPOLOGIES)
        raise ValueError(f"`topology` must be one of {names}, got {topology!r}")
    return TOPOLOGIES[topology]


def with_gain(mixing: Tensor, gain: float) -> Tensor:
    """T_gamma = (1 - gamma) I + gamma T: the same mixing, taken only in part."""
    return (1 - gain) * identity(len(mixing)) + gain * mixing


def neighbours(mixing: Tensor, index: int) -> list[int]:
    """Those that `index` takes from or gives to in one round."""
    meets = (mixing[:, index] > 0) | (mixing[index] > 0)
    return [j for j in meets.nonzero().flatten().tolist() if j != index]


def asks(mixing: Tensor, round: int, index: int) -> list[int]:
    """Whom `index` asks for a pair exchange in its own round number `round`.

    Unsynchronised learners do not share a round number, so the two ends of an edge must
    not both have to be in the same one: an end that is asked answers whatever its round
    is. The ends take turns by the parity of the round's binary digits, which makes one
    exchange per edge and round at equal speeds, and still one in two rounds of the
    faster end where the other is slow. (By the parity of the round itself an edge that
    comes back in every second round would always be the same end's.) An edge of one
    direction is asked by its taker.
    """
    takes = (mixing[:, index] > 0).tolist()
    gives = (mixing[index] > 0).tolist()
    turn = round.bit_count() % 2 == 0
    return [
        j
        for j in range(len(mixing))
        if j != index and takes[j] and (not gives[j] or (index < j) == turn)
    ]


def spectral_gap(mixing: Tensor) -> float:
    """1 - |lambda_2|: how much one round shrinks the slowest disagreement."""
    moduli = torch.linalg.eigvals(mixing).abs().sort(descending=True).values
    return 1.0 - float(moduli[1]) if len(mixing) > 1 else 1.0


def check_mixing(mixing: Tensor, tolerance: float = 1e-9) -> None:
    """Refuses a matrix that is not doubly stochastic.

    Raises:
        ValueError: The matrix is not square, has a negative entry, or a row or column
            whose sum is not one.
    """
    if mixing.ndim != 2 or mixing.shape[0] != mixing.shape[1]:
        raise ValueError(f"a mixing matrix is square, got shape {tuple(mixing.shape)}")
    if float(mixing.min()) < 0:
        raise ValueError(f"a mixing matrix has no negative entry, got {mixing.min()}")
    for axis, name in enumerate(("column", "row")):
        error = (mixing.sum(axis) - 1).abs().max().item()
        if error > tolerance:
            raise ValueError(
                f"each {name} of a mixing matrix sums to 1, one is off by {error:.3g}"
            )


def _pairs(order: Tensor) -> Tensor:
    mixing = identity(len(order))
    for i, j in order[: len(order) // 2 * 2].view(-1, 2).tolist():
        mixing[[i, i, j, j], [i, j, i, j]] = 0.5
    return mixing


def _permutation(size: int, round: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + round) % 2**63)
    return torch.randperm(size, generator=generator)


def _log2(num: int) -> int:
    return (num - 1).bit_length()
