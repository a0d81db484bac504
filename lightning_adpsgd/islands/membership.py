"""The list of live islands, which all of them maintain in the rendezvous.

There is no coordinator. A member adds itself, advances its heartbeat, and watches the
heartbeats of the eight members after it on the list, which wraps around. It evicts a
member whose heartbeat is silent for too long. Each observer measures that with its own
monotonic clock, so the clocks of two machines are never compared. A member that is
known to be dead by other means is evicted at once, but only once per observer, so that
a mistake does not persist. A member that finds itself evicted judges by its own clock.
If it was cut off, it adds itself again. If it was stopped, it takes the others' weights
first. If a rendezvous comes back empty, the first member to notice restores the list.

The first member of a job replaces an empty list by itself, in one compare-and-set.
Before that, it waits long enough for live members to restore their list. If both happen
nevertheless, there are weights of two origins, which are never averaged: the members
that are behind take the weights of the others.

A member makes two requests every half second, whatever the number of members.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from torch._C._distributed_c10d import Store
from typing_extensions import override

from lightning_adpsgd.coordination.silence import SilenceWatch
from lightning_adpsgd.islands.member_list import (
    Beat,
    Heartbeat,
    Member,
    MemberList,
    ahead_of,
)
from lightning_adpsgd.islands.member_store import Edit, MemberStore
from lightning_adpsgd.islands.rendezvous import Rendezvous, RendezvousUnreachable
from lightning_adpsgd.islands.service import ServiceThread, TrainingWatch, uptime_s

_log = logging.getLogger(__name__)

_THREAD = "adpsgd-members"

_NUM_WATCHED = 8
_TURNS_BETWEEN_READS = 10


class Membership(ServiceThread):
    """One island's place on the member list, kept by a thread of its own.

    The thread writes the attributes, each as a whole, and other threads read them.
    `_state` guards what several threads write: `member`, `_wanted`, `_begins_list`,
    `_dead` (incarnations to evict) and `_evicted` (those evicted so far). Other threads
    wait for this thread only at start and stop, for a bounded time. `stop` takes this
    island off the list.

    Args:
        rendezvous: client of the store, used only by the thread.
        steps: function for the number of steps that this island has made.
        on_change: called by the thread when the list changed, or can no longer be read.
        on_left_behind: function called by the thread when this island must first take
            the others' weights: it was evicted while its process was stopped, or
            another training is further ahead. It rejoins only after the next `enter`.
        on_turn: function called by the thread after each turn.
        fail: function called by the thread after too many failures in a row.

    Attributes:
        member: this island; its number is negative until it has one.
        steps_of: number of steps of each watched member, by its incarnation: another
            process may have its number after the rendezvous has come back empty.
        left: incarnations that left the list with a goodbye.
        outage: reason why the rendezvous is unreachable; empty if it is reachable.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        member: Member,
        steps: Callable[[], int],
        heartbeat: Heartbeat,
        on_change: Callable[[], None],
        on_left_behind: Callable[[], None],
        on_turn: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__("the thread that keeps the member list", _THREAD, fail)
        self._rendezvous, self._steps, self._heartbeat = rendezvous, steps, heartbeat
        self._on_turn = on_turn
        self._on_change, self._on_left_behind = on_change, on_left_behind
        self.member, self.members, self.outage = member, MemberList(), ""
        self.steps_of: dict[str, int] = {}
        self.left = frozenset[str]()
        self._wanted, self._was_in, self._was_stopped = False, False, False
        self._version, self._num_heartbeats, self._unread = b"", 0, 0
        self._watch = SilenceWatch[str](heartbeat.silence_s)
        self._away_since = 0.0
        self._store: MemberStore | None = None
        self._begins_list, self._empty_since = False, 0.0
        self._dead, self._evicted = set[str](), set[str]()
        self._awake_at = uptime_s()
        self._training = TrainingWatch(steps)

    # --- for others

    @override
    def start(self) -> None:
        self._awake_at = uptime_s()
        super().start()

    def enter(self, seconds: float = 0.0) -> bool:
        """Makes the thread keep this island on the list; returns whether it is in."""
        with self._state:
            self._wanted = True
            self._state.notify_all()
            return self._state.wait_for(lambda: self.is_in, seconds)

    def begin_list(self, seconds: float) -> bool:
        """Makes the thread begin the list with this island, if it stays empty.

        It returns early if other members appear or the rendezvous is unreachable.

        Returns:
            Whether it has done so within `seconds`; others may have been faster.
        """
        with self._state:
            self._begins_list = True
            self._state.notify_all()
            self._state.wait_for(
                lambda: self.is_in or self.members.by_number or self.outage, seconds
            )
            self._begins_list = False
            return self.is_in

    def describe(self, **fields: Any) -> None:
        """Changes fields of this island's `member`, before it enters."""
        with self._state:
            self.member = self.member._replace(**fields)

    def evict(self, member: Member) -> None:
        """Makes the thread evict a member that is known to be dead, at most once."""
        with self._state:
            if member.incarnation not in self._evicted:
                self._evicted.add(member.incarnation)
                self._dead.add(member.incarnation)
                self._state.notify_all()

    @property
    def is_in(self) -> bool:
        """Whether this island is on the list, as far as it knows."""
        return self._wanted and self.members.holds(self.member)

    @property
    def is_awake(self) -> bool:
        """Whether this process runs; false just after it was stopped."""
        now = uptime_s()
        is_fresh = now - self._awake_at <= self._heartbeat.silence_s
        return is_fresh or self._training.goes_on(now)

    # --- the thread

    @override
    def _work(self) -> bool:
        if goes_on := super()._work():
            self.take(self._say_goodbye)
        self._rendezvous.close()
        return goes_on

    @override
    def _take_turn(self) -> None:
        self._training.begin_turn(uptime_s())
        if self.outage:
            # Before the next look: the rendezvous was silent meanwhile, not the others.
            self._watch.forget()
        try:
            self._rendezvous.ask(self._visit)
        except RendezvousUnreachable as error:
            self._note_outage(str(error))
        else:
            if self.outage and self._was_in:
                self._note_return()
            self.outage = ""
        self._note_stop_within_turn()
        self._awake_at = uptime_s()
        self._on_turn()

    @override
    def _rest(self) -> None:
        is_fine = not (self.outage or self.has_just_failed)
        has_work = (self._wanted and not self._was_in) or self._dead
        if not (is_fine and has_work):
            self._state.wait(self._heartbeat.interval_s)
        self._note_stop(uptime_s() - self._awake_at)
        self._awake_at = uptime_s()

    def _note_stop_within_turn(self) -> None:
        now = uptime_s()
        # If training went on, it was no stop, but a request that hung on a cut link.
        if not self._training.goes_on(now):
            self._note_stop(now - self._training.began)

    def _note_stop(self, seconds: float) -> None:
        if seconds > self._heartbeat.silence_s:
            self._watch.forget()
            self._was_stopped = self._was_in

    def _visit(self, plain: Store) -> None:
        if self._store is None or self._store.store is not plain:
            self._store = MemberStore(plain, self._rendezvous.signatures)
            self._empty_since = time.monotonic()
        store = self._store
        is_taken = self.members.objection(self.member.number, self.member.incarnation)
        if self.member.number < 0 or (is_taken and not self._wanted):
            self.describe(number=store.draw_number())
        self._show_heartbeat(store)
        version, silent = self._watch_others(store)
        self._read_members(store, version)
        self._give_way(store)
        self._take_place(store)
        self._begin_list(store)
        self._evict(store, silent)

    def _evict(self, store: MemberStore, silent: list[str]) -> None:
        with self._state:
            dead = set(self._dead)
        names = {*silent, *dead}
        if any(one.incarnation in names for one in self.members.by_number.values()):
            self._change(store, lambda old: _without(old, names))
        with self._state:
            self._dead -= dead

    def _show_heartbeat(self, store: MemberStore) -> None:
        self._num_heartbeats += 1
        store.show(self.member, Beat(self._num_heartbeats, self._steps()))

    def _read_members(self, store: MemberStore, version: bytes) -> None:
        self._unread += 1
        # The member that wrote the list may have died before it raised the version.
        if version == self._version and self._unread < _TURNS_BETWEEN_READS:
            return
        text, members = store.members()
        if (not text or members.num_invalid) and self._was_in:
            known = dict(self.members.by_number)
            self._change(store, lambda old: known | old)
        else:
            self._adopt(store, members)
        self._version, self._unread = version, 0

    def _take_place(self, store: MemberStore) -> None:
        self._note_stop_within_turn()
        is_listed, listed = self.members.holds(self.member), self.members.by_number
        # Another member may have restored the row of a training that this one has left.
        is_former = is_listed and listed[self.member.number].is_foreign_to(self.member)
        if not self._wanted or (is_listed and not is_former):
            self._was_stopped = self._was_stopped and not self._wanted
            self._was_in = self._was_in or self._wanted
            return
        if self._was_stopped:
            self._stand_aside(
                "this process was stopped, or a call held Python's interpreter lock, "
                "for so long that the others continued without it; it takes their "
                "weights before it exchanges with them again"
            )
            return
        if self.member.number in listed and not is_former:
            self.describe(number=store.draw_number())
        self._show_heartbeat(store)
        with self._state:
            self.member = mine = store.signed(self.member)
        self._change(store, lambda old: {**old, mine.number: mine})
        self._was_in = True

    def _stand_aside(self, reason: str) -> None:
        with self._state:
            self._was_stopped, self._wanted = False, False
        _log.warning(reason)
        self._on_left_behind()

    def _give_way(self, store: MemberStore) -> None:
        """Leaves the list if members of another training are further ahead."""
        if not (self._wanted and self.members.holds(self.member)):
            return
        ahead = ahead_of(self.member, self._steps(), self.members, self.steps_of)
        if ahead is not None:
            self._change(store, lambda old: _without(old, [self.member.incarnation]))
            self._stand_aside(
                f"{ahead} is further ahead in a training from other weights: this "
                "island takes those before it exchanges with others"
            )

    def _begin_list(self, store: MemberStore) -> None:
        """Begins the list with this island, once it has been empty for long enough."""
        if self.members.holds(self.member) and not self._was_in:
            # The request that began the list was answered too late, or never.
            self._claim_begun(store)
            return
        if self.members.by_number or not self._begins_list:
            self._empty_since = time.monotonic()
            return
        if time.monotonic() - self._empty_since < self._heartbeat.empty_s:
            return
        text, members = store.members()
        if members.by_number:
            return
        mine = store.signed(self.member._replace(origin=self.member.incarnation))
        first = MemberList(members.epoch_after(self.members.epoch), {mine.number: mine})
        # Of several islands that found it empty, only one still finds the same text.
        if store.replace(text, first):
            self._adopt(store, first)
            self._claim_begun(store)

    def _claim_begun(self, store: MemberStore) -> None:
        """Enters the list that it has begun; leaves it if `begin_list` has ended."""
        mine = self.members.by_number[self.member.number]
        with self._state:
            if self._begins_list:
                self.member, self._wanted, self._was_in = mine, True, True
                return
        # The next `begin_list` needs an empty list.
        self._change(store, lambda old: _without(old, [mine.incarnation]))

    def _watch_others(self, store: MemberStore) -> tuple[bytes, list[str]]:
        """The version of the list, and the silent incarnations."""
        watched = [self.members.by_number[number] for number in self._to_watch()]
        version, beats = store.beats(watched)
        self.steps_of = {of: beat.steps for of, beat in beats.items() if beat}
        counts = {of: beat and beat.number for of, beat in beats.items()}
        return version, self._watch.look(counts, time.monotonic())

    def _to_watch(self) -> list[int]:
        """Eight members, and one of another training; all of them before it is in."""
        others, members = self.members.after(self.member.number), self.members.by_number
        if not self.is_in:
            return others
        foreign = [n for n in others if members[n].is_foreign_to(self.member)]
        return [*dict.fromkeys([*others[:_NUM_WATCHED], *foreign[:1]])]

    def _say_goodbye(self) -> None:
        mine = [self.member.incarnation]

        def leave(plain: Store) -> None:
            store = MemberStore(plain, self._rendezvous.signatures)
            store.show(self.member, Beat(None, max(self._steps(), 0)))
            store.change(self.members.epoch, lambda old: _without(old, mine))

        try:
            if self._was_in:
                self._rendezvous.ask(leave)
        except RendezvousUnreachable:
            _log.info("left without a goodbye: the rendezvous is unreachable")

    def _change(self, store: MemberStore, edit: Edit) -> None:
        self._adopt(store, store.change(self.members.epoch, edit))

    def _adopt(self, store: MemberStore, members: MemberList) -> None:
        known = self.members.by_number
        gone = [member for member in known.values() if not members.holds(member)]
        # Before `members`: readers treat anyone missing from both as lost.
        self.left |= {m.incarnation for m in gone if store.has_said_goodbye(m)}
        self.members = members
        if members.by_number != known:
            self._on_change()

    def _note_outage(self, reason: str) -> None:
        before, self.outage = self.outage, reason
        self._empty_since = time.monotonic()
        if before:
            return
        self._away_since = time.monotonic()
        # An island that is starting waits for the rendezvous, and `Wait` logs that.
        if self._was_in:
            _log.warning(
                "the rendezvous at %s cannot be reached (%s): training continues with "
                "the known islands, and no other can join",
                *(self._rendezvous.address, reason),
            )
        self._on_change()

    def _note_return(self) -> None:
        _log.warning(
            "the rendezvous at %s is back after %.0f s, with %d islands on its "
            "member list",
            *(self._rendezvous.address, time.monotonic() - self._away_since),
            len(self.members.by_number),
        )


def _without(members: dict[int, Member], names: Collection[str]) -> dict[int, Member]:
    return {n: m for n, m in members.items() if m.incarnation not in names}
