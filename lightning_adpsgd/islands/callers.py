"""Warns when no other island can connect to this one.

Behind a firewall or an address translation, or after a change of its host's address,
an island still connects to others, and exchanges over these connections. But no other
island can pull its weights, so every mean would leave them out without notice.
"""

import logging
import time
from collections.abc import Collection

from lightning_adpsgd.islands.membership_reader import MembershipView
from lightning_adpsgd.islands.section_links import SectionLinks
from lightning_adpsgd.transport.links.sockets import Address, is_local, source_towards

_log = logging.getLogger(__name__)

# Others connect within a few seconds, even after a network cut.
_PATIENCE_S = 20.0
# A turn of the thread takes no longer, unless the process was stopped.
_LONGEST_TURN_S = 2.0


class CallersWatch:
    """Warns once if an island reaches others and none of them connects to it."""

    def __init__(self) -> None:
        self._seconds, self._last, self._has_warned = 0.0, 0.0, False

    def look(
        self, links: SectionLinks, membership: MembershipView, asked: Collection[int]
    ) -> None:
        """Looks at the connections; the thread of connections calls it every second.

        Args:
            asked: numbers of the members to which this island has connected.
        """
        now, listed = time.monotonic(), membership.members.by_number
        turn_s, self._last = min(now - self._last, _LONGEST_TURN_S), now
        reached = [listed[number] for number in asked if number in listed]
        is_one_way = bool(reached) and not links.callers()
        self._seconds = self._seconds + turn_s if is_one_way else 0.0
        if self._seconds > _PATIENCE_S and not self._has_warned:
            self._has_warned = True
            own, other = map(links.address_of, (membership.member, reached[0]))
            _log.warning(
                "no island has connected to this one at %s for %.0f s, although it "
                "reaches %d of them. It exchanges when it asks, and the others leave "
                "its weights out of validations and of the consensus model. %s",
                *(own, self._seconds, len(reached), _remedy(own, other)),
            )


def _remedy(own: Address, other: Address) -> str:
    here = source_towards(other)
    if not here or is_local(own):
        return "Look for a firewall or an address translation on the side of this host"
    return (
        f"The address of this host towards {other.host} is {here} now: start this "
        "island again, from its checkpoint"
    )
