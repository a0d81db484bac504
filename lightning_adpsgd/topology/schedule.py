"""Which mixing matrix applies in which round, of fixed and of live super-learners.

A topology knows super-learners 0 ... S - 1. Where they come and go, the index of a
super-learner is its position among the sorted numbers of the live ones. All
super-learners that know the same list compute the same schedule, without a vote.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from lightning_adpsgd.topology.matrices import check_mixing
from lightning_adpsgd.topology.named import Topology
from lightning_adpsgd.topology.topology import RoundPart, check_part, equal_shares

_SIZES_TO_TRY = range(1, 9)


@dataclass(frozen=True)
class Schedule:
    """A topology of S super-learners, with its gain and seed.

    Args:
        gain: gamma in T_gamma = (1 - gamma) I + gamma T; 0 < gamma <= 1.
    """

    topology: Topology
    num_super_learners: int
    gain: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.topology.check_size(self.num_super_learners)

    def mixing(self, round: int) -> Tensor:
        """The matrix of a round, [S, S], checked, before the gain is applied.

        Raises:
            ValueError: The topology gives no mixing matrix.
        """
        matrix = self.topology.matrix(self.num_super_learners, round, self.seed)
        check_mixing(matrix)
        return matrix

    def part(self, index: int, round: int) -> RoundPart:
        """The checked shares that `index` takes and gives, before the gain.

        Raises:
            ValueError: They would change the mean, or equal weights.
        """
        part = self.topology.part(index, self.num_super_learners, round, self.seed)
        check_part(part)
        return part

    def asks(self, index: int, round: int) -> list[int]:
        """The peers that `index` asks in its own round number `round`."""
        return self.topology.asks(index, self.num_super_learners, round, self.seed)

    def is_mean(self, round: int) -> bool:
        """Whether all super-learners take the exact mean, as an all-reduce computes."""
        size, first = self.num_super_learners, self.first_like(round)
        return _is_mean(self.topology, size, first, self.seed)

    def first_like(self, round: int) -> int:
        """The first round that has the matrix of this one, by the topology's period."""
        period = self.topology.period(self.num_super_learners)
        return round % period if period else round


class LiveSchedule(NamedTuple):
    """A schedule over the present super-learners, whether these are fixed or not.

    `numbers` ascends, and `own` is one of them.
    """

    schedule: Schedule
    numbers: tuple[int, ...]
    own: int

    @classmethod
    def of(cls, schedule: Schedule, numbers: Iterable[int], own: int) -> "LiveSchedule":
        """Returns the schedule of these and this one; topology, gain and seed stay."""
        ordered = tuple(sorted({*numbers, own}))
        return cls(replace(schedule, num_super_learners=len(ordered)), ordered, own)

    def asks(self, round: int) -> list[int]:
        """Returns the peers that this super-learner asks in its own round `round`."""
        asked = self.schedule.asks(self._index, round)
        return [self.numbers[index] for index in asked]

    def peers(self) -> list[int]:
        """Returns all peers that it may ever exchange with, in ascending order."""
        topology, size = self.schedule.topology, len(self.numbers)
        return [self.numbers[index] for index in topology.peers(self._index, size)]

    @property
    def _index(self) -> int:
        return self.numbers.index(self.own)


def check_any_size(topology: Topology) -> None:
    """Raises ValueError unless a topology exists for any number of super-learners."""
    for size in _SIZES_TO_TRY:
        try:
            topology.check_size(size)
        except ValueError as error:
            raise ValueError(
                "`topology` must exist for any number of super-learners, because "
                f"`islands` come and go; got {topology.name!r}, which fails for {size}"
                f": {error}"
            ) from None


@lru_cache(maxsize=64)
def _is_mean(topology: Topology, size: int, round: int, seed: int) -> bool:
    # For all indices: a learner that posts an all-reduce must know that the others do.
    mean = equal_shares(range(size))
    return all(topology.takes(i, size, round, seed) == mean for i in range(size))
