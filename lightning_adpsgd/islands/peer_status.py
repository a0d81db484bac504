"""An island's belief about each of the others. Pure.

    status     on the member list   in the topology
    ALIVE      yes                  yes
    SUSPECT    yes                  no: it cannot be reached, and is dialed again
    DEAD       no                   no: the members agree that it is dead
    LEFT       perhaps              no: it has said goodbye, and is not dialed again

While this island is itself off the list, the others are DEAD for it, listed or not. The
terms are those of SWIM (Das, Gupta and Motivala, 2002). Only `transition` changes a
status: `connections` calls it with an observation, and acts on the result.
"""

from enum import Enum, auto
from typing import NamedTuple

from lightning_adpsgd.islands.member_list import Member

# The longest pause bounds how long a healed link stays unused. It is longer after a
# dial that has failed, because a dial keeps all others waiting for seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_AFTER_DIAL_S = 0.5, 8.0, 30.0


class Status(Enum):
    """The belief about a peer; see the module."""

    ALIVE = auto()
    SUSPECT = auto()
    DEAD = auto()
    LEFT = auto()


class Event(Enum):
    """An observation about a peer."""

    LISTED = auto()  # it is on the member list
    UNLISTED = auto()  # it is off the list, without having left
    LOST = auto()  # its connection has broken
    SILENT = auto()  # its connection has broken, because nothing came over it
    DIAL_FAILED = auto()
    PROBED = auto()  # its host was probed, with any result
    PROBE_FAILED = auto()
    REACHED = auto()  # it was dialed successfully
    CALLED = auto()  # it has dialed this island
    GOODBYE = auto()  # it has announced that it leaves for good
    FORGOTTEN = auto()  # this island is itself off the list


class News(Enum):
    """The news of a transition for the log."""

    NONE = auto()
    LOST = auto()
    LEFT = auto()
    REACHABLE = auto()
    BACK = auto()


class Peer(NamedTuple):
    """A member and the belief about it.

    Attributes:
        is_reported: whether its loss has been logged since it was last reachable.
        needs_probe: whether to check that anything listens at its address.
        pause_s: seconds between two attempts to reach a suspect.
        retry_at: time of the next attempt, by the monotonic clock.
    """

    member: Member
    status: Status = Status.ALIVE
    is_reported: bool = False
    needs_probe: bool = False
    pause_s: float = 0.0
    retry_at: float = 0.0

    @property
    def is_present(self) -> bool:
        """Whether it takes part as far as known, reachable or not."""
        return self.status in (Status.ALIVE, Status.SUSPECT)

    def is_due(self, now: float) -> bool:
        """Whether it is time to try to reach it again."""
        return self.status is Status.SUSPECT and self.retry_at <= now


def transition(peer: Peer, event: Event, now: float) -> tuple[Peer, News]:
    """The belief about a peer after an event, and the news to log."""
    if event is Event.LISTED and peer.status is Status.DEAD:
        return Peer(peer.member), News.BACK
    if event is Event.LISTED or not peer.is_present:
        return peer, News.NONE
    match event:
        case Event.LOST | Event.SILENT:
            is_lost = event is Event.LOST
            return _report(_suspect(peer, now)._replace(needs_probe=is_lost))
        case Event.DIAL_FAILED | Event.PROBE_FAILED:
            return _unreachable(peer, event, now)
        case Event.REACHED:
            news = News.NONE if peer.status is Status.ALIVE else News.REACHABLE
            return Peer(peer.member), news
        case Event.PROBED:
            return peer._replace(needs_probe=False), News.NONE
        case Event.CALLED:
            return peer._replace(retry_at=now), News.NONE
        case Event.GOODBYE:
            left = Peer(peer.member, Status.LEFT)
            return left, News.NONE if peer.is_reported else News.LEFT
        case Event.UNLISTED:
            dead = Peer(peer.member, Status.DEAD)
            return dead, News.NONE if peer.is_reported else News.LOST
        case Event.FORGOTTEN:
            return Peer(peer.member, Status.DEAD), News.NONE


def _unreachable(peer: Peer, event: Event, now: float) -> tuple[Peer, News]:
    dialed = event is Event.DIAL_FAILED
    suspect = _suspect(peer, now, _LONGEST_AFTER_DIAL_S if dialed else _LONGEST_PAUSE_S)
    suspect = suspect._replace(needs_probe=dialed)
    # Not logged yet: the next read of the member list may show its goodbye.
    return (suspect, News.NONE) if peer.status is Status.ALIVE else _report(suspect)


def _suspect(peer: Peer, now: float, longest_s: float = _LONGEST_PAUSE_S) -> Peer:
    pause_s = min(2 * peer.pause_s, longest_s) or _FIRST_PAUSE_S
    return peer._replace(status=Status.SUSPECT, pause_s=pause_s, retry_at=now + pause_s)


def _report(peer: Peer) -> tuple[Peer, News]:
    news = News.NONE if peer.is_reported else News.LOST
    return peer._replace(is_reported=True), news
