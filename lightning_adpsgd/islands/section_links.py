"""The links of one learner of an island to its peers, section by section.

A member is asked for all sections or for none, and is lost in all of them at once.
Where islands have one size there is one section, and one link each way.
"""

import time
from collections.abc import Collection, Sequence
from datetime import timedelta

from lightning_adpsgd.gossip.peers import Peers
from lightning_adpsgd.islands.members import Member
from lightning_adpsgd.transport.base import PeerLost, lane_of
from lightning_adpsgd.transport.links.handshake import Refused
from lightning_adpsgd.transport.links.sockets import Address
from lightning_adpsgd.transport.links.transport import LinkTransport


class SectionLinks:
    """Connects and disconnects members, for one thread at a time.

    Args:
        transports: one for each section.
        peers: communication threads of each section.
        shards: for each section, the number of the address that a member has for it:
            that of its owner there.
        timeout: time that one connection may take to be made.
    """

    def __init__(
        self,
        transports: Sequence[LinkTransport],
        peers: Sequence[Peers],
        shards: Sequence[int],
        timeout: timedelta,
    ) -> None:
        self._transports, self._peers = transports, peers
        self._shards, self._timeout = shards, timeout

    @property
    def own(self) -> int:
        """The number of this island, as peers are told."""
        return self._transports[0].index

    def rename(self, own: Member) -> None:
        """Presents this island as the membership says."""
        for transport in self._transports:
            transport.rename(own.number, own.incarnation, own.origin)

    def callers(self, section: int) -> list[int]:
        """The members that ask for a section."""
        return self._transports[section].callers()

    def answer(self, section: int, number: int) -> None:
        """Begins to answer a member that has connected the lane on which it asks."""
        self._peers[section].answer(number)

    def end_answers(self, section: int, number: int) -> None:
        """Ends the lane of a member that asks no more for a section."""
        self._transports[section].disconnect(number, lane_of(number, self.own))

    def ask(self, member: Member) -> None:
        """Begins to ask a member.

        Raises:
            PeerLost, Refused: It cannot be connected for a section, nor is for another.
        """
        try:
            for section, transport in enumerate(self._transports):
                address = self.address_of(member, section)
                transport.connect(
                    member.number, address, self._timeout, member.incarnation
                )
        except (PeerLost, Refused):
            self._break_off(member.number)
            raise
        for peers in self._peers:
            peers.add(member.number)

    def stop_asking(self, numbers: Collection[int], seconds: float) -> None:
        """Asks members no more; exchanges under way have that long to end."""
        ended = [(n, [peers.drop(n) for peers in self._peers]) for n in numbers]
        deadline = time.monotonic() + seconds
        for number, events in ended:
            for event in events:
                event.wait(max(0.0, deadline - time.monotonic()))
            self._break_off(number)

    def disconnect(self, number: int) -> None:
        """Neither asks nor answers a member."""
        for peers, transport in zip(self._peers, self._transports, strict=True):
            peers.forget(number)
            transport.disconnect(number)

    def address_of(self, member: Member, section: int = 0) -> Address:
        """Where a member listens for a section."""
        if len(member.addresses) <= self._shards[section]:
            # Nobody listens there, as far as the list says.
            return Address("", 0)
        return Address.parse(member.addresses[self._shards[section]])

    def _break_off(self, number: int) -> None:
        for transport in self._transports:
            transport.disconnect(number, lane_of(self.own, number))
