"""The member list for the other learners of an island, from its first learner.

The first learner of an island maintains its place on the member list (`Membership`). It
publishes its view in the island's own store, where the others read it.
"""

import json
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError
from typing_extensions import override

from lightning_adpsgd.islands.member_list import Heartbeat, Member, MemberList
from lightning_adpsgd.islands.membership import Membership
from lightning_adpsgd.islands.service import ServiceThread, uptime_s

_KEY, _THREAD = "membership", "adpsgd-members"


def publish(membership: Membership, store: Store) -> None:
    """Writes the first learner's membership to the store of its island."""
    told = (
        membership.member,
        membership.is_in,
        membership.members.to_json(),
        sorted(membership.left),
        membership.outage,
    )
    if membership.member.number >= 0:
        store.set(_KEY, json.dumps(told))


class MembershipReader(ServiceThread):
    """The membership as the first learner of the island publishes it.

    It has the attributes of `Membership`, and those of its methods that all learners
    need. A thread reads the store, and replaces each attribute as a whole.
    """

    def __init__(
        self,
        store: Store,
        heartbeat: Heartbeat,
        on_change: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__("the thread that reads the member list", _THREAD, fail)
        self._store, self._heartbeat, self._on_change = store, heartbeat, on_change
        self.member, self.members = Member(-1, "", "", ()), MemberList()
        self.left, self.steps_of, self.outage = frozenset[str](), dict[str, int](), ""
        self.is_in, self._text = False, ""
        self._awake_at = uptime_s()

    @property
    def is_awake(self) -> bool:
        """Whether the thread has read the store recently."""
        return uptime_s() - self._awake_at <= self._heartbeat.silence_s

    def enter(self, seconds: float = 0.0) -> bool:
        """Waits until the first learner has entered; returns whether it has."""
        with self._state:
            return self._state.wait_for(lambda: self.is_in, seconds)

    def describe(self, **fields: Any) -> None:
        """Does nothing, because the first learner does it for the island."""

    def evict(self, member: Member) -> None:
        """Does nothing, because the first learner loses and evicts the member too."""

    @override
    def _rest(self) -> None:
        self._awake_at = uptime_s()
        self._state.wait(self._heartbeat.interval_s)

    @override
    def _take_turn(self) -> None:
        try:
            if self._read():
                self._on_change()
        except DistNetworkError:
            # A broken connection stays broken. The coordinator says who has ended.
            with self._state:
                self._ending = True

    def _read(self) -> bool:
        text = self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""
        if is_new := text not in ("", self._text):
            row, is_in, members, left, outage = json.loads(text)
            # Before the list: a member that it lacks and that has not left is lost.
            self.left = frozenset(left)
            self.members = MemberList.from_json(members)
            self.member, self.outage = Member.from_row(row), outage
            self.is_in, self._text = is_in, text
        return is_new


MembershipView = Membership | MembershipReader
"""A learner's view of the members of the job."""
