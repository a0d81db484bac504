"""The schedule of super-learners that come and go: who takes part and who asks whom.

A topology is defined for super-learners 0 ... S - 1. Where they come and go, the index
of a super-learner is its position among the sorted numbers of the live ones.
Super-learners with the same list derive the same ring from it, without a vote.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from lightning_adpsgd.topology.named import Topology
from lightning_adpsgd.topology.schedule import Schedule

_SIZES_TO_TRY = range(1, 9)


class LiveSchedule(NamedTuple):
    """A schedule over the live super-learners, and this one's number among them.

    The numbers are in ascending order.
    """

    schedule: Schedule
    numbers: tuple[int, ...]
    own: int

    @classmethod
    def of(cls, schedule: Schedule, numbers: Iterable[int], own: int) -> "LiveSchedule":
        """Makes the schedule of these and this one; topology, gain and seed stay."""
        ordered = tuple(sorted({*numbers, own}))
        return cls(replace(schedule, num_super_learners=len(ordered)), ordered, own)

    def asks(self, round: int) -> list[int]:
        """The peers that this super-learner asks in its own round number `round`."""
        asked = self.schedule.asks(self._index, round)
        return [self.numbers[index] for index in asked]

    def peers(self) -> list[int]:
        """All peers with which it may ever exchange, in ascending order."""
        topology, size = self.schedule.topology, len(self.numbers)
        return [self.numbers[index] for index in topology.peers(self._index, size)]

    @property
    def _index(self) -> int:
        return self.numbers.index(self.own)


def check_any_size(topology: Topology) -> None:
    """Refuses a topology that does not exist for every number of super-learners.

    Raises:
        ValueError: It does not exist for some number; the message names the smallest.
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
