"""The connections of an island: whom it asks at present, and who has gone.

The roll says who is there, a topology who asks whom of them, and this module makes it
so: it dials those who are to be asked, hangs up on those who are not any more, and
closes the ring around whoever cannot be reached, whatever the roll says. Such a one is
tried again, after twice the time each time. Two islands that for a while know
different members at worst miss exchanges: who is connected is answered.

    a connection breaks    the ring is closed; if its host says that nobody listens
                           there any more, the roll is told, and so are all others
    nothing is heard       the same, and all are knocked at whom this island may need
                           next: half of them may be behind the same cable
    no roll can be read    they are knocked at now and then: nobody else tells of those
                           with whom this island is not connected
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

from lightning_adpsgd.gossip.engine import Gossip
from lightning_adpsgd.gossip.exchange import Pulled
from lightning_adpsgd.islands.following import Members
from lightning_adpsgd.islands.membership import Member
from lightning_adpsgd.topology.live import Circle
from lightning_adpsgd.transport.base import PeerLost, lane_of
from lightning_adpsgd.transport.links import (
    Address,
    Facts,
    LinkTransport,
    Refused,
    evidence_of,
    knock,
)

_log = logging.getLogger(__name__)

_DIAL = timedelta(seconds=2)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LOOK_S, _LOOK_AROUND_S = 1.0, 10.0
# An exchange that was begun is made to its end, if that does not take longer.
_HANG_UP_S = 2.0
_MOST_KNOCKS = 64


class _Unreachable(NamedTuple):
    pause_s: float
    again_at: float


class _Knocked(NamedTuple):
    member: Member
    error: OSError | None


class Edges:
    """Keeps an island connected with those whom it asks.

    A thread of its own does so once started; `pull` may be called by another. Both hold
    `_dialing` while they connect and hang up, so that one of them does. `_posted` (what
    communication threads tell) is guarded by `_state`. All else belongs to the thread.

    Args:
        transport: Of this learner.
        membership: Of this island.
        shard: Which learner of each island it talks to.
        patience: For how long a connection may take to be made.

    Attributes:
        joined: Super-learners that came since the start.
        lost: Super-learners that went without a word since then.
    """

    def __init__(
        self,
        transport: LinkTransport,
        membership: Members,
        shard: int = 0,
        patience: timedelta = _DIAL,
    ) -> None:
        self._transport, self._membership = transport, membership
        self._shard, self._patience = shard, patience
        self._gossip: Gossip | None = None
        self._state, self._dialing = threading.Condition(), threading.Lock()
        self._woken, self._ending = False, False
        self._posted: list[Callable[[], None]] = []
        self._asked, self._guests = set[int](), set[int]()
        self._unreachable: dict[int, _Unreachable] = {}
        self._doubted, self._look_around_at = set[int](), 0.0
        self._known: dict[int, Member] = {}
        self._gone = set[str]()
        self._met = set[str]()
        self._idle: Callable[[], None] = lambda: None
        self.joined = self.lost = 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.name = "adpsgd-edges"

    # --- for others

    def attend(self, gossip: Gossip) -> None:
        """The engine whose peers these are; before anything else."""
        self._gossip = gossip

    def start(self, when_apart: Callable[[], None] = lambda: None) -> None:
        """Begins to connect, with the members that are on the roll by then.

        Args:
            when_apart: Called by the thread in each turn in which this island is not
                on the roll.
        """
        self._known, self._idle = self._others(), when_apart
        self._met = {member.incarnation for member in self._known.values()}
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Ends the thread; connections stay as they are."""
        with self._state:
            self._ending = True
            self._state.notify_all()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def look(self) -> None:
        """There may be something to do."""
        with self._state:
            self._woken = True
            self._state.notify_all()

    def on_lane(self, number: int, lane: int, facts: Facts) -> None:
        """A member has connected the lane on which it asks."""
        self._engine.answer_peer(number)
        self._post(lambda: self._try_soon(number))

    def on_lost(self, number: int, error: PeerLost) -> None:
        """A communication thread has lost a member."""
        self._post(lambda: self._lose(number, error))

    def on_left(self, number: int, for_good: bool) -> None:
        """A member asks no more."""
        self._transport.disconnect(number, lane_of(number, self._transport.index))
        if for_good:
            self._post(lambda: self._part_from(number))

    def pull(self, number: int, seconds: float) -> Pulled | None:
        """The weights of a member; none if it does not answer in time.

        Raises:
            Refused: The two do not fit together; with the facts of both.
        """
        deadline = time.monotonic() + seconds
        member = self._membership.roll.members.get(number)
        if member is None:
            return None
        self._guests.add(number)
        try:
            with self._dialing:
                self._dial(member)
            future = self._engine.pull(number)
            return future.result(max(0.0, deadline - time.monotonic()))
        except (PeerLost, TimeoutError) as error:
            _log.info("%s gave no weights: %s", member, error)
            return None
        finally:
            self._guests.discard(number)
            self.look()

    # --- the thread

    def _work(self) -> None:
        try:
            while not self._ending:
                self._take_turn()
                with self._state:
                    self._state.wait_for(lambda: self._woken or self._ending, _LOOK_S)
                    self._woken = False
        except BaseException as error:
            self._engine.fail(error)

    def _take_turn(self) -> None:
        # After a stop of the process, the roll is to be read before anything is done.
        if not self._membership.is_awake:
            return
        with self._state:
            posted, self._posted = self._posted, []
        if not self._membership.is_in:
            self._stand_apart()
            return
        for action in posted:
            action()
        self._take_number()
        self._greet_and_miss()
        self._look_around_without_a_roll()
        with self._dialing:
            self._close_the_ring()
            doubted, self._doubted = self._doubted, set()
            self._knock_at(doubted)
            if self._try_again():
                self._close_the_ring()

    def _stand_apart(self) -> None:
        with self._dialing:
            alone = Circle.of(self._engine.circle.schedule, (), self._transport.index)
            self._engine.circle = alone
            for number in self._known:
                self._disconnect(number)
        self._known, self._unreachable = {}, {}
        self._idle()

    def _take_number(self) -> None:
        own = self._membership.member.number
        if own != self._transport.index:
            for number in (*self._asked, *self._known):
                self._disconnect(number)
            self._transport.rename(own)

    def _greet_and_miss(self) -> None:
        there = self._others()
        for number in there.keys() - self._known.keys():
            self._greet(there[number])
        for number, member in self._known.items():
            if there.get(number) != member:
                self._miss(member)
        self._known = there

    def _greet(self, member: Member) -> None:
        if member.incarnation in self._met:
            _log.warning("%s is back: what both have learned is averaged", member)
            return
        self._met.add(member.incarnation)
        self.joined += 1
        _log.info("%s has joined", member)

    def _miss(self, member: Member) -> None:
        """Somebody is no longer on the roll."""
        if member.incarnation in self._membership.left:
            self._take_leave_of(member)
        self._warn(member, "it has shown no sign of life")
        self._gone.discard(member.incarnation)
        self._unreachable.pop(member.number, None)
        self._disconnect(member.number)

    def _lose(self, number: int, error: PeerLost) -> None:
        """A connection has broken."""
        if number in self._unreachable:
            return
        self._disconnect(number)
        if (member := self._known.get(number)) is not None:
            self._avoid(member)
            self._warn(member, error.detail)
            if error.evidence == "silence":
                self._look_around()
            else:
                self._doubted.add(number)

    def _look_around_without_a_roll(self) -> None:
        """As soon as none can be read, and now and then after that."""
        now = time.monotonic()
        if not self._membership.away:
            self._look_around_at = now
        elif now >= self._look_around_at:
            self._look_around()
            self._look_around_at = time.monotonic() + _LOOK_AROUND_S

    def _look_around(self) -> None:
        """Avoids all who are not connected and cannot be, before they are needed."""
        near = self._asked | self._unreachable.keys()
        for member, error in self._knock_at(self._known.keys() - near):
            if error is not None:
                self._avoid(member)

    def _knock_at(self, numbers: Collection[int]) -> list[_Knocked]:
        """What is wrong with the ways to several members, all within a second.

        Who turns out to be dead goes off the roll, for all the others as well.
        """
        members = [self._known[n] for n in sorted(numbers) if n in self._known]
        if not members:
            return []
        addresses = [Address.parse(one.addresses[self._shard]) for one in members]
        with ThreadPoolExecutor(min(len(members), _MOST_KNOCKS)) as pool:
            found = list(map(_Knocked, members, pool.map(knock, addresses)))
        for member, error in found:
            if evidence_of(error) == "refusal":
                self._membership.strike(member)
        return found

    def _avoid(self, member: Member) -> None:
        """The ring closes around somebody on the roll who cannot be reached."""
        before = self._unreachable.get(member.number)
        pause_s = (
            min(2 * before.pause_s, _LONGEST_PAUSE_S) if before else _FIRST_PAUSE_S
        )
        again_at = time.monotonic() + pause_s
        self._unreachable[member.number] = _Unreachable(pause_s, again_at)

    def _warn(self, member: Member, reason: str) -> None:
        """Once for each member, however its loss shows."""
        if member.incarnation in self._gone:
            return
        self._gone.add(member.incarnation)
        self.lost += 1
        left = len(self._reachable() - {member.number}) + 1
        _log.warning(
            "lost %s: %s. The ring is closed around it; training goes on with %s",
            member,
            reason,
            f"{left} super-learners" if left > 1 else "this super-learner alone",
        )

    def _part_from(self, number: int) -> None:
        member = self._known.get(number)
        if member is not None:
            self._unreachable[number] = _Unreachable(_LONGEST_PAUSE_S, float("inf"))
            self._take_leave_of(member)
            self._disconnect(number)

    def _take_leave_of(self, member: Member) -> None:
        if member.incarnation not in self._gone:
            self._gone.add(member.incarnation)
            _log.info("%s has left", member)

    def _try_soon(self, number: int) -> None:
        """Somebody has come who could not be reached."""
        if (one := self._unreachable.get(number)) is not None:
            self._unreachable[number] = one._replace(again_at=0.0)

    def _try_again(self) -> bool:
        """Reaches for those whose time has come; returns whether one can be reached."""
        now = time.monotonic()
        due = {n for n, one in self._unreachable.items() if one.again_at <= now}
        found = False
        for member, error in self._knock_at(due):
            if error is None:
                found |= self._reach(member)
            else:
                self._note_out_of_reach(member, str(error))
        return found

    def _close_the_ring(self) -> None:
        """Dials whom it asks, and draws the ring anew as long as somebody is missed."""
        while True:
            circle = self._circle()
            self._engine.circle, wanted = circle, set(circle.peers())
            self._transport.size = len(circle.numbers)
            missing = wanted - self._asked
            if all(self._reach(self._known[number]) for number in sorted(missing)):
                break
        self._hang_up_on(self._asked - wanted - self._guests)

    def _circle(self) -> Circle:
        schedule = self._engine.circle.schedule
        return Circle.of(schedule, self._reachable(), self._transport.index)

    def _reachable(self) -> set[int]:
        return self._known.keys() - self._unreachable.keys()

    def _reach(self, member: Member) -> bool:
        try:
            self._dial(member)
        except (PeerLost, Refused) as error:
            self._note_out_of_reach(member, getattr(error, "detail", str(error)))
            self._doubted.add(member.number)
            return False
        if self._unreachable.pop(member.number, None) is not None:
            _log.warning("%s can be reached again", member)
            self._gone.discard(member.incarnation)
        return True

    def _note_out_of_reach(self, member: Member, reason: str) -> None:
        tried_before = member.number in self._unreachable
        self._avoid(member)
        # The roll may be about to say that it has left.
        if tried_before:
            self._warn(member, reason)

    def _dial(self, member: Member) -> None:
        """Begins to ask a member; nothing if it is asked already."""
        if member.number in self._asked:
            return
        address = Address.parse(member.addresses[self._shard])
        self._transport.connect(member.number, address, self._patience)
        self._asked.add(member.number)
        self._engine.add_peer(member.number)

    def _hang_up_on(self, numbers: Collection[int]) -> None:
        ended = [(n, self._engine.drop_peer(n)) for n in numbers]
        deadline = time.monotonic() + _HANG_UP_S
        for number, event in ended:
            event.wait(max(0.0, deadline - time.monotonic()))
            lane = lane_of(self._transport.index, number)
            self._transport.disconnect(number, lane)
            self._asked.discard(number)

    def _disconnect(self, number: int) -> None:
        """Both ways, and at once."""
        self._engine.forget_peer(number)
        self._transport.disconnect(number)
        self._asked.discard(number)

    def _others(self) -> dict[int, Member]:
        roll, own = self._membership.roll, self._membership.member
        return {n: m for n, m in roll.members.items() if n != own.number}

    def _post(self, action: Callable[[], None]) -> None:
        with self._state:
            self._posted.append(action)
        self.look()

    @property
    def _engine(self) -> Gossip:
        assert self._gossip is not None
        return self._gossip
