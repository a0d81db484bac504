"""Who is there: a roll of the live islands, kept by all of them in the rendezvous.

    roll        the members, under an epoch that each change raises
    version     a counter that says when to read the roll again
    beat/<n>    a sign of life of member n, and its steps
    next        the next number

There is no referee. A member writes itself in, advances its beat, and looks at the
beats of the eight members after it on the roll, in a circle; whose beat stands still
for too long, it strikes off. How long that is, each measures with its own monotonic
clock, so that the clocks of two machines are never compared. Of whom it knows by other
means that it is dead, it strikes off at once; but only once, so that an error does not
last. Who finds itself struck off has been cut off, and writes itself in again; or has
been stopped, as its own clock tells it, and its weights are old. A rendezvous that
comes back empty gets the roll from the first member that finds it so.

A member makes two requests in each half second, whatever the number of members.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from lightning_adpsgd.islands.rendezvous import Rendezvous, RendezvousAway

_log = logging.getLogger(__name__)

_NUM_WATCHED = 8
# A silence lasts over so many looks at least.
_LEAST_LOOKS = 4
_TURNS_BETWEEN_READS = 10
_TRIES = 100
# In the place of the number of a member's last beat.
_GOODBYE = "goodbye"


class Member(NamedTuple):
    """A super-learner on the roll.

    Attributes:
        number: Its place in every order; given once, in order of joining.
        incarnation: Of its processes: unique, whatever its number.
        host: Name of its machine, for messages.
        addresses: Where its learners listen, "host:port" of each.
    """

    number: int
    incarnation: str
    host: str
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        return f"super-learner {self.number} on host {self.host}"


@dataclass(frozen=True)
class Roll:
    """The live members.

    Args:
        epoch: Raised by every change.
        members: By number.
    """

    epoch: int = 0
    members: Mapping[int, Member] = field(default_factory=dict)

    def holds(self, member: Member) -> bool:
        """Whether this very incarnation is on it."""
        found = self.members.get(member.number)
        return found is not None and found.incarnation == member.incarnation

    def after(self, number: int) -> list[int]:
        """The other members in a circle, from the one that follows a number."""
        numbers = sorted(self.members)
        later = [n for n in numbers if n > number]
        return later + [n for n in numbers if n < number]

    def to_json(self) -> str:
        """As the rendezvous keeps it; equal rolls are equal texts."""
        return json.dumps([self.epoch, [self.members[n] for n in sorted(self.members)]])

    @classmethod
    def from_json(cls, text: str) -> "Roll":
        """Reads what `to_json` has written, or nothing.

        Raises:
            RendezvousAway: It is something else: the store is not ours.
        """
        if not text:
            return cls()
        try:
            epoch, rows = json.loads(text)
            members = [
                Member(int(number), str(incarnation), str(host), tuple(map(str, ways)))
                for number, incarnation, host, ways in rows
            ]
            return cls(int(epoch), {member.number: member for member in members})
        except (TypeError, ValueError) as error:
            raise RendezvousAway(f"it holds no roll of ours: {error}") from error


@dataclass(frozen=True)
class Pace:
    """How often a member shows and looks for signs of life.

    Args:
        beat_s: Between two beats.
        silence_s: Without a beat after which a member counts as dead.
    """

    beat_s: float = 0.5
    silence_s: float = 3.0


_PACE = Pace()


class Watch:
    """For how long signs of life have stood still, by the observer's own clock.

    Of the time between two looks no more counts than a quarter of what is too long: a
    machine that stands still for a while wakes its observers and those whom they watch
    in any order, and nobody is dead for having been asleep at the same time.

    Args:
        silence_s: How long is too long.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._looked_at = 0.0
        self._seen: dict[str, tuple[str, float]] = {}

    def look(self, beats: Mapping[str, str], now: float) -> list[str]:
        """Takes note of the beats of those who are watched.

        Args:
            beats: By incarnation; an empty one for a member that has shown none.
            now: Seconds of a clock that never goes back.

        Returns:
            Those whose beat has stood still for too long while they were watched.
        """
        passed_s = min(now - self._looked_at, self._silence_s / _LEAST_LOOKS)
        self._looked_at, seen = now, self._seen
        self._seen = {}
        for name, beat in beats.items():
            before, silent_s = seen.get(name, ("", 0.0))
            is_silent = name in seen and before == beat
            self._seen[name] = (beat, silent_s + passed_s if is_silent else 0.0)
        return [n for n, (_, s) in self._seen.items() if s > self._silence_s]

    def forget(self) -> None:
        """Begins anew: the observer itself has not looked for long."""
        self._seen.clear()


class Membership:
    """One island's place on the roll; a thread of its own does all that it does.

    The thread writes `roll`, `steps`, `member` and `away` and replaces them whole;
    others read them. `_wanted` and `_ending` are set by others, under `_state`, which
    also guards `_dead`: incarnations to strike off, and those that were. Nobody
    waits for the thread but who begins and ends, for a bounded time.

    Args:
        rendezvous: Used by the thread alone.
        member: This island; its number is drawn in the rendezvous.
        steps: How many steps it has made.
        pace: Of beats.
        on_roll: Called by the thread when the roll has changed, or cannot be read any
            more.
        on_stopped: Called by the thread when this process has been stopped for so long
            that it was struck off: it is not written in before `enter` is called again.
        on_turn: Called by the thread after each look.

    Attributes:
        member: This island; its number is negative before it has one.
        roll: As last read.
        steps_of: Of those members at which the thread has looked, by number.
        left: Incarnations that went off the roll by themselves.
        away: Why the rendezvous cannot be reached at present; empty if it can.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        member: Member,
        steps: Callable[[], int],
        pace: Pace = _PACE,
        on_roll: Callable[[Roll], None] = lambda roll: None,
        on_stopped: Callable[[], None] = lambda: None,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._rendezvous, self._steps, self._pace = rendezvous, steps, pace
        self._on_turn = on_turn
        self._on_roll, self._on_stopped = on_roll, on_stopped
        self.member, self.roll, self.away = member, Roll(), ""
        self.steps_of: dict[int, int] = {}
        self.left = frozenset[str]()
        self._state = threading.Condition()
        self._wanted, self._ending, self._ended = False, False, False
        self._was_in, self._was_stopped, self._unread = False, False, 0
        self._version, self._beats, self._num_turns = "", 0, 0
        self._watch = Watch(pace.silence_s)
        self._store: Store | None = None
        self._have_beaten = set[int]()
        self._dead, self._struck = set[str](), set[str]()
        self._last_turn = self._away_since = time.monotonic()
        self._began = self._last_turn, 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.name = "adpsgd-members"

    # --- for others

    def start(self) -> None:
        """Begins to look; nobody sees this island before `enter`."""
        self._last_turn = time.monotonic()
        self._thread.start()

    def look(self, seconds: float) -> bool:
        """Waits until the thread has looked once more; returns whether it has."""
        with self._state:
            turn = self._num_turns
            return self._state.wait_for(lambda: self._num_turns > turn, seconds)

    def enter(self, seconds: float = 0.0) -> bool:
        """Lets the thread write this island in, and again whenever it is needed.

        Returns:
            Whether that was done within the seconds.
        """
        with self._state:
            self._wanted = True
            self._state.notify_all()
            return self._state.wait_for(lambda: self.is_in, seconds)

    def strike(self, member: Member) -> None:
        """Lets the thread strike off one who is known to be dead, no more than once."""
        with self._state:
            if member.incarnation not in self._struck:
                self._struck.add(member.incarnation)
                self._dead.add(member.incarnation)
                self._state.notify_all()

    def leave(self, seconds: float) -> None:
        """Strikes this island off and ends the thread; waits that long for it."""
        with self._state:
            self._ending = True
            self._state.notify_all()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    @property
    def is_in(self) -> bool:
        """Whether this island is on the roll, as far as it knows."""
        return self._wanted and self.roll.holds(self.member)

    @property
    def is_awake(self) -> bool:
        """Whether this process runs; not so just after a stop."""
        trains = self._steps() >= self._began[1] + 2
        return trains or time.monotonic() - self._last_turn <= self._pace.silence_s

    # --- the thread

    def _work(self) -> None:
        while not self._ending:
            self._take_turn()
            self._on_turn()
            with self._state:
                self._num_turns += 1
                self._state.notify_all()
                if not (self._ending or self._hurries()):
                    self._rest()
        self._strike_off_oneself()

    def _hurries(self) -> bool:
        """Whether there is something to tell the rendezvous at once."""
        enters = self._wanted and not self._was_in
        return not self.away and (enters or bool(self._dead))

    def _take_turn(self) -> None:
        self._began = time.monotonic(), self._steps()
        try:
            self._rendezvous.ask(self._meet)
        except RendezvousAway as error:
            self._note_absence(str(error))
        else:
            self._note_presence()
        self._note_a_stop_within_the_turn()
        self._last_turn = time.monotonic()

    def _rest(self) -> None:
        self._state.wait(self._pace.beat_s)
        self._note_a_stop(time.monotonic() - self._last_turn)
        self._last_turn = time.monotonic()

    def _note_a_stop_within_the_turn(self) -> None:
        begin, steps = self._began
        # Where a request hung on a cut link, the training went on all the same.
        if self._steps() < steps + 2:
            self._note_a_stop(time.monotonic() - begin)

    def _note_a_stop(self, seconds: float) -> None:
        if seconds > self._pace.silence_s:
            self._watch.forget()
            self._was_stopped = self._was_in

    def _meet(self, store: Store) -> None:
        if self._store is not store:
            store.add("version", 0)
            self._store, self._have_beaten = store, set()
        if self.member.number < 0:
            self._draw_number(store)
        self._beat(store)
        version, silent = self._look_at_others(store)
        self._read_roll(store, version)
        self._take_place(store)
        self._strike_off(store, silent)

    def _strike_off(self, store: Store, silent: list[str]) -> None:
        with self._state:
            dead = set(self._dead)
        names = {*silent, *dead}
        if any(member.incarnation in names for member in self.roll.members.values()):
            self._show(
                store, self._change(store, lambda members: _without(members, names))
            )
        with self._state:
            self._dead -= dead

    def _draw_number(self, store: Store) -> None:
        taken = max(self._stored_roll(store)[1].members, default=-1)
        number = store.add("next", 1) - 1
        while number <= taken:
            # A rendezvous that has lost its memory counts from 0 again.
            number = store.add("next", taken - number + 1) - 1
        self.member = self.member._replace(number=number)

    def _beat(self, store: Store) -> None:
        self._beats += 1
        store.set(f"beat/{self.member.number}", f"{self._beats} {self._steps()}")

    def _read_roll(self, store: Store, version: str) -> None:
        self._unread += 1
        # Whoever wrote it may have died before it told so.
        if version == self._version and self._unread < _TURNS_BETWEEN_READS:
            return
        text, roll = self._stored_roll(store)
        if not text and self._was_in:
            known = dict(self.roll.members)
            roll = self._change(store, lambda members: known | members)
        self._version, self._unread = version, 0
        self._show(store, roll)

    def _take_place(self, store: Store) -> None:
        self._note_a_stop_within_the_turn()
        if not self._wanted or self.roll.holds(self.member):
            self._was_stopped = self._was_stopped and not self._wanted
            self._was_in = self._was_in or self._wanted
            return
        if self._was_stopped:
            self._was_stopped, self._wanted = False, False
            _log.warning(
                "this process was stopped for so long that the others went on without "
                "it; it takes their weights before it goes on with them"
            )
            self._on_stopped()
            return
        if self.member.number in self.roll.members:
            self._draw_number(store)
        mine = {self.member.number: self.member}
        self._beat(store)
        self._show(store, self._change(store, lambda members: {**members, **mine}))
        self._was_in = True

    def _look_at_others(self, store: Store) -> tuple[str, list[str]]:
        """The version of the roll, and the incarnations that were silent for long."""
        others = self.roll.after(self.member.number)
        watched = others[:_NUM_WATCHED] if self.is_in else others
        for number in set(watched) - self._have_beaten:
            if store.check([f"beat/{number}"]):
                self._have_beaten.add(number)
        known = [number for number in watched if number in self._have_beaten]
        # This one has a time limit of its own, also where the link is cut.
        version, *found = store.multi_get(["version", *(f"beat/{n}" for n in known)])
        beats = dict.fromkeys(watched, "") | {
            n: beat.decode() for n, beat in zip(known, found, strict=True)
        }
        self.steps_of = {n: int(beat.split()[1]) for n, beat in beats.items() if beat}
        names = {self.roll.members[n].incarnation: beats[n] for n in watched}
        return version.decode(), self._watch.look(names, time.monotonic())

    def _strike_off_oneself(self) -> None:
        mine = [self.member.incarnation]

        def leave(store: Store) -> None:
            store.set(f"beat/{self.member.number}", f"{_GOODBYE} {self._steps()}")
            self._change(store, lambda members: _without(members, mine))

        try:
            if self._was_in:
                self._rendezvous.ask(leave)
        except RendezvousAway:
            _log.info("left without a word: the rendezvous is away")
        self._rendezvous.close()

    def _stored_roll(self, store: Store) -> tuple[str, Roll]:
        text = store.get("roll").decode() if store.check(["roll"]) else ""
        return text, Roll.from_json(text)

    def _change(
        self, store: Store, edit: Callable[[dict[int, Member]], dict[int, Member]]
    ) -> Roll:
        """Changes the roll, whatever others do to it meanwhile."""
        for _ in range(_TRIES):
            text, roll = self._stored_roll(store)
            members = edit(dict(roll.members))
            if text and members == roll.members:
                return roll
            changed = Roll(max(roll.epoch, self.roll.epoch) + 1, members)
            wanted = changed.to_json()
            if store.compare_set("roll", text, wanted).decode() == wanted:
                store.add("version", 1)
                return changed
        raise RendezvousAway(f"the roll changed under {_TRIES} changes of ours")

    def _show(self, store: Store, roll: Roll) -> None:
        before, self.roll = self.roll, roll
        if roll.members == before.members:
            return
        gone = [m for m in before.members.values() if not roll.holds(m)]
        self.left |= {m.incarnation for m in gone if _has_said_goodbye(store, m)}
        self._on_roll(roll)

    def _note_absence(self, reason: str) -> None:
        before, self.away = self.away, reason
        if not before:
            self._away_since = time.monotonic()
            _log.warning(
                "the rendezvous at %s cannot be reached (%s): training goes on with "
                "the super-learners that are known, and nobody can join",
                self._rendezvous.place,
                reason,
            )
            self._on_roll(self.roll)

    def _note_presence(self) -> None:
        if self.away:
            # What stood still meanwhile was the rendezvous.
            self._watch.forget()
            seconds = time.monotonic() - self._away_since
            _log.warning(
                "the rendezvous at %s is back after %.0f s, with %d super-learners on "
                "its roll",
                self._rendezvous.place,
                seconds,
                len(self.roll.members),
            )
        self.away = ""


def _has_said_goodbye(store: Store, member: Member) -> bool:
    key = f"beat/{member.number}"
    return store.check([key]) and store.get(key).decode().startswith(_GOODBYE)


def _without(members: dict[int, Member], names: Collection[str]) -> dict[int, Member]:
    return {n: m for n, m in members.items() if m.incarnation not in names}
