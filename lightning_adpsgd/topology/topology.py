"""The type of a topology: who takes which share from whom, in which round.

A topology returns one column of the mixing matrix T at a time, so that a learner's
round needs no S x S matrix. It does not communicate and keeps no state. Named
topologies are in `named`, user-defined ones in `custom`.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Shares = dict[int, float]
SharesOfRound = Callable[[int, int, int, int], Shares]


def equal_shares(members: Iterable[int]) -> Shares:
    """Equal shares of all members."""
    distinct = dict.fromkeys(members)
    return dict.fromkeys(distinct, 1 / len(distinct))


def any_size(num_super_learners: int) -> None:
    """Accepts every number of super-learners."""


def never_repeats(num_super_learners: int) -> int:
    """The period 0, that of a random schedule."""
    return 0


class RoundPart(NamedTuple):
    """One super-learner's part in a round: a column and a row of T, without zeros."""

    takes: Shares
    gives: Shares


@dataclass(frozen=True)
class Topology:
    """A named schedule of mixing matrices.

    Args:
        name: value of the option `topology`.
        takes: function ``(index, num_super_learners, round, seed)`` for the shares that
            `index` takes, including its own: column `index` of T without zeros.
        period: function from the number of super-learners to the number of rounds until
            the schedule repeats; 0: it is random and never repeats, so that any two may
            meet.
        gives: the same function for row `index` of T; None: T is symmetric in every
            round.
        frequencies: function for the share of rounds in which each edge of `index` asks
            for an asynchronous exchange; None: all rounds.
        check_size: raises a `ValueError` if the topology does not exist for S.
    """

    name: str
    takes: SharesOfRound = field(repr=False)
    period: Callable[[int], int] = field(repr=False)
    gives: SharesOfRound | None = field(default=None, repr=False)
    frequencies: SharesOfRound | None = field(default=None, repr=False)
    check_size: Callable[[int], object] = field(default=any_size, repr=False)

    def matrix(self, num_super_learners: int, round: int = 0, seed: int = 0) -> Tensor:
        """The mixing matrix T of a round, float64 [S, S]."""
        size = num_super_learners
        columns = [self.takes(i, size, round, seed) for i in range(size)]
        rows = [j for column in columns for j in column]
        places = [i for i, column in enumerate(columns) for _ in column]
        shares = [share for column in columns for share in column.values()]
        mixing = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        mixing[rows, places] = torch.tensor(shares, dtype=torch.float64, device="cpu")
        return mixing

    def part(
        self, index: int, num_super_learners: int, round: int, seed: int = 0
    ) -> RoundPart:
        """The shares that `index` takes and gives in a round, by peer."""
        takes = self.takes(index, num_super_learners, round, seed)
        if self.gives is None:
            return RoundPart(takes, takes)
        return RoundPart(takes, self.gives(index, num_super_learners, round, seed))

    def peers(self, index: int, num_super_learners: int) -> list[int]:
        """All peers with which `index` may ever average, in ascending order."""
        size, period = num_super_learners, self.period(num_super_learners)
        if period == 0:
            return [j for j in range(size) if j != index]
        parts = [self.part(index, size, r) for r in range(period)]
        return sorted(
            {j for part in parts for j in (*part.takes, *part.gives)} - {index}
        )

    def asks(
        self, index: int, num_super_learners: int, round: int, seed: int = 0
    ) -> list[int]:
        """The peers that `index` asks for an exchange in its own round number `round`.

        Unsynchronised learners do not share a round number, so an end answers in any
        round. The ends take turns by the parity of the number of ones in the round's
        binary form. At equal speeds, that makes one exchange per edge and round. If one
        end is slow, the pair still exchanges in every second round of the faster end.
        (With the parity of the round itself, an edge of every second round would always
        be asked by the same end.) On a one-way edge, the end that takes asks.
        """
        key = (index, num_super_learners, round, seed)
        takes, gives = self.part(*key)
        turn = round.bit_count() % 2 == 0
        asked = [
            j
            for j in sorted(takes)
            if j != index and ((index < j) == turn or j not in gives)
        ]
        if self.frequencies is None:
            return asked
        often = self.frequencies(*key)
        return [j for j in asked if _draw(j, *key) < often[j]]


def check_part(part: RoundPart) -> None:
    """Raises ValueError for shares that would change the mean, or equal weights."""
    for verb, shares in zip(("takes", "gives"), part, strict=True):
        error = abs(sum(shares.values()) - 1)
        if not error <= 1e-9:
            raise ValueError(
                f"the shares that a super-learner {verb} in a round of `topology` must "
                f"sum to 1, they are off by {error:.3g}"
            )


def _draw(other: int, index: int, size: int, round: int, seed: int) -> float:
    """Draws a number in [0, 1), the same at both ends of an edge."""
    key = f"{min(index, other)} {max(index, other)} {size} {round} {seed}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest()) / 2**48
