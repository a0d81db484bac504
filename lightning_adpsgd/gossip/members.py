"""The super-learners that a learner exchanges with: fixed, or coming and going."""

from collections.abc import Callable, Iterable

from lightning_adpsgd.gossip.protocol import BEGINNING
from lightning_adpsgd.topology.schedule import LiveSchedule, Schedule
from lightning_adpsgd.transport.base import PeerLost


def fail(peer: int, error: PeerLost) -> None:
    """Raises the error: among fixed members, one loss is the failure of all."""
    raise error


class Members:
    """The super-learners to exchange with, and what a learner tells them about itself.

    Args:
        numbers: numbers of the super-learners that are there at the start.
        own: number of this one.
        on_lost: called by a thread that has lost a peer.
        on_left: called by a thread that answered a peer which asks no more, with its
            number, whether it leaves all others as well, and the section of which it
            asked. None: the members are fixed, end together, and pause together.

    Attributes:
        circle: who asks whom; replaced as a whole, by the thread that knows who is
            there, and read by the training thread.
        position: how far this learner has come; written by the training thread.
        wants_to_leave: whether all learners of the super-learner are to end at one
            step; set by any thread of any of them.
        lost: `on_lost`.
        are_fixed: whether all are there from the start to the end.
    """

    def __init__(
        self,
        schedule: Schedule,
        numbers: Iterable[int],
        own: int,
        on_lost: Callable[[int, PeerLost], None] = fail,
        on_left: Callable[[int, bool, int], None] | None = None,
    ) -> None:
        self.circle = LiveSchedule.of(schedule, numbers, own)
        self.position = BEGINNING
        self.wants_to_leave = False
        self.lost, self._on_left = on_lost, on_left
        self.are_fixed = on_left is None

    @classmethod
    def fixed(cls, schedule: Schedule, own: int) -> "Members":
        """The super-learners of one job, of which `own` is one."""
        return cls(schedule, range(schedule.num_super_learners), own)

    @property
    def own_is_first(self) -> bool:
        """Whether this super-learner speaks for all of them."""
        return self.circle.own == self.circle.numbers[0]

    def left(self, peer: int, for_good: bool, section: int) -> None:
        """Tells that a peer asks no more of a section."""
        if self._on_left is not None:
            self._on_left(peer, for_good, section)
