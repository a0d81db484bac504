"""What the other learners of an island know of the roll: what its first one tells.

One learner of an island keeps its place on the roll (`Membership`); it tells what it
knows through the island's own store, and the others (`Follower`) read it there.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import Protocol

from torch._C._distributed_c10d import Store

from lightning_adpsgd.islands.membership import Member, MemberList, Membership, Pace

_KEY = "roll"


class Members(Protocol):
    """What a learner knows of the roll; see `Membership`."""

    member: Member
    roll: MemberList
    left: frozenset[str]
    steps_of: dict[int, int]
    away: str

    @property
    def is_in(self) -> bool:
        """Whether this island is on the roll."""
        ...

    @property
    def is_awake(self) -> bool:
        """Whether this process runs."""
        ...

    def start(self) -> None:
        """Begins to look."""

    def look(self, seconds: float) -> bool:
        """Waits for one more look."""
        ...

    def enter(self, seconds: float = 0.0) -> bool:
        """Comes onto the roll."""
        ...

    def leave(self, seconds: float) -> None:
        """Goes off the roll, and ends the looking."""

    def strike(self, member: Member) -> None:
        """A member is dead: its host says that nobody listens for it any more."""


class Teller:
    """Tells the other learners of the island what the first one knows.

    Args:
        store: Of the island alone.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._told = store, ""

    def tell(self, membership: Membership) -> None:
        """Writes it down if it has changed."""
        text = json.dumps(
            [
                membership.member,
                membership.is_in,
                membership.members.to_json(),
                sorted(membership.left),
                membership.outage,
            ]
        )
        if text != self._told and membership.member.number >= 0:
            self._store.set(_KEY, text)
            self._told = text


class Follower:
    """The roll as the first learner of the island tells it.

    A thread of its own reads it, and replaces the attributes whole.

    Args:
        store: Of the island alone.
        pace: Of looking.
        on_roll: Called by the thread when something has changed.
    """

    def __init__(
        self, store: Store, pace: Pace, on_roll: Callable[[MemberList], None]
    ) -> None:
        self._store, self._pace, self._on_roll = store, pace, on_roll
        self.member, self.members = Member(-1, "", "", ()), MemberList()
        self.left, self.steps_of, self.away = frozenset[str](), dict[int, int](), ""
        self.is_in, self._text = False, ""
        self._state, self._ending, self._num_turns = threading.Condition(), False, 0
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.name = "adpsgd-members"

    @property
    def is_awake(self) -> bool:
        """Whether the thread has looked lately."""
        return time.monotonic() - self._last_turn <= self._pace.silence_s

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def look(self, seconds: float) -> bool:
        """Waits until the thread has looked once more; returns whether it has."""
        with self._state:
            turn = self._num_turns
            return self._state.wait_for(lambda: self._num_turns > turn, seconds)

    def enter(self, seconds: float = 0.0) -> bool:
        """The first learner enters for all; returns whether that is known here."""
        with self._state:
            return self._state.wait_for(lambda: self.is_in, seconds)

    def strike(self, member: Member) -> None:
        """The first learner, whose own connections break as well, does so for all."""

    def leave(self, seconds: float) -> None:
        """Ends the looking."""
        with self._state:
            self._ending = True
            self._state.notify_all()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        while not self._ending:
            try:
                changed = self._read()
            except RuntimeError:
                return  # the island's store has gone, and so will this learner
            if changed:
                self._on_roll(self.members)
            with self._state:
                self._num_turns, self._last_turn = self._num_turns + 1, time.monotonic()
                self._state.notify_all()
                if not self._ending:
                    self._state.wait(self._pace.beat_s)

    def _read(self) -> bool:
        text = self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""
        if text in ("", self._text):
            return False
        (number, incarnation, host, ways), is_in, roll, left, away = json.loads(text)
        self.members, self.left, self.away = (
            MemberList.from_json(roll),
            frozenset(left),
            away,
        )
        self.member = Member(number, incarnation, host, tuple(ways))
        self.is_in, self._text = is_in, text
        return True
