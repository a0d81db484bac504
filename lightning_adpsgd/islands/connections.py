"""The connections of an island: the peers that it asks, and those that it has lost.

The member list says which islands are present, and the topology which of them this one
asks. The thread of this module dials those, and disconnects others. It leaves a member
that cannot be reached out of the topology, whatever the list says, and dials it again
after pauses that double, up to 8 s. Two islands may know different members for a while.
At worst they miss exchanges, because any island that connects is answered.

    a connection breaks     the peer is left out; if its port refuses connections, it is
                            evicted from the member list, for all islands
    a peer is silent        it is left out, and all members that this island may need
                            next are probed: half of them may be behind the same cable
    the list is unreadable  all members are probed now and then: without a list, this
                            island cannot learn that unconnected islands have died
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from typing_extensions import override

from lightning_adpsgd.gossip.engine import Gossip
from lightning_adpsgd.gossip.protocol import Pulled
from lightning_adpsgd.islands.member_list import Member
from lightning_adpsgd.islands.membership_reader import MembershipView
from lightning_adpsgd.islands.peer_status import Event, News, Peer, Status, transition
from lightning_adpsgd.islands.section_links import SectionLinks
from lightning_adpsgd.islands.service import ServiceThread
from lightning_adpsgd.topology.schedule import LiveSchedule
from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.transport.links.credentials import BadCredentials
from lightning_adpsgd.transport.links.handshake import Refused
from lightning_adpsgd.transport.links.sockets import Address, evidence_of, probe
from lightning_adpsgd.transport.links.transport import LinkTransport

_log = logging.getLogger(__name__)

_TURN_S, _PROBE_AROUND_S = 1.0, 10.0
# How long a turn waits until members know that they are not asked any more.
_HANG_UP_S = 2.0
_MOST_PROBES = 64
MOST_UNLISTED = 32
"""The most members that may ask although this island has not seen them on the list."""


def _bound_unlisted(
    number: int, callers: Collection[int], listed: Collection[int]
) -> None:
    unlisted = [caller for caller in callers if caller not in listed]
    if number not in listed and len(unlisted) > MOST_UNLISTED:
        raise ConnectionRefusedError(
            f"{MOST_UNLISTED} islands that are not on the member list are "
            "already asking"
        )


def _dial_patiently(dial: Callable[[], None], tries: int, deadline: float) -> None:
    """Dials up to `tries` times before the deadline, as long as nothing answers.

    One lost packet leaves no member out: a dial ends before the kernel repeats one.
    """
    for left in reversed(range(tries)):
        try:
            dial()
            break
        except PeerLost as error:
            is_in_time = time.monotonic() < deadline
            if not (left and is_in_time and error.evidence == "silence"):
                raise


def _warn_of_loss(
    member: Member, reason: str, calls_from: Address | None, num_left: int
) -> None:
    """Warns that a member is lost.

    Args:
        calls_from: address of the member if it still asks this one; otherwise None.
        num_left: number of islands that are left, including this one.
    """
    if calls_from is not None:
        _log.warning(
            "%s asks this island, but cannot be reached at its address %s (%s). "
            "Look for a firewall or an address translation on its side, or another "
            "address of its host. It exchanges when it asks, and its weights are left "
            "out of validations and of the consensus model",
            *(member, calls_from, reason),
        )
        return
    left = f"{num_left} islands" if num_left > 1 else "this island alone"
    _log.warning(
        "lost %s: %s. The others connect around it; training continues with %s",
        *(member, reason, left),
    )


class _Posted(NamedTuple):
    number: int
    event: Event
    reason: str


class Connections(ServiceThread):
    """Keeps an island connected with the peers that it asks.

    Its thread begins with the members that are on the list when it starts. Connections
    stay open when it ends. Any thread may call `pull`. The thread and `pull` hold
    `_dialing` while they dial and hang up. Three attributes also change without it, in
    single set and dict operations, so that news of a loss does not wait for a dial:

    - `_dialed`: numbers of the members that are asked.
    - `_temporary`: numbers of those that are asked only for a `pull`.
    - `why_none`: the last reason why a member gave no weights, by its incarnation.

    `_state` guards `_posted`, the events that communication threads report. `_peers`
    belongs to the thread.

    Args:
        transports: as in `SectionLinks`; a single one if all islands have one size.
        on_unlisted: called by the thread in each turn while this island is not listed.
        shards: as in `SectionLinks`.

    Attributes:
        joined: number of islands that have joined since `start`.
        lost: number of islands that have left without a goodbye since `start`.
    """

    def __init__(
        self,
        transports: Sequence[LinkTransport],
        membership: MembershipView,
        engine: Gossip,
        on_unlisted: Callable[[], None],
        shards: Sequence[int] = (0,),
    ) -> None:
        fail = engine.threads.fail
        super().__init__("the thread of connections", "adpsgd-connections", fail)
        self._membership, self._on_unlisted = membership, on_unlisted
        self.engine, peers = engine, engine.peers_by_section
        self._links = SectionLinks(transports, peers, shards)
        self._dialing, self._woken = threading.Lock(), False
        self._posted: list[_Posted] = []
        self._dialed, self._temporary = set[int](), set[int]()
        self._peers: dict[str, Peer] = {}  # all members ever met, by incarnation
        self._probe_around_at, self.why_none = 0.0, dict[str, str]()
        self.joined = self.lost = 0

    # --- for others

    @override
    def start(self) -> None:
        self._peers = {one.incarnation: Peer(one) for one in self._listed()}
        super().start()

    def wake(self) -> None:
        """Begins the next turn at once, because there may be work."""
        with self._state:
            self._woken = True
            self._state.notify_all()

    def on_lane(self, section: int, number: int) -> None:
        """Starts to answer a member that has connected its lane for a section.

        Raises:
            ConnectionRefusedError: Too many members connect that are not on the list,
                such as starting islands. They may try again.
        """
        listed = self._membership.members.by_number
        _bound_unlisted(number, self._links.callers(section), listed)
        self._links.answer(section, number)
        self._post(number, Event.CALLED)

    def on_lost(self, number: int, error: PeerLost) -> None:
        """Reports a lost member; for communication threads."""
        is_silent = error.evidence == "silence"
        self._post(number, Event.SILENT if is_silent else Event.LOST, error.detail)

    def on_left(self, number: int, for_good: bool) -> None:
        """Reports that a member has stopped asking."""
        if for_good:
            self._post(number, Event.GOODBYE)

    def pull(
        self, number: int, seconds: float, watch: Callable[[float], None] | None = None
    ) -> Pulled | None:
        """The weights of a member; None if it does not answer in time.

        Args:
            seconds: as for `Gossip.pull`, with or without a `watch`.

        Raises:
            Refused: The two islands do not match; the message says why.
        """
        deadline = time.monotonic() + seconds
        member = self._membership.members.by_number.get(number)
        if member is None:
            return None
        peer = self._peers.get(member.incarnation)
        tries = 1 if peer is not None and peer.status is Status.SUSPECT else 3

        def dial() -> None:
            with self._dialing:
                self._dial(member)

        self._temporary.add(number)
        try:
            _dial_patiently(dial, tries, deadline)
            return self.engine.pull(number, deadline - time.monotonic(), watch)
        except (PeerLost, TimeoutError) as error:
            self._say_why_none(member, error)
            has_broken = isinstance(error, PeerLost)
            with self._dialing:
                # So that the next pull dials again: before the start, no thread does.
                if has_broken or not self._thread.is_alive():
                    self._hang_up_on(self._dialed & {number})
            return None
        finally:
            self._temporary.discard(number)
            self.wake()

    def _say_why_none(self, member: Member, error: Exception) -> None:
        """Logs why a member gave no weights; warns if a start waits and it is news."""
        reason = getattr(error, "detail", str(error)) or "they came too late"
        is_news = self.why_none.get(member.incarnation) != reason
        self.why_none[member.incarnation] = reason
        waits = is_news and not self._thread.is_alive()
        level = logging.WARNING if waits else logging.INFO
        _log.log(level, "%s gave no weights: %s", member, reason)

    # --- the thread

    @override
    def _rest(self) -> None:
        self._state.wait_for(lambda: self._woken or self._ending, _TURN_S)
        self._woken = False

    @override
    def _take_turn(self) -> None:
        # After a stop of the process, the list must be read before anything is done.
        if not self._membership.is_awake:
            return
        with self._state:
            posted, self._posted = self._posted, []
        if not self._membership.is_in:
            self._stand_apart()
            return
        for one in posted:
            self._handle(one)
        self.take_number()
        self._follow_list()
        self._probe_around_without_list()
        with self._dialing:
            self._links.break_off_ended()
            self._connect_to_peers()
            self._probe([one for one in self._present() if one.needs_probe])
            if self._retry_suspects():
                self._connect_to_peers()

    def _stand_apart(self) -> None:
        with self._dialing:
            self._ask_nobody(self._links.own)
            for peer in self._present():
                self._observe(peer.member, Event.FORGOTTEN)
                self._disconnect(peer.member.number)
        self._on_unlisted()

    def _ask_nobody(self, own: int) -> None:
        schedule = self.engine.members.live_schedule.schedule
        self.engine.members.live_schedule = LiveSchedule.of(schedule, (), own)

    def take_number(self) -> None:
        """Adopts the number from the membership; for any thread before the start."""
        own = self._membership.member
        if own.number != self._links.own:
            numbers = {one.member.number for one in self._present()}
            for number in self._dialed | numbers:
                self._disconnect(number)
            self._ask_nobody(own.number)
        self._links.rename(own)

    def _handle(self, posted: _Posted) -> None:
        number, event, reason = posted
        same = (one for one in self._present() if one.member.number == number)
        peer = next(same, None)
        is_loss = event in (Event.LOST, Event.SILENT)
        if is_loss and peer is not None and peer.status is Status.SUSPECT:
            return
        if is_loss or event is Event.GOODBYE:
            self._disconnect(number)
        if peer is not None:
            self._observe(peer.member, event, reason)
        if peer is not None and event is Event.SILENT:
            self._probe_around()

    def _follow_list(self) -> None:
        listed = self._listed()
        for peer in self._present():
            if peer.member not in listed:
                left = peer.member.incarnation in self._membership.left
                event = Event.GOODBYE if left else Event.UNLISTED
                self._observe(peer.member, event, "it has shown no sign of life")
                self._disconnect(peer.member.number)
        for member in sorted(listed):
            if (peer := self._peers.get(member.incarnation)) is not None:
                # Its number may have changed.
                self._peers[member.incarnation] = peer._replace(member=member)
                self._observe(member, Event.LISTED)
            else:
                self._peers[member.incarnation] = Peer(member)
                self.joined += 1
                level = logging.WARNING if self.lost else logging.INFO
                _log.log(level, "%s has joined, as a new process", member)

    def _probe_around_without_list(self) -> None:
        """Probes others when the list becomes unreadable, and every 10 s from then."""
        now = time.monotonic()
        if not self._membership.outage:
            self._probe_around_at = now
        elif now >= self._probe_around_at:
            self._probe_around()
            self._probe_around_at = time.monotonic() + _PROBE_AROUND_S

    def _probe_around(self) -> None:
        """Probes the peers that are not asked; suspects those that do not answer."""
        idle = [p for p in self._alive() if p.member.number not in self._dialed]
        for peer, error in self._probe(idle):
            if error is not None:
                self._observe(peer.member, Event.PROBE_FAILED, str(error))

    def _probe(self, peers: Collection[Peer]) -> list[tuple[Peer, OSError | None]]:
        """Probes peers, 64 at a time, each within a second.

        A peer whose host refuses the connection is evicted from the list, for all
        islands.

        Returns:
            Each peer with the error of its probe; None if something listens.
        """
        if not peers:
            return []
        addresses = [self._links.address_of(peer.member) for peer in peers]
        with ThreadPoolExecutor(min(len(addresses), _MOST_PROBES)) as pool:
            errors = list(pool.map(probe, addresses))
        for peer, error in zip(peers, errors, strict=True):
            self._observe(peer.member, Event.PROBED)
            if evidence_of(error) == "refusal":
                self._membership.evict(peer.member)
        return list(zip(peers, errors, strict=True))

    def _retry_suspects(self) -> bool:
        """Dials the suspects that are due; returns whether one was reached."""
        now, reached = time.monotonic(), False
        for peer, error in self._probe([p for p in self._present() if p.is_due(now)]):
            if error is None:
                reached |= self._reach(peer)
            else:
                self._observe(peer.member, Event.PROBE_FAILED, str(error))
        return reached

    def _connect_to_peers(self) -> None:
        """Dials the peers to ask; if one cannot be reached, asks the topology again."""
        while True:
            alive = {peer.member.number: peer for peer in self._alive()}
            schedule = self.engine.members.live_schedule.schedule
            live = LiveSchedule.of(schedule, alive, self._links.own)
            self.engine.members.live_schedule, wanted = live, set(live.peers())
            missing = sorted(wanted - self._dialed)
            if all(self._reach(alive[number]) for number in missing):
                break
        self._hang_up_on(self._dialed - wanted - self._temporary)

    def _reach(self, peer: Peer) -> bool:
        try:
            self._dial(peer.member)
        except (PeerLost, Refused) as error:
            reason = getattr(error, "detail", str(error))
            self._observe(peer.member, Event.DIAL_FAILED, reason)
            return False
        self._observe(peer.member, Event.REACHED)
        return True

    def _dial(self, member: Member) -> None:
        """Starts to ask a member; does nothing if it is asked already."""
        if member.number in self._dialed:
            return
        try:
            self._links.ask(member)
        except BadCredentials as error:
            if not self._thread.is_alive():
                raise
            # Those of the start could be used, and the files may be back soon.
            raise PeerLost(member.number, "connecting", str(error)) from error
        self._dialed.add(member.number)

    def _hang_up_on(self, numbers: set[int]) -> None:
        self._links.stop_asking(numbers, _HANG_UP_S)
        self._dialed -= numbers

    def _disconnect(self, number: int) -> None:
        self._links.disconnect(number)
        self._dialed.discard(number)

    # --- the belief about each peer

    def _observe(self, member: Member, event: Event, reason: str = "") -> None:
        name, now = member.incarnation, time.monotonic()
        self._peers[name], news = transition(self._peers[name], event, now)
        match news:
            case News.LOST:
                self.lost += 1
                # A stopped process's kernel keeps its connections, and answers a probe.
                calls = member.number in self._links.callers()
                is_one_way = calls and event is Event.PROBE_FAILED
                address = self._links.address_of(member) if is_one_way else None
                _warn_of_loss(member, reason, address, len(self._alive()) + 1)
            case News.LEFT:
                _log.info("%s has left", member)
            case News.REACHABLE:
                _log.warning("%s can be reached again", member)
            case News.BACK:
                _log.warning(
                    "%s is on the member list again after a break in the connection; "
                    "its weights and ours are averaged",
                    member,
                )
            case News.NONE:
                pass

    def _present(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.is_present]

    def _alive(self) -> list[Peer]:
        return [one for one in self._peers.values() if one.status is Status.ALIVE]

    def _listed(self) -> set[Member]:
        members, own = self._membership.members, self._membership.member
        return {members.by_number[number] for number in members.after(own.number)}

    def _post(self, number: int, event: Event, reason: str = "") -> None:
        with self._state:
            self._posted.append(_Posted(number, event, reason))
        self.wake()
