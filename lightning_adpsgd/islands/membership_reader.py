"""The member list for the other learners of an island, from its first learner.

The first learner of an island maintains its place on the member list (`Membership`). It
publishes its view in the island's own store, where the others read it.
"""

import json
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from lightning_adpsgd.islands.members import Heartbeat, Member, MemberList
from lightning_adpsgd.islands.membership import Membership
from lightning_adpsgd.islands.service import Service

_KEY = "membership"


class MembershipPublisher:
    """Publishes the first learner's membership to the island's other learners."""

    def __init__(self, store: Store) -> None:
        self._store, self._published = store, ""

    def publish(self, membership: Membership) -> None:
        """Writes the membership to the store if it has changed."""
        text = json.dumps(
            [
                membership.member,
                membership.is_in,
                membership.members.to_json(),
                sorted(membership.left),
                membership.outage,
            ]
        )
        if text != self._published and membership.member.number >= 0:
            self._store.set(_KEY, text)
            self._published = text


class MembershipReader:
    """The membership that the first learner of the island publishes.

    It has the methods and attributes of `Membership`. A separate thread reads the store
    and replaces the attributes as a whole.
    """

    def __init__(
        self,
        store: Store,
        heartbeat: Heartbeat,
        on_change: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._store, self._heartbeat, self._on_change = store, heartbeat, on_change
        self.member, self.members = Member(-1, "", "", ()), MemberList()
        self.left, self.steps_of, self.outage = frozenset[str](), dict[int, int](), ""
        self.is_in, self._text = False, ""
        self._state, self._ending, self._num_turns = threading.Condition(), False, 0
        self._last_turn = self.list_read_at = time.monotonic()
        self._service = Service("the thread that reads the member list", fail)
        self.services = [self._service]
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.name = "adpsgd-members"

    @property
    def is_awake(self) -> bool:
        """Whether the thread has read the store recently."""
        return time.monotonic() - self._last_turn <= self._heartbeat.silence_s

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def refresh(self, seconds: float) -> bool:
        """Waits for the thread's next turn; returns whether it came in time."""
        with self._state:
            turn = self._num_turns
            return self._state.wait_for(lambda: self._num_turns > turn, seconds)

    def enter(self, seconds: float = 0.0) -> bool:
        """Waits until the first learner has entered; returns whether it has."""
        with self._state:
            return self._state.wait_for(lambda: self.is_in, seconds)

    def found(self, seconds: float) -> bool:
        """Waits for the first learner to found the job; returns whether it has."""
        with self._state:
            self._state.wait_for(lambda: self.is_in or self.members.by_number, seconds)
            return self.is_in

    def describe(
        self, addresses: tuple[str, ...] | None = None, origin: str | None = None
    ) -> None:
        """Does nothing, because the first learner does it for the island."""

    def evict(self, member: Member) -> None:
        """Does nothing, because the first learner loses and evicts the member too."""

    def leave(self, seconds: float) -> None:
        """Ends the thread; waits for it up to `seconds`."""
        with self._state:
            self._ending = True
            self._state.notify_all()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        while not self._ending:
            if not self._service.take(self._take_turn):
                return
            with self._state:
                self._num_turns, self._last_turn = self._num_turns + 1, time.monotonic()
                self._state.notify_all()
                if not self._ending:
                    self._state.wait(self._heartbeat.interval_s)

    def _take_turn(self) -> None:
        if self._read():
            self._on_change()

    def _read(self) -> bool:
        text = self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""
        if text in ("", self._text):
            return False
        self.list_read_at = time.monotonic()
        row, is_in, members, left, outage = json.loads(text)
        self.members, self.left = MemberList.from_json(members), frozenset(left)
        self.member, self.outage = Member.from_row(row), outage
        self.is_in, self._text = is_in, text
        return True


MembershipView = Membership | MembershipReader
"""A learner's view of the members of the job."""
