"""The super-learners that a learner exchanges with: fixed, or coming and going."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from typing_extensions import override

from lightning_adpsgd.gossip.protocol import BEGINNING
from lightning_adpsgd.topology.live import LiveSchedule
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.base import PeerLost


class Members(ABC):
    """Who there is to exchange with, and what a learner tells them of itself.

    Args:
        schedule: topology, gain and seed.
        numbers: numbers of the super-learners that are there at the start.
        own: number of this one.

    Attributes:
        circle: who asks whom; replaced as a whole, by the thread that knows who is
            there, and read by the training thread.
        position: how far this learner has come; written by the training thread.
        wants_to_leave: whether all learners of the super-learner are to end at one
            step; set by any thread of any of them.
    """

    def __init__(self, schedule: Schedule, numbers: Iterable[int], own: int) -> None:
        self.circle = LiveSchedule.of(schedule, numbers, own)
        self.position = BEGINNING
        self.wants_to_leave = False

    @property
    def own_is_first(self) -> bool:
        """Whether this super-learner speaks for all of them."""
        return self.circle.own == self.circle.numbers[0]

    @property
    @abstractmethod
    def are_fixed(self) -> bool:
        """Whether all are there from the start to the end, and pause together."""

    @abstractmethod
    def lost(self, peer: int, error: PeerLost) -> None:
        """Called by a thread that has lost a peer."""

    @abstractmethod
    def left(self, peer: int, for_good: bool) -> None:
        """Called by a thread that answered a peer which asks no more.

        Args:
            peer: number of the peer.
            for_good: whether it leaves all others as well.
        """


class FixedMembers(Members):
    """The super-learners of one job: the loss of one is the failure of all.

    Args:
        schedule: topology, number of super-learners, gain and seed.
        own: number of this one.
    """

    def __init__(self, schedule: Schedule, own: int) -> None:
        super().__init__(schedule, range(schedule.num_super_learners), own)

    @property
    @override
    def are_fixed(self) -> bool:
        return True

    @override
    def lost(self, peer: int, error: PeerLost) -> None:
        raise error

    @override
    def left(self, peer: int, for_good: bool) -> None:
        """The end of the job is the end of all."""


class LiveMembers(Members):
    """Super-learners that come and go: the loss of one ends its two threads alone.

    Args:
        schedule: topology, gain and seed; of any size.
        own: number of this one.
        on_lost: called as `lost` is.
        on_left: called as `left` is.
    """

    def __init__(
        self,
        schedule: Schedule,
        own: int,
        on_lost: Callable[[int, PeerLost], None],
        on_left: Callable[[int, bool], None],
    ) -> None:
        super().__init__(schedule, (), own)
        self._on_lost, self._on_left = on_lost, on_left

    @property
    @override
    def are_fixed(self) -> bool:
        return False

    @override
    def lost(self, peer: int, error: PeerLost) -> None:
        self._on_lost(peer, error)

    @override
    def left(self, peer: int, for_good: bool) -> None:
        self._on_left(peer, for_good)
