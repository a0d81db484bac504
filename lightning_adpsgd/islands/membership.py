"""Who takes part: a list of the live islands, kept by all of them in the rendezvous.

    members         the member list, with an epoch that each change raises
    version         a counter that says when to read the list again
    heartbeat/<n>   the number of heartbeats of member n, and its steps
    next            the next number

There is no coordinator. A member adds itself, advances its heartbeat, and watches the
heartbeats of the eight members after it on the list, which wraps around. It evicts a
member whose heartbeat stands still for too long. Each observer measures that with its
own monotonic clock, so the clocks of two machines are never compared. A member that is
known to be dead by other means is evicted at once, but only once per observer, so that
a mistake does not last. A member that finds itself evicted was either cut off, and adds
itself again; or its process was stopped, as its own clock tells, and its weights are
stale. A rendezvous that comes back empty gets the list from the first to find it.

A member makes two requests in each half second, whatever the number of members.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection

from torch._C._distributed_c10d import Store

from lightning_adpsgd.islands.members import (
    Heartbeat,
    Member,
    MemberList,
    SilenceWatch,
)
from lightning_adpsgd.islands.rendezvous import Rendezvous, RendezvousUnreachable

_log = logging.getLogger(__name__)

_HEARTBEAT = Heartbeat()

_NUM_WATCHED = 8
_TURNS_BETWEEN_READS = 10
_TRIES = 100
# Replaces the number in a member's last heartbeat.
_GOODBYE = "goodbye"


class Membership:
    """One island's place on the member list, kept by a thread of its own.

    The thread writes the attributes and replaces them whole; others read them.
    `_wanted`, `_ending`, `_dead` (incarnations to evict) and `_evicted` (those that
    were) are guarded by `_state`. Other threads wait for this one only when they begin
    and end, and for a bounded time.

    Args:
        rendezvous: client of the store, used by the thread alone.
        steps: returns the number of steps that this island has made.
        on_change: called by the thread when the list has changed, or can no longer be
            read.
        on_stopped: called by the thread when this process was stopped for so long that
            the others evicted it: it joins again only after the next `enter`.
        on_turn: called by the thread after each turn.

    Attributes:
        member: this island; its number is negative until it has one.
        members: the member list as last read.
        steps_of: steps of the watched members, by number.
        left: incarnations that left the list by themselves.
        outage: why the rendezvous is unreachable at present; empty if it is not.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        member: Member,
        steps: Callable[[], int],
        heartbeat: Heartbeat = _HEARTBEAT,
        on_change: Callable[[], None] = lambda: None,
        on_stopped: Callable[[], None] = lambda: None,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._rendezvous, self._steps, self._heartbeat = rendezvous, steps, heartbeat
        self._on_turn = on_turn
        self._on_change, self._on_stopped = on_change, on_stopped
        self.member, self.members, self.outage = member, MemberList(), ""
        self.steps_of: dict[int, int] = {}
        self.left = frozenset[str]()
        self._state = threading.Condition()
        self._wanted, self._ending = False, False
        self._was_in, self._was_stopped, self._unread = False, False, 0
        self._version, self._num_heartbeats, self._num_turns = "", 0, 0
        self._watch = SilenceWatch(heartbeat.silence_s)
        self._store: Store | None = None
        self._have_heartbeats = set[int]()
        self._dead, self._evicted = set[str](), set[str]()
        self._last_turn = self._unreachable_since = time.monotonic()
        self._began = self._last_turn, 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.name = "adpsgd-members"

    # --- for others

    def start(self) -> None:
        """Starts the thread; this island is on no list before `enter`."""
        self._last_turn = time.monotonic()
        self._thread.start()

    def refresh(self, seconds: float) -> bool:
        """Waits for one more turn of the thread; returns whether it came in time."""
        with self._state:
            turn = self._num_turns
            return self._state.wait_for(lambda: self._num_turns > turn, seconds)

    def enter(self, seconds: float = 0.0) -> bool:
        """Lets the thread add this island, and again when missing; whether it has."""
        with self._state:
            self._wanted = True
            self._state.notify_all()
            return self._state.wait_for(lambda: self.is_in, seconds)

    def evict(self, member: Member) -> None:
        """Lets the thread evict a member that is known to be dead, at most once."""
        with self._state:
            if member.incarnation not in self._evicted:
                self._evicted.add(member.incarnation)
                self._dead.add(member.incarnation)
                self._state.notify_all()

    def leave(self, seconds: float) -> None:
        """Takes this island off the list and ends the thread; waits that long."""
        with self._state:
            self._ending = True
            self._state.notify_all()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    @property
    def is_in(self) -> bool:
        """Whether this island is on the list, as far as it knows."""
        return self._wanted and self.members.holds(self.member)

    @property
    def is_awake(self) -> bool:
        """Whether this process runs; false just after it was stopped."""
        trains = self._steps() >= self._began[1] + 2
        idle_s = time.monotonic() - self._last_turn
        return trains or idle_s <= self._heartbeat.silence_s

    # --- the thread

    def _work(self) -> None:
        while not self._ending:
            self._take_turn()
            self._on_turn()
            with self._state:
                self._num_turns += 1
                self._state.notify_all()
                if not (self._ending or self._is_urgent()):
                    self._rest()
        self._say_goodbye()

    def _is_urgent(self) -> bool:
        enters = self._wanted and not self._was_in
        return not self.outage and (enters or bool(self._dead))

    def _take_turn(self) -> None:
        self._began = time.monotonic(), self._steps()
        try:
            self._rendezvous.ask(self._visit)
        except RendezvousUnreachable as error:
            self._note_outage(str(error))
        else:
            self._note_end_of_outage()
        self._note_stop_within_turn()
        self._last_turn = time.monotonic()

    def _rest(self) -> None:
        self._state.wait(self._heartbeat.interval_s)
        self._note_stop(time.monotonic() - self._last_turn)
        self._last_turn = time.monotonic()

    def _note_stop_within_turn(self) -> None:
        begin, steps = self._began
        # While a request hangs on a cut link, training goes on.
        if self._steps() < steps + 2:
            self._note_stop(time.monotonic() - begin)

    def _note_stop(self, seconds: float) -> None:
        if seconds > self._heartbeat.silence_s:
            self._watch.forget()
            self._was_stopped = self._was_in

    def _visit(self, store: Store) -> None:
        if self._store is not store:
            store.add("version", 0)
            self._store, self._have_heartbeats = store, set()
        if self.member.number < 0:
            self._draw_number(store)
        self._show_heartbeat(store)
        version, silent = self._watch_others(store)
        self._read_members(store, version)
        self._take_place(store)
        self._evict(store, silent)

    def _evict(self, store: Store, silent: list[str]) -> None:
        with self._state:
            dead = set(self._dead)
        names = {*silent, *dead}
        if any(one.incarnation in names for one in self.members.by_number.values()):
            self._adopt(store, self._change(store, lambda old: _without(old, names)))
        with self._state:
            self._dead -= dead

    def _draw_number(self, store: Store) -> None:
        taken = max(self._stored_members(store)[1].by_number, default=-1)
        number = store.add("next", 1) - 1
        while number <= taken:
            # A rendezvous that was restarted counts from 0 again.
            number = store.add("next", taken - number + 1) - 1
        self.member = self.member._replace(number=number)

    def _show_heartbeat(self, store: Store) -> None:
        self._num_heartbeats += 1
        text = f"{self._num_heartbeats} {self._steps()}"
        store.set(_heartbeat_key(self.member.number), text)

    def _read_members(self, store: Store, version: str) -> None:
        self._unread += 1
        # The member that wrote the list may have died before it raised the version.
        if version == self._version and self._unread < _TURNS_BETWEEN_READS:
            return
        text, members = self._stored_members(store)
        if not text and self._was_in:
            known = dict(self.members.by_number)
            members = self._change(store, lambda old: known | old)
        self._version, self._unread = version, 0
        self._adopt(store, members)

    def _take_place(self, store: Store) -> None:
        self._note_stop_within_turn()
        if not self._wanted or self.members.holds(self.member):
            self._was_stopped = self._was_stopped and not self._wanted
            self._was_in = self._was_in or self._wanted
            return
        if self._was_stopped:
            self._was_stopped, self._wanted = False, False
            _log.warning(
                "this process was stopped for so long that the others went on without "
                "it; it takes their weights before it exchanges with them again"
            )
            self._on_stopped()
            return
        if self.member.number in self.members.by_number:
            self._draw_number(store)
        mine = {self.member.number: self.member}
        self._show_heartbeat(store)
        self._adopt(store, self._change(store, lambda old: {**old, **mine}))
        self._was_in = True

    def _watch_others(self, store: Store) -> tuple[str, list[str]]:
        """Returns the version of the list, and the incarnations that are silent."""
        others = self.members.after(self.member.number)
        watched = others[:_NUM_WATCHED] if self.is_in else others
        for number in set(watched) - self._have_heartbeats:
            if store.check([_heartbeat_key(number)]):
                self._have_heartbeats.add(number)
        known = [number for number in watched if number in self._have_heartbeats]
        # This request has a time limit of its own, also where the link is cut.
        version, *found = store.multi_get(["version", *map(_heartbeat_key, known)])
        heartbeats = dict.fromkeys(watched, "") | {
            n: text.decode() for n, text in zip(known, found, strict=True)
        }
        self.steps_of = {n: int(s.split()[1]) for n, s in heartbeats.items() if s}
        by_name = {
            self.members.by_number[n].incarnation: heartbeats[n] for n in watched
        }
        return version.decode(), self._watch.observe(by_name, time.monotonic())

    def _say_goodbye(self) -> None:
        mine = [self.member.incarnation]

        def leave(store: Store) -> None:
            text = f"{_GOODBYE} {self._steps()}"
            store.set(_heartbeat_key(self.member.number), text)
            self._change(store, lambda old: _without(old, mine))

        try:
            if self._was_in:
                self._rendezvous.ask(leave)
        except RendezvousUnreachable:
            _log.info("left without a goodbye: the rendezvous is unreachable")
        self._rendezvous.close()

    def _stored_members(self, store: Store) -> tuple[str, MemberList]:
        text = store.get("members").decode() if store.check(["members"]) else ""
        return text, MemberList.from_json(text)

    def _change(
        self, store: Store, edit: Callable[[dict[int, Member]], dict[int, Member]]
    ) -> MemberList:
        for _ in range(_TRIES):
            text, found = self._stored_members(store)
            by_number = edit(dict(found.by_number))
            if text and by_number == found.by_number:
                return found
            epoch = max(found.epoch, self.members.epoch) + 1
            changed = MemberList(epoch, by_number)
            wanted = changed.to_json()
            if store.compare_set("members", text, wanted).decode() == wanted:
                store.add("version", 1)
                return changed
        raise RendezvousUnreachable(
            f"the member list changed during each of {_TRIES} attempts to change it"
        )

    def _adopt(self, store: Store, members: MemberList) -> None:
        before, self.members = self.members, members
        if members.by_number == before.by_number:
            return
        gone = [m for m in before.by_number.values() if not members.holds(m)]
        self.left |= {m.incarnation for m in gone if _has_said_goodbye(store, m)}
        self._on_change()

    def _note_outage(self, reason: str) -> None:
        before, self.outage = self.outage, reason
        if not before:
            self._unreachable_since = time.monotonic()
            _log.warning(
                "the rendezvous at %s cannot be reached (%s): training goes on with "
                "the known super-learners, and no other can join",
                self._rendezvous.address,
                reason,
            )
            self._on_change()

    def _note_end_of_outage(self) -> None:
        if self.outage:
            # What stood still meanwhile was the rendezvous.
            self._watch.forget()
            seconds = time.monotonic() - self._unreachable_since
            _log.warning(
                "the rendezvous at %s is back after %.0f s, with %d super-learners on "
                "its member list",
                self._rendezvous.address,
                seconds,
                len(self.members.by_number),
            )
        self.outage = ""


def _heartbeat_key(number: int) -> str:
    return f"heartbeat/{number}"


def _has_said_goodbye(store: Store, member: Member) -> bool:
    key = _heartbeat_key(member.number)
    return store.check([key]) and store.get(key).decode().startswith(_GOODBYE)


def _without(members: dict[int, Member], names: Collection[str]) -> dict[int, Member]:
    return {n: m for n, m in members.items() if m.incarnation not in names}
