"""The entries of members in the rendezvous, and their validation.

    members         the member list, with an epoch that each change raises
    version         a text that changes when the list does
    heartbeat/<i>   the number of heartbeats of the member of incarnation i, and its
                    steps; not by number, as two may have one number for a while after
                    the rendezvous has come back empty
    next            the next number, and a random tag by which simultaneous draws differ

Anyone who reaches the rendezvous can write there. An entry that is malformed, or (with
a token) not signed by a holder of the token, counts as absent for its member.
"""

import logging
import secrets
from collections.abc import Callable, Collection

from torch._C._distributed_c10d import Store

from lightning_adpsgd.islands.member_list import Beat, Member, MemberList
from lightning_adpsgd.islands.rendezvous import RendezvousUnreachable
from lightning_adpsgd.islands.signatures import Signatures

_log = logging.getLogger(__name__)

_TRIES = 100
_MOST_DIGITS = 9

Edit = Callable[[dict[int, Member]], dict[int, Member]]


class MemberStore:
    """The member list's use of one connection to the rendezvous; for one thread."""

    def __init__(self, store: Store, signatures: Signatures) -> None:
        self.store, self._signatures = store, signatures
        self._have_heartbeats, self._told = set[str](), False
        store.compare_set("version", "", "0")

    # --- the list

    def members(self) -> tuple[str, MemberList]:
        """The text in the rendezvous, and its list without invalid rows."""
        text = text_at(self.store, "members")
        found = MemberList.from_json(text, self._is_genuine)
        if found.num_invalid and not self._told:
            _log.warning(
                "ignored %d rows of the member list that are malformed or not signed "
                "with this job's token",
                found.num_invalid,
            )
        self._told = found.num_invalid > 0
        return text, found

    def change(self, known_epoch: int, edit: Edit) -> MemberList:
        """Edits and returns the list; RendezvousUnreachable if each try fails."""
        for _ in range(_TRIES):
            text, found = self.members()
            by_number = edit(dict(found.by_number))
            is_whole = text and not found.num_invalid
            if is_whole and by_number == found.by_number:
                return found
            changed = MemberList(found.epoch_after(known_epoch), by_number)
            if self.replace(text, changed):
                return changed
        raise RendezvousUnreachable(
            f"the member list changed during each of {_TRIES} attempts to change it"
        )

    def replace(self, text: str, members: MemberList) -> bool:
        """Replaces a text by a list if it is still current; returns whether it was."""
        wanted = members.to_json()
        if self.store.compare_set("members", text, wanted).decode() != wanted:
            return False
        # Not an atomic addition, which fails forever once somebody spoils the number.
        self.store.set("version", str(secrets.randbits(62)))
        return True

    def signed(self, member: Member) -> Member:
        """The member with its signature."""
        return member._replace(proof=self._signatures.of("member", *_words(member)))

    def _is_genuine(self, member: Member) -> bool:
        return self._signatures.holds(member.proof, "member", *_words(member))

    # --- heartbeats

    def show(self, member: Member, beat: Beat) -> None:
        """Writes a heartbeat."""
        text = self._signatures.sign(str(beat), _beat_of(member))
        self.store.set(_heartbeat_key(member.incarnation), text)

    def beats(
        self, members: Collection[Member]
    ) -> tuple[bytes, dict[str, Beat | None]]:
        """The version of the list and, by incarnation, the members' heartbeats."""
        names = [one.incarnation for one in members]
        new = set(names) - self._have_heartbeats
        if new and self._have(new):
            self._have_heartbeats |= new
        else:
            self._have_heartbeats |= {name for name in new if self._have({name})}
        known = [one for one in members if one.incarnation in self._have_heartbeats]
        keys = [_heartbeat_key(one.incarnation) for one in known]
        # This request has a time limit of its own, also where the link is cut.
        version, *texts = self.store.multi_get(["version", *keys])
        found: dict[str, Beat | None] = dict.fromkeys(names)
        for one, text in zip(known, texts, strict=True):
            found[one.incarnation] = self._beat(one, text)
        return version, found

    def _have(self, incarnations: Collection[str]) -> bool:
        return self.store.check([*map(_heartbeat_key, incarnations)])

    def has_said_goodbye(self, member: Member) -> bool:
        """Whether a member's last heartbeat is a goodbye."""
        text = text_at(self.store, _heartbeat_key(member.incarnation))
        beat = self._beat(member, text.encode())
        return beat is not None and beat.number is None

    def _beat(self, member: Member, text: bytes) -> Beat | None:
        signed = text.decode("ascii", "replace")
        read = self._signatures.read(signed, _beat_of(member))
        return Beat.parse(read) if read is not None else None

    # --- numbers

    def draw_number(self) -> int:
        """A number that no member has had, as far as the rendezvous knows."""
        taken = max(self.members()[1].by_number, default=-1)
        for _ in range(_TRIES):
            text = text_at(self.store, "next")
            first, _, _ = text.partition(" ")
            is_number = first.isdecimal() and len(first) <= _MOST_DIGITS
            # A rendezvous that was restarted counts from 0 again.
            number = max(int(first) if is_number else 0, taken + 1)
            # Of two that draw at once, each would take the other's text for its own.
            wanted = f"{number + 1} {secrets.token_hex(8)}"
            if self.store.compare_set("next", text, wanted).decode() == wanted:
                return number
        raise RendezvousUnreachable(f"no number could be drawn in {_TRIES} attempts")


def text_at(store: Store, key: str) -> str:
    """The value of a key, in one round trip; empty if it is missing or not text."""
    # `get` waits for the key first, which is a second round trip.
    found = store.compare_set(key, "", "")
    try:
        return found.decode()
    except UnicodeDecodeError:
        # No compare-and-set could ever replace it.
        store.set(key, "")
        return ""


def _heartbeat_key(incarnation: str) -> str:
    return f"heartbeat/{incarnation}"


def _beat_of(member: Member) -> str:
    return f"beat of {member.incarnation}"


def _words(member: Member) -> tuple[object, ...]:
    return tuple(member._replace(proof=""))
