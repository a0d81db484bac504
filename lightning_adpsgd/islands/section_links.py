"""The links of an island's learner to its peers, by section.

A member is asked for all sections or for none, and is lost in all of them at once. If
islands have one size, there is one section, with one link each way.
"""

import threading
import time
from collections.abc import Collection, Sequence

from lightning_adpsgd.gossip.peers import Peers
from lightning_adpsgd.islands.member_list import Member
from lightning_adpsgd.transport.base import lane_of
from lightning_adpsgd.transport.links.credentials import BadCredentials
from lightning_adpsgd.transport.links.sockets import Address
from lightning_adpsgd.transport.links.transport import LinkTransport

# A member that still sends us its weights after this is cut off, for it a loss.
_LONGEST_END_S = 300.0


class SectionLinks:
    """Connects and disconnects members, for one thread at a time.

    Args:
        transports: one for each section.
        peers: communication threads, one object for each section.
        shards: for each section, the index of its owner's address in a member's.
    """

    def __init__(
        self,
        transports: Sequence[LinkTransport],
        peers: Sequence[Peers],
        shards: Sequence[int],
    ) -> None:
        self._transports, self._peers, self._shards = transports, peers, shards
        # Members that are no longer asked: when their threads end, and when they must.
        self._ending: dict[int, tuple[list[threading.Event], float]] = {}

    @property
    def own(self) -> int:
        """The number of this island that peers know."""
        return self._transports[0].index

    def rename(self, own: Member) -> None:
        """Adopts this island's number and origin from the membership."""
        if own.number != self.own:
            for number in list(self._ending):
                self._break_off(number)
        for transport in self._transports:
            transport.rename(own.number, own.incarnation, own.origin)

    def callers(self, section: int = 0) -> list[int]:
        """The members that ask this learner for a section."""
        return self._transports[section].callers()

    def answer(self, section: int, number: int) -> None:
        """Starts to answer a member that has connected its asking lane."""
        self._peers[section].answer(number)

    def ask(self, member: Member) -> None:
        """Starts to ask a member.

        Raises:
            PeerLost, Refused, BadCredentials: A section cannot be connected; then no
                section is. So too if the system refuses a thread, by a RuntimeError.
        """
        if member.number in self._ending:
            self._break_off(member.number)
        try:
            for section, transport in enumerate(self._transports):
                address = self.address_of(member, section)
                transport.connect(member.number, address, member.incarnation)
            for peers in self._peers:
                peers.add(member.number)
        # The first of them includes `PeerLost` and `Refused`.
        except (RuntimeError, BadCredentials):
            for peers in self._peers:
                peers.drop(member.number)
            self._break_off(member.number)
            raise

    def stop_asking(self, numbers: Collection[int], seconds: float) -> None:
        """Stops asking members; waits up to `seconds` until they have been told.

        An exchange or a pull under way may take longer: to the member a break in its
        middle would be a loss. `break_off_ended` ends these connections.
        """
        ended = [(n, [peers.drop(n) for peers in self._peers]) for n in numbers]
        deadline = time.monotonic() + seconds
        for number, events in ended:
            for event in events:
                event.wait(max(0.0, deadline - time.monotonic()))
            self._ending[number] = events, deadline + _LONGEST_END_S
        self.break_off_ended()

    def break_off_ended(self) -> None:
        """Ends the connections to members that know that they are no longer asked."""
        now = time.monotonic()
        for number, (events, deadline) in list(self._ending.items()):
            if now > deadline or all(event.is_set() for event in events):
                self._break_off(number)

    def disconnect(self, number: int) -> None:
        """Stops asking and answering a member."""
        for peers, transport in zip(self._peers, self._transports, strict=True):
            peers.forget(number)
            transport.disconnect(number)

    def address_of(self, member: Member, section: int = 0) -> Address:
        """The address at which a member listens for a section."""
        if len(member.addresses) <= self._shards[section]:
            # According to the list, nobody listens there.
            return Address("", 0)
        return Address.parse(member.addresses[self._shards[section]])

    def _break_off(self, number: int) -> None:
        self._ending.pop(number, None)
        for transport in self._transports:
            transport.disconnect(number, lane_of(self.own, number))
