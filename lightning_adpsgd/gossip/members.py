"""The super-learners that a learner exchanges with: fixed, or coming and going."""

from collections.abc import Callable, Iterable

from lightning_adpsgd.gossip.protocol import BEGINNING
from lightning_adpsgd.topology.schedule import LiveSchedule, Schedule
from lightning_adpsgd.transport.base import PeerLost


def fail(peer: int, error: PeerLost) -> None:
    """Raises the error: among fixed members, one loss is the failure of all."""
    raise error


class Members:
    """The super-learners to exchange with, and the progress that a learner tells them.

    Args:
        numbers: numbers of the super-learners that are present at the start.
        on_lost: called by a thread that lost a peer, with its number and the error.
        on_left: function called by the answering thread of a peer that stops asking. It
            gets the peer's number, and whether the peer leaves all others as well.
            None: members are fixed, and pause and end together.

    Attributes:
        live_schedule: schedule of the live super-learners; the thread that follows the
            member list replaces it as a whole, and other threads read it.
        position: progress of this learner; written by the training thread.
        wants_to_leave: whether all learners of the super-learner should leave at one
            step; set by any thread of any one of them.
        are_fixed: whether all members are present from the start to the end.
    """

    def __init__(
        self,
        schedule: Schedule,
        numbers: Iterable[int],
        own: int,
        on_lost: Callable[[int, PeerLost], None] = fail,
        on_left: Callable[[int, bool], None] | None = None,
    ) -> None:
        self.live_schedule = LiveSchedule.of(schedule, numbers, own)
        self.position = BEGINNING
        self.wants_to_leave = False
        self.on_lost, self.on_left = on_lost, on_left
        self.are_fixed = on_left is None

    @classmethod
    def fixed(cls, schedule: Schedule, own: int) -> "Members":
        """The fixed super-learners of one job, including `own`."""
        return cls(schedule, range(schedule.num_super_learners), own)
