"""User-defined topologies: mixing matrices, matchings, or a function.

They are checked when they are passed, and again when the number of super-learners is
known. They must be doubly stochastic, of that size, and connected, so that consensus is
reached. They can be pickled for spawned learners.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lightning_adpsgd.topology.matrices import (
    check_connected,
    check_consensus,
    check_mixing,
)
from lightning_adpsgd.topology.topology import (
    Shares,
    Topology,
    equal_shares,
    never_repeats,
)

MatrixOfRound = Callable[[int, int, int], Tensor]
Matching = Sequence[tuple[int, int]]
Partners = dict[int, int]


def from_matrices(matrices: Sequence[Tensor | Sequence[Sequence[float]]]) -> Topology:
    """Makes a schedule of mixing matrices, each [S, S], that take turns.

    In asynchronous modes, the weight of an edge sets how often it has an exchange. The
    heaviest edge of the schedule has one in each of its rounds, an edge of half that
    weight in every second one.

    Raises:
        ValueError: a matrix is not doubly stochastic or not of the first one's shape,
            or consensus would never be reached.
    """
    rounds = list[Tensor]()
    for number, matrix in enumerate(matrices):
        what = f"matrix {number} of `topology`"
        rounds.append(_as_mixing(matrix, what, rounds[0].shape if rounds else None))
    check_consensus(rounds)
    heaviest = max(_heaviest(mixing) for mixing in rounds)
    return Topology(
        "matrices",
        partial(_column, matrix := partial(_in_turn, rounds)),
        partial(_always, len(rounds)),
        gives=partial(_row, matrix),
        frequencies=partial(_frequencies, matrix, heaviest),
        check_size=partial(_check_same_size, len(rounds[0])),
    )


def from_matchings(matchings: Sequence[Matching]) -> Topology:
    """Makes a schedule of matchings that take turns; each pair takes its mean.

    A super-learner that is in no pair of a matching sits out that round.

    Raises:
        ValueError: a pair does not have two different super-learners, or a
            super-learner is in two pairs of one matching.
    """
    partners = [_partners(pairs, number) for number, pairs in enumerate(matchings)]
    return Topology(
        "matchings",
        partial(_half_of_partner, partners),
        partial(_always, len(partners)),
        check_size=partial(_check_matchings, partners),
    )


def from_function(matrix: MatrixOfRound) -> Topology:
    """Makes a schedule from a function ``(S, round, seed) -> T``, where T is [S, S].

    The function must be pure, and the same in all learners. Any two super-learners may
    meet, so all are connected. Each matrix is checked in its round; whether the
    matrices lead to consensus is up to the function.
    """
    checked = partial(_checked, matrix)
    return Topology(
        "function",
        partial(_column, checked),
        never_repeats,
        gives=partial(_row, checked),
        frequencies=partial(_frequencies, checked, None),
        check_size=partial(checked, round=0, seed=0),
    )


def from_sequence(given: Any) -> Topology:
    """Makes a topology from one matrix, several matrices, or matchings.

    Raises:
        ValueError: One is no mixing matrix or matching, or they differ in size.
    """
    if hasattr(given, "__array__"):  # a tensor, or an array of NumPy's
        return from_matrices([given])
    match given:
        case [first, *_] if hasattr(first, "__array__"):
            return from_matrices(given)
        case [[float() | int(), *_], *_]:
            return from_matrices([given])
        case [[] | [[int(), int()], *_], *_]:
            return from_matchings(given)
    raise ValueError(
        "`topology` must be a name, a matrix, a sequence of matrices or of matchings "
        f"such as [[(0, 1), (2, 3)], [(1, 2), (3, 0)]], or a function, got {given!r}"
    )


# --- matrices


def _in_turn(rounds: Sequence[Tensor], size: int, round: int, seed: int) -> Tensor:
    return rounds[round % len(rounds)]


@lru_cache(maxsize=8)
def _checked(matrix: MatrixOfRound, size: int, round: int, seed: int) -> Tensor:
    what = f"the matrix that `topology` gives for round {round}"
    return _as_mixing(matrix(size, round, seed), what, torch.Size((size, size)))


def _column(
    matrix: MatrixOfRound, index: int, size: int, round: int, seed: int
) -> Shares:
    return _nonzero(matrix(size, round, seed)[:, index])


def _row(matrix: MatrixOfRound, index: int, size: int, round: int, seed: int) -> Shares:
    return _nonzero(matrix(size, round, seed)[index])


def _frequencies(
    matrix: MatrixOfRound,
    heaviest: float | None,
    index: int,
    size: int,
    round: int,
    seed: int,
) -> Shares:
    """The edge weights of `index` relative to the heaviest; None: one per round."""
    mixing = matrix(size, round, seed)
    weights = (mixing[index] + mixing[:, index]) / 2
    return _nonzero(weights / (heaviest or _heaviest(mixing)))


def _heaviest(mixing: Tensor) -> float:
    edges = (mixing + mixing.T) / 2
    return float(edges.fill_diagonal_(0).max())


def _nonzero(shares: Tensor) -> Shares:
    places = shares.nonzero().flatten()
    return dict(zip(places.tolist(), shares[places].tolist(), strict=True))


def _as_mixing(given: Any, what: str, shape: torch.Size | None) -> Tensor:
    """A mixing matrix on the host, in double precision; checks it, and its shape."""
    try:
        mixing = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} must be a matrix of numbers: {error}") from None
    if shape is not None and mixing.shape != shape:
        raise ValueError(
            f"{what} must be of shape {tuple(shape)}, got {tuple(mixing.shape)}"
        )
    try:
        check_mixing(mixing)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    return mixing


def _check_same_size(size: int, num_super_learners: int) -> None:
    if num_super_learners != size:
        raise ValueError(
            f"`topology` has matrices for {size} super-learners, but there are "
            f"{num_super_learners}: start {size}, or pass matrices of as many rows"
        )


# --- matchings


def _always(num_rounds: int, num_super_learners: int) -> int:
    return num_rounds


def _half_of_partner(
    partners: Sequence[Partners], index: int, size: int, round: int, seed: int
) -> Shares:
    return equal_shares((index, partners[round % len(partners)].get(index, index)))


def _partners(pairs: Matching, number: int) -> Partners:
    partners: Partners = {}
    for pair in pairs if isinstance(pairs, Iterable) else (pairs,):
        match pair:
            case [int(i), int(j)] if i != j and min(i, j) >= 0:
                pass
            case _:
                raise ValueError(
                    "a pair in `topology` must consist of two super-learners, counted "
                    f"from 0, got {pair!r} in matching {number}"
                )
        if twice := {i, j} & partners.keys():
            raise ValueError(
                f"super-learner {min(twice)} is in two pairs of matching {number} of "
                "`topology`; put one of them into another matching"
            )
        partners |= {i: j, j: i}
    return partners


def _check_matchings(partners: Sequence[Partners], num_super_learners: int) -> None:
    highest = max((i for pairs in partners for i in pairs), default=0)
    if highest >= num_super_learners:
        raise ValueError(
            f"`topology` has a pair with super-learner {highest}, but there are "
            f"{num_super_learners}, counted from 0: leave the pair out, or start more"
        )
    edges = (edge for pairs in partners for edge in pairs.items())
    check_connected(num_super_learners, edges)
