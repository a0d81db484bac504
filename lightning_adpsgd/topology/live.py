"""Who takes part at present, in which order, and who asks whom.

A topology knows super-learners 0 ... S - 1. Where they come and go, those who are there
are sorted by their numbers, and a super-learner's place in that list is its index: all
who know the same list draw the same ring from it, without a vote.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from lightning_adpsgd.topology.named import Topology
from lightning_adpsgd.topology.schedule import Schedule

_SIZES_TO_TRY = range(1, 9)


class Circle(NamedTuple):
    """The live super-learners, and the own place among them.

    Attributes:
        schedule: Of as many as there are.
        numbers: Of the live super-learners, in ascending order.
        own: The own number, one of them.
    """

    schedule: Schedule
    numbers: tuple[int, ...]
    own: int

    @classmethod
    def of(cls, schedule: Schedule, numbers: Iterable[int], own: int) -> "Circle":
        """The circle of these and oneself, with the same topology, gain and seed."""
        ordered = tuple(sorted({*numbers, own}))
        return cls(replace(schedule, num_super_learners=len(ordered)), ordered, own)

    def asks(self, round: int) -> list[int]:
        """Whom the own super-learner asks in its own round of this number."""
        asked = self.schedule.asks(self._index, round)
        return [self.numbers[index] for index in asked]

    def peers(self) -> list[int]:
        """All whom it may ever exchange with, in ascending order."""
        topology, size = self.schedule.topology, len(self.numbers)
        return [self.numbers[index] for index in topology.peers(self._index, size)]

    @property
    def _index(self) -> int:
        return self.numbers.index(self.own)


def check_any_size(topology: Topology) -> None:
    """Refuses a topology that does not exist for every number of super-learners.

    Raises:
        ValueError: Names the smallest number for which it does not exist.
    """
    for size in _SIZES_TO_TRY:
        try:
            topology.check_size(size)
        except ValueError as error:
            raise ValueError(
                "`topology` must exist for any number of super-learners with "
                f"`islands`, where they come and go, got {topology.name!r}, which does "
                f"not for {size}: {error}"
            ) from None
