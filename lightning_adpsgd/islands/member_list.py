"""The member list of a job: who is on it, who is ahead, who is silent. Pure."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import NamedTuple

from lightning_adpsgd.transport.links.sockets import Address

_MOST, _MOST_DIGITS, _LONGEST_TEXT, _MOST_ADDRESSES = 1 << 31, 18, 256, 1 << 12
_MOST_EPOCHS, _GOODBYE = 1 << 62, "goodbye"


class Member(NamedTuple):
    """An island on the member list.

    Attributes:
        number: number that defines every order, drawn in order of joining; drawn again
            if another member has it when this one enters again.
        incarnation: unique identifier of its processes, whatever its number.
        host: name of its machine, for messages.
        addresses: addresses at which its learners listen, one "host:port" each.
        origin: incarnation of the island that began the training of its weights;
            weights of two origins are never averaged. Empty: unknown.
        proof: signature of a holder of the token; empty without a token.
    """

    number: int
    incarnation: str
    host: str
    addresses: tuple[str, ...]
    origin: str = ""
    proof: str = ""

    def __str__(self) -> str:
        return f"island {self.number} on host {self.host}"

    def is_foreign_to(self, other: "Member") -> bool:
        """Whether the weights of the two members come from different trainings."""
        return bool(self.origin and other.origin) and self.origin != other.origin

    @classmethod
    def from_row(cls, row: object) -> "Member":
        """Reads a JSON row, field by field.

        Raises:
            ValueError: A field is missing, of the wrong type, too long or out of range.
        """
        if not isinstance(row, list) or not 4 <= len(row) <= len(cls._fields):
            most = len(cls._fields)
            raise ValueError(f"a row must have 4 to {most} fields, got {short(row)}")
        number, incarnation, host, addresses, *rest = row
        # A bool is an int in Python, but not a member's number.
        if type(number) is not int or not 0 <= number < _MOST:
            bound = f"a whole number from 0 to {_MOST - 1}, got {short(number)}"
            raise ValueError(f"`number` of a member must be {bound}")
        if type(addresses) is not list or len(addresses) > _MOST_ADDRESSES:
            bound = f"a list of at most {_MOST_ADDRESSES}, got {short(addresses)}"
            raise ValueError(f"`addresses` of a member must be {bound}")
        for text in (incarnation, host, *addresses, *rest):
            if type(text) is not str or len(text) > _LONGEST_TEXT:
                bound = f"at most {_LONGEST_TEXT} characters, got {short(text)}"
                raise ValueError(f"a text of a member must have {bound}")
        for address in addresses:
            Address.parse(address)
        return cls(number, incarnation, host, tuple(addresses), *rest)


class Beat(NamedTuple):
    """A heartbeat.

    Attributes:
        number: number of the heartbeat; None in the last one of a member that leaves.
        steps: number of steps that the member has made.
    """

    number: int | None
    steps: int

    def __str__(self) -> str:
        return f"{_GOODBYE if self.number is None else self.number} {self.steps}"

    @classmethod
    def parse(cls, text: str) -> "Beat | None":
        """Parses a text of `str`; None for any other text."""
        first, _, steps = text.partition(" ")
        is_count = first.isdecimal() and len(first) <= _MOST_DIGITS
        if not (steps.isdecimal() and len(steps) <= _MOST_DIGITS):
            return None
        if not (is_count or first == _GOODBYE):
            return None
        return cls(int(first) if is_count else None, int(steps))


@dataclass(frozen=True)
class MemberList:
    """The live members.

    Args:
        epoch: number of the list, which every change increases; not one of training.
        num_invalid: number of malformed rows that were left out.
    """

    epoch: int = 0
    by_number: Mapping[int, Member] = field(default_factory=dict)
    num_invalid: int = field(default=0, compare=False)

    def holds(self, member: Member) -> bool:
        """Whether this incarnation is on the list."""
        found = self.by_number.get(member.number)
        return found is not None and found.incarnation == member.incarnation

    def epoch_after(self, known: int) -> int:
        """The epoch of the list that replaces this one, given the last known epoch."""
        return min(max(self.epoch, known) + 1, _MOST_EPOCHS)

    def objection(self, number: int, incarnation: str) -> str:
        """The reason why an incarnation may not use a number; empty if it may."""
        listed = self.by_number.get(number)
        if listed is None or listed.incarnation == incarnation:
            return ""
        return f"number {number} belongs to another process, on host {listed.host}"

    def after(self, number: int) -> list[int]:
        """The other members' numbers, from the one after `number`, wrapping around."""
        numbers = sorted(self.by_number)
        later = [n for n in numbers if n > number]
        return later + [n for n in numbers if n < number]

    def to_json(self) -> str:
        """The text for the rendezvous; equal lists give equal texts."""
        rows = [self.by_number[n] for n in sorted(self.by_number)]
        return json.dumps([self.epoch, rows])

    @classmethod
    def from_json(
        cls, text: str, is_genuine: Callable[[Member], bool] = lambda member: True
    ) -> "MemberList":
        """Reads a text of `to_json`; an empty text is an empty list.

        A row that is malformed or not genuine is left out and counted. Any other text
        counts as one such row.
        """
        if not text:
            return cls()
        try:
            epoch, rows = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            return cls(num_invalid=1)
        is_epoch = type(epoch) is int and 0 <= epoch <= _MOST_EPOCHS
        if not (is_epoch and isinstance(rows, list)):
            return cls(num_invalid=1)
        found: dict[int, Member] = {}
        for row in rows:
            with suppress(ValueError):
                member = Member.from_row(row)
                if is_genuine(member):
                    found[member.number] = member
        return cls(epoch, found, len(rows) - len(found))


def ahead_of(
    member: Member, steps: int, members: MemberList, steps_of: Mapping[str, int]
) -> Member | None:
    """The member of another training whose weights replace this one's; None: none does.

    A member with over twice the steps is ahead. If two have made about as many steps,
    the one with the lesser origin is ahead. So both ends reach the same answer,
    although each learns late how far the other is.
    """
    for other in members.by_number.values():
        theirs = steps_of.get(other.incarnation)
        if theirs is None or not other.is_foreign_to(member):
            continue
        as_far = 2 * theirs >= steps and other.origin < member.origin
        if theirs > 2 * steps or as_far:
            return other
    return None


def furthest_origin(members: MemberList, steps_of: Mapping[str, int]) -> str:
    """The origin of the training that gives way to no other (`ahead_of`).

    Otherwise an island that gives way could take the weights of its own training from
    another member, come back, and give way again.
    """
    listed = members.by_number.values()
    known = [(steps_of.get(m.incarnation, 0), m.origin) for m in listed if m.origin]
    most, _ = max(known, default=(0, ""))
    return min((origin for steps, origin in known if 2 * steps >= most), default="")


@dataclass(frozen=True)
class Heartbeat:
    """The interval of heartbeats, and the silence after which a member counts as dead.

    Args:
        interval_s: seconds between two heartbeats.
        silence_s: seconds without a heartbeat after which a member counts as dead.
        empty_s: seconds for which a list must have been empty before an island assumes
            to be the first. Within that time, live members restore their list in a
            rendezvous that has come back empty: they ask it every few seconds.
    """

    interval_s: float = 0.5
    silence_s: float = 3.0
    empty_s: float = 6.0
