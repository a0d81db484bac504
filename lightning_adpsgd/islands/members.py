"""The members of a job, and what an island believes of each. Pure.

    status     on the member list   in the ring
    ALIVE      yes                  yes
    SUSPECT    yes                  no: it cannot be reached, and is dialed again
    DEAD       no                   no: the members agree that it is dead
    LEFT       perhaps              no: it has said goodbye, and is not dialed again

The words are those of SWIM (Das, Gupta and Motivala, 2002). `transition` is the one
place in which a status changes: `connections` calls it with what it has observed, and
acts on the answer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from lightning_adpsgd.islands.rendezvous import RendezvousUnreachable

# A silence lasts over at least so many observations.
_LEAST_OBSERVATIONS = 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class Member(NamedTuple):
    """A super-learner on the member list.

    Attributes:
        number: place in every order; given once, in order of joining.
        incarnation: identifier of its processes; unique, whatever its number.
        host: name of its machine, for messages.
        addresses: where its learners listen, one "host:port" each.
    """

    number: int
    incarnation: str
    host: str
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        return f"super-learner {self.number} on host {self.host}"


@dataclass(frozen=True)
class MemberList:
    """The live members.

    Args:
        epoch: number that every change raises.
    """

    epoch: int = 0
    by_number: Mapping[int, Member] = field(default_factory=dict)

    def holds(self, member: Member) -> bool:
        """Returns whether this very incarnation is on the list."""
        found = self.by_number.get(member.number)
        return found is not None and found.incarnation == member.incarnation

    def after(self, number: int) -> list[int]:
        """Returns the other members, from the one after a number, wrapping around."""
        numbers = sorted(self.by_number)
        later = [n for n in numbers if n > number]
        return later + [n for n in numbers if n < number]

    def to_json(self) -> str:
        """Returns the text in the rendezvous; equal lists give equal texts."""
        rows = [self.by_number[n] for n in sorted(self.by_number)]
        return json.dumps([self.epoch, rows])

    @classmethod
    def from_json(cls, text: str) -> "MemberList":
        """Reads what `to_json` wrote; an empty text is an empty list."""
        if not text:
            return cls()
        try:
            epoch, rows = json.loads(text)
            members = [
                Member(int(number), str(incarnation), str(host), tuple(map(str, ways)))
                for number, incarnation, host, ways in rows
            ]
            return cls(int(epoch), {member.number: member for member in members})
        except (TypeError, ValueError) as error:
            reason = f"it holds no member list of ours: {error}"
            raise RendezvousUnreachable(reason) from error


@dataclass(frozen=True)
class Heartbeat:
    """How often a member shows that it is alive, and when it counts as dead.

    Args:
        interval_s: seconds between two heartbeats.
        silence_s: seconds without a heartbeat after which a member counts as dead.
    """

    interval_s: float = 0.5
    silence_s: float = 3.0


class SilenceWatch:
    """Measures how long heartbeats have stood still, by the observer's own clock.

    Of the time between two observations at most a quarter of `silence_s` counts. When a
    machine stands still for a while, observers and observed wake in any order, and
    no member is dead for having been asleep at the same time.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._observed_at = 0.0
        self._seen: dict[str, tuple[str, float]] = {}

    def observe(self, heartbeats: Mapping[str, str], now: float) -> list[str]:
        """Takes note of the heartbeats of the watched members.

        Args:
            heartbeats: heartbeats by incarnation; empty for a member without one.
            now: seconds of a clock that never goes back.

        Returns:
            The incarnations that were silent for too long while they were watched.
        """
        passed_s = min(now - self._observed_at, self._silence_s / _LEAST_OBSERVATIONS)
        self._observed_at, seen = now, self._seen
        self._seen = {}
        for name, heartbeat in heartbeats.items():
            before, silent_s = seen.get(name, ("", 0.0))
            is_silent = name in seen and before == heartbeat
            self._seen[name] = (heartbeat, silent_s + passed_s if is_silent else 0.0)
        return [n for n, (_, s) in self._seen.items() if s > self._silence_s]

    def forget(self) -> None:
        """Starts again: the observer itself did not look for a long time."""
        self._seen.clear()


class Status(Enum):
    """What is believed of a peer; see the module."""

    ALIVE = auto()
    SUSPECT = auto()
    DEAD = auto()
    LEFT = auto()


class Event(Enum):
    """What was observed of a peer."""

    LISTED = auto()  # it is on the member list
    UNLISTED = auto()  # it is off the list, without having left
    LOST = auto()  # its connection has broken
    SILENT = auto()  # its connection has broken, because nothing came over it
    DIAL_FAILED = auto()
    PROBED = auto()  # its host was asked, whatever it answered
    PROBE_FAILED = auto()
    REACHED = auto()  # it was dialed successfully
    CALLED = auto()  # it has dialed this island
    GOODBYE = auto()  # it leaves for good, by its own word
    FORGOTTEN = auto()  # this island is itself off the list


class News(Enum):
    """What a transition means to a reader of the log."""

    NONE = auto()
    LOST = auto()
    LEFT = auto()
    REACHABLE = auto()
    BACK = auto()


class Peer(NamedTuple):
    """A member and what is believed of it.

    Attributes:
        is_reported: whether its loss has been reported since it was last reachable.
        needs_probe: whether its host should be asked if anything listens there.
        pause_s: seconds from one attempt to reach a suspect to the next.
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
        """Whether it takes part, as far as is known, reachable or not."""
        return self.status in (Status.ALIVE, Status.SUSPECT)

    def is_due(self, now: float) -> bool:
        """Whether it is time to try to reach it again."""
        return self.status is Status.SUSPECT and self.retry_at <= now


def transition(peer: Peer, event: Event, now: float) -> tuple[Peer, News]:
    """Returns what is believed of a peer after an event, and what to report."""
    if event is Event.LISTED:
        return _listed(peer)
    if not peer.is_present:
        return peer, News.NONE
    match event:
        case Event.LOST | Event.SILENT:
            return _lost(peer, event, now)
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


def _listed(peer: Peer) -> tuple[Peer, News]:
    if peer.status is Status.DEAD:
        return Peer(peer.member), News.BACK
    return peer, News.NONE


def _lost(peer: Peer, event: Event, now: float) -> tuple[Peer, News]:
    if peer.status is Status.SUSPECT:
        return peer, News.NONE
    suspect = _suspect(peer, now)._replace(needs_probe=event is Event.LOST)
    return _report(suspect)


def _unreachable(peer: Peer, event: Event, now: float) -> tuple[Peer, News]:
    suspect = _suspect(peer, now)._replace(needs_probe=event is Event.DIAL_FAILED)
    # The member list may be about to say that it has left.
    return (suspect, News.NONE) if peer.status is Status.ALIVE else _report(suspect)


def _suspect(peer: Peer, now: float) -> Peer:
    pause_s = min(2 * peer.pause_s, _LONGEST_PAUSE_S) or _FIRST_PAUSE_S
    return peer._replace(status=Status.SUSPECT, pause_s=pause_s, retry_at=now + pause_s)


def _report(peer: Peer) -> tuple[Peer, News]:
    news = News.NONE if peer.is_reported else News.LOST
    return peer._replace(is_reported=True), news
