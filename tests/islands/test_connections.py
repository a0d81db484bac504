"""Turns of the thread of connections, by hand, with peers that are only played."""

import logging
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_adpsgd.islands import connections, section_links
from lightning_adpsgd.islands.connections import MOST_UNLISTED, Connections
from lightning_adpsgd.islands.member_list import Member, MemberList
from lightning_adpsgd.islands.peer_status import Event, Peer, Status
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import LiveSchedule, Schedule
from lightning_adpsgd.transport.base import Evidence, PeerLost
from lightning_adpsgd.transport.links.credentials import BadCredentials
from lightning_adpsgd.transport.links.handshake import Refused
from lightning_adpsgd.transport.links.sockets import probe
from tests.helpers import PATIENCE_S, until
from tests.islands.archipelago import still_clock

OWN, ONE, TWO, *FAR = (
    Member(number, f"start {number}", "host", (f"127.0.0.1:{number + 1}",))
    for number in range(5)
)


class Played:
    """What connections call: engine, transport, membership and the other hosts."""

    def __init__(self) -> None:
        self.evicted: list[Member] = []
        self.dropped: list[int] = []
        self.disconnected: list[int] = []
        self.forgotten: list[int] = []
        self.answered: list[int] = []
        self.refuses: dict[int, OSError] = {}  # by port
        self.probed: list[int] = []
        self.pulled: Future[Any] = Future()
        live_schedule = LiveSchedule.of(Schedule(find_topology("ring"), 3), (), 0)
        peers = SimpleNamespace(
            drop=self._drop,
            add=lambda number: None,
            forget=self.forgotten.append,
            answer=self.answered.append,
        )
        members = SimpleNamespace(live_schedule=live_schedule)
        self.engine: Any = SimpleNamespace(
            threads=SimpleNamespace(fail=lambda error: None),
            peers_by_section=[peers],
            members=members,
            pull=lambda number, seconds, watch: self.pulled.result(seconds),
        )
        self.transport: Any = SimpleNamespace(
            index=0,
            origin="",
            connect=lambda *_: None,
            rename=lambda *_: None,
            disconnect=lambda number, *lane: self.disconnected.append(number),
            callers=lambda: [],
        )
        self.membership: Any = SimpleNamespace(
            member=OWN,
            members=MemberList(1, {m.number: m for m in (OWN, ONE, TWO)}),
            is_awake=True,
            is_in=True,
            outage="",
            left=frozenset(),
            evict=self.evicted.append,
        )

    def _drop(self, number: int) -> threading.Event:
        self.dropped.append(number)
        (ended := threading.Event()).set()
        return ended

    def probe(self, address: Any) -> OSError | None:
        self.probed.append(address.port)
        return self.refuses.get(address.port)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    found = Played()
    monkeypatch.setattr(connections, "probe", found.probe)
    return found


@pytest.fixture
def ours(played: Played) -> Connections:
    return Connections(
        [played.transport], played.membership, played.engine, lambda: None
    )


def status_of(ours: Connections, member: Member) -> Status:
    return ours._peers[member.incarnation].status


def in_a_ring_of_five(played: Played) -> None:
    """This island asks members 1 and 4."""
    everybody = (OWN, ONE, TWO, *FAR)
    played.membership.members = MemberList(1, {m.number: m for m in everybody})


def ended_by(played: Played) -> list[tuple[int, ...]]:
    """The members that are disconnected from now on, some in one lane alone."""
    ended = list[tuple[int, ...]]()
    played.transport.disconnect = lambda *which: ended.append(which)
    return ended


def has_begun(ours: Connections, begun: bool) -> None:
    """Whether its thread runs, as far as it can tell."""
    thread: Any = SimpleNamespace(is_alive=lambda: begun)
    ours._thread = thread


def lose_one(ours: Connections, played: Played, answer: OSError) -> None:
    """Breaks the connection to a member, whose host then answers a probe so."""
    ours._take_turn()
    played.refuses[2] = answer
    ours.on_lost(1, PeerLost(1, "a test", "it broke"))
    ours._take_turn()


def test_members_that_join_are_counted_and_dialed(
    ours: Connections, played: Played
) -> None:
    ours._take_turn()
    assert ours.joined == 2
    assert ours._dialed == {1, 2}
    played.membership.members = MemberList(2, {0: OWN, 1: ONE})
    played.membership.left = frozenset({TWO.incarnation})
    ours._take_turn()
    assert (ours.joined, ours.lost) == (2, 0)
    assert status_of(ours, TWO) is Status.LEFT
    assert ours.engine.members.live_schedule.numbers == (0, 1)


def test_after_a_loss_one_that_joins_is_seen_at_the_default_level(
    ours: Connections, played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be the lost one, which its launcher has started again."""
    lose_one(ours, played, ConnectionRefusedError())
    assert not [text for text in caplog.messages if "has joined" in text]
    again = Member(3, "start 3", "host", ("127.0.0.1:4",))
    played.membership.members = MemberList(2, {m.number: m for m in (OWN, TWO, again)})
    ours._take_turn()
    told = [one for one in caplog.records if "has joined" in one.message]
    assert [one.message for one in told] == [f"{again} has joined, as a new process"]
    assert told[0].levelname == "WARNING"


def test_the_host_of_a_lost_peer_is_asked_and_a_refusal_evicts_it(
    ours: Connections, played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    lose_one(ours, played, ConnectionRefusedError())
    assert played.probed == [2]
    assert played.evicted == [ONE]
    assert (ours.lost, status_of(ours, ONE)) == (1, Status.SUSPECT)
    assert ours.engine.members.live_schedule.numbers == (0, 2)
    (message,) = caplog.messages
    assert message.endswith("training continues with 2 islands")


def test_a_second_loss_of_a_suspect_is_no_news_and_a_call_of_it_is(
    ours: Connections, played: Played
) -> None:
    played.refuses[2] = TimeoutError()
    ours._take_turn()
    for _ in range(2):
        ours.on_lost(1, PeerLost(1, "a test", "it broke"))
        ours._take_turn()
    assert (ours.lost, played.disconnected) == (1, [1])
    # It asks this island, and so can be reached.
    played.refuses.clear()
    ours.on_lane(0, 1)
    ours._take_turn()
    assert (status_of(ours, ONE), played.answered) == (Status.ALIVE, [1])
    assert ours.engine.members.live_schedule.numbers == (0, 1, 2)
    assert ours._dialed == {1, 2}


def test_who_asks_and_cannot_be_dialed_is_told_from_one_that_is_lost(
    ours: Connections, played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    """It exchanges on, and its weights are missing from the mean."""

    def connect(number: int, *_: object) -> None:
        raise PeerLost(number, "connecting", "timed out", "silence")

    played.transport.connect = connect
    played.transport.callers = lambda: [1]
    played.refuses = {2: TimeoutError("timed out"), 3: TimeoutError("timed out")}
    ours._take_turn()
    for number in (1, 2):
        ours._post(number, Event.CALLED)
    ours._take_turn()
    one, two = caplog.messages
    assert f"{ONE} asks this island, but cannot be reached at its" in one
    assert "at its address 127.0.0.1:2 (timed out)" in one
    assert two.startswith(f"lost {TWO}: timed out. The others connect around it")


def test_who_is_stopped_is_lost_although_its_connections_stand(
    ours: Connections, played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    played.transport.callers = lambda: [1]
    ours._take_turn()
    played.membership.members = MemberList(2, {0: OWN, 2: TWO})
    ours._take_turn()
    (message,) = caplog.messages
    assert message.startswith(f"lost {ONE}: it has shown no sign of life")
    assert (played.forgotten, played.dropped, ours._dialed) == ([1], [], {2})


def test_without_a_list_peers_that_are_not_asked_are_probed_now_and_then(
    ours: Connections, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = still_clock(monkeypatch, connections)
    in_a_ring_of_five(played)
    ours._take_turn()
    assert (ours._dialed, played.probed) == ({1, 4}, [])
    played.membership.outage = "it is away"
    ours._take_turn()
    assert sorted(played.probed) == [3, 4]
    for seconds, num_probes in ((1.0, 2), (8.9, 2), (0.2, 4)):
        clock.now += seconds
        ours._take_turn()
        assert len(played.probed) == num_probes


def test_an_island_that_takes_its_number_is_alone_in_its_ring(
    ours: Connections, played: Played
) -> None:
    played.membership.member = TWO._replace(number=7)
    renamed = list[int]()
    played.transport.rename = lambda number, *_: renamed.append(number)
    ours.take_number()
    assert renamed == [7]
    live = ours.engine.members.live_schedule
    assert (live.own, live.numbers) == (7, (7,))


@pytest.mark.parametrize("has_broken", [False, True])
@pytest.mark.parametrize("has_started", [False, True])
def test_who_gives_no_weights_is_asked_on_if_its_connection_holds(
    ours: Connections, played: Played, has_started: bool, has_broken: bool
) -> None:
    """Before the start there is no thread that would dial it anew."""
    has_begun(ours, has_started)
    if has_broken:
        played.pulled.set_exception(PeerLost(1, "a test", "it broke"))
    assert ours.pull(1, 0.01) is None
    assert played.dropped == ([1] if has_broken or not has_started else [])
    assert ours._dialed == (set() if played.dropped else {1})


@pytest.mark.parametrize(
    ("evidence", "seconds", "num_lost", "num_dials", "comes"),
    [
        ("silence", 60.0, 1, 2, True),
        ("silence", 60.0, 2, 3, True),
        ("silence", 60.0, 3, 3, False),
        ("silence", 0.0, 1, 1, False),
        ("refusal", 60.0, 1, 1, False),
    ],
)
def test_a_lost_packet_leaves_no_weights_out(
    ours: Connections,
    played: Played,
    evidence: Evidence,
    seconds: float,
    num_lost: int,
    num_dials: int,
    comes: bool,
) -> None:
    """A dial ends within a second, after which the kernel would send it again."""
    dials = list[int]()

    def connect(number: int, *_: object) -> None:
        dials.append(number)
        if len(dials) <= num_lost:
            raise PeerLost(number, "connecting", "timed out", evidence)

    played.transport.connect = connect
    played.pulled.set_result("weights")
    assert ours.pull(1, seconds) == ("weights" if comes else None)
    assert dials == [1] * num_dials


def test_who_is_thought_to_be_lost_is_dialed_once_for_its_weights(
    ours: Connections, played: Played
) -> None:
    """Else each of many absent members would cost every mean three seconds."""
    lose_one(ours, played, TimeoutError())
    dials = list[int]()

    def connect(number: int, *_: object) -> None:
        dials.append(number)
        raise PeerLost(number, "connecting", "timed out", "silence")

    played.transport.connect = connect
    assert ours.pull(1, 60.0) is None
    assert dials == [1]


def test_who_is_in_the_middle_of_giving_is_not_broken_off(
    ours: Connections, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count this island as lost, and connect around it."""
    clock = still_clock(monkeypatch, section_links)
    monkeypatch.setattr(connections, "_HANG_UP_S", 0.0)
    ended = {number: threading.Event() for number in (1, 2)}
    monkeypatch.setattr(ours.engine.peers_by_section[0], "drop", ended.get)
    ours._take_turn()
    ours._hang_up_on({1, 2})
    assert (ours._dialed, played.disconnected) == (set(), [])
    ended[1].set()
    ours._links.break_off_ended()
    assert played.disconnected == [1]
    clock.now += 299.0
    ours._links.break_off_ended()
    assert played.disconnected == [1]
    clock.now += 2.0
    ours._links.break_off_ended()
    assert played.disconnected == [1, 2]


@pytest.mark.parametrize("how", ["asked again", "another number", "a turn"])
def test_a_connection_that_ends_is_in_the_way_of_no_other(
    ours: Connections, played: Played, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(connections, "_HANG_UP_S", 0.0)
    ended = threading.Event()
    monkeypatch.setattr(ours.engine.peers_by_section[0], "drop", lambda _: ended)
    ours._links.ask(ONE)
    ours._links.stop_asking({1}, 0.0)
    assert played.disconnected == []
    if how == "asked again":
        ours._links.ask(ONE)
    elif how == "another number":
        ours._links.rename(OWN._replace(number=9))
    else:
        ended.set()
        ours._take_turn()
    assert played.disconnected == [1]
    ours._links.break_off_ended()
    assert played.disconnected == [1]


@pytest.mark.parametrize("has_started", [False, True])
def test_credentials_that_go_end_an_island_at_its_start_alone(
    ours: Connections, played: Played, has_started: bool
) -> None:
    def cannot_use(*_: object) -> None:
        raise BadCredentials("cannot use member.pem")

    has_begun(ours, has_started)
    played.transport.connect = cannot_use
    if not has_started:
        with pytest.raises(BadCredentials, match=r"cannot use member\.pem"):
            ours.pull(1, 0.01)
        return
    assert ours.pull(1, 0.01) is None
    ours._take_turn()
    assert {status_of(ours, one) for one in (ONE, TWO)} == {Status.SUSPECT}
    played.transport.connect = lambda *_: None
    ours.on_lane(0, 1)
    ours._take_turn()
    assert ours._dialed == {1}


def test_an_island_that_waits_to_start_says_once_why_a_member_gives_nothing(
    ours: Connections, played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason may be a certificate that has expired, and the address right."""
    reasons = iter(["certificate has expired", "certificate has expired", "it broke"])

    def fail(*_: object) -> None:
        raise PeerLost(1, "connecting to 127.0.0.1:2", next(reasons))

    played.transport.connect = fail
    for _ in range(3):
        assert ours.pull(1, 0.01) is None
    expected = (
        f"{ONE} gave no weights: connecting to 127.0.0.1:2: {why}"
        for why in ("certificate has expired", "it broke")
    )
    assert [record.getMessage() for record in caplog.records] == [*expected]


def test_a_member_without_an_address_cannot_be_reached_and_ends_nothing(
    ours: Connections, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "probe", probe)
    homeless = ONE._replace(addresses=())
    ((_, error),) = ours_probes(ours, homeless)
    assert isinstance(error, OSError)


def ours_probes(ours: Connections, member: Member) -> Any:
    ours._peers[member.incarnation] = peer = Peer(member)
    return ours._probe([peer])


def test_who_is_on_the_list_is_answered_however_many_strangers_ask() -> None:
    strangers = range(100, 101 + MOST_UNLISTED)
    connections._bound_unlisted(1, [*strangers, 1], {1: ONE})
    connections._bound_unlisted(100, strangers[1:], {1: ONE})
    with pytest.raises(ConnectionRefusedError, match="32 islands that are not on"):
        connections._bound_unlisted(100, strangers, {1: ONE})


def test_those_that_are_there_at_the_start_have_not_joined(
    ours: Connections, played: Played
) -> None:
    ours._ending = True  # its thread ends without a turn
    ours.start()
    ours.stop(PATIENCE_S)
    ours._take_turn()
    assert (ours.joined, ours._dialed) == (0, {1, 2})


def test_a_turn_is_taken_at_once_where_there_is_work_and_each_second_else(
    ours: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = list[tuple[bool, float]]()

    def rest(is_over: Any, seconds: float) -> None:
        rests.append((is_over(), seconds))

    monkeypatch.setattr(ours._state, "wait_for", rest)
    ours.wake()
    ours._rest()
    ours._rest()
    ours.on_left(1, for_good=True)
    ours._rest()
    assert rests == [(True, 1.0), (False, 1.0), (True, 1.0)]


def test_news_wakes_the_thread_that_rests(
    ours: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_TURN_S", 10 * PATIENCE_S)
    ours.start()
    until(lambda: ours._num_turns == 1, "the first turn")
    ours.on_left(1, for_good=True)
    until(lambda: status_of(ours, ONE) is Status.LEFT, "the second turn")
    ours.stop(PATIENCE_S)


@pytest.mark.parametrize("how", ["is lost", "is silent", "leaves"])
def test_who_is_gone_is_disconnected_in_both_lanes_and_told_nothing(
    ours: Connections, played: Played, how: str
) -> None:
    """Its threads end with their connections, and report no loss of their own."""
    ours._take_turn()
    ended = ended_by(played)
    if how == "leaves":
        ours.on_left(1, for_good=True)
    else:
        evidence: Evidence = "silence" if how == "is silent" else ""
        ours.on_lost(1, PeerLost(1, "a test", "it broke", evidence))
    ours._take_turn()
    assert ended[-1] == (1,)
    assert (played.forgotten, played.dropped, ours._dialed) == ([1], [], {2})


@pytest.mark.parametrize(("evidence", "probed"), [("silence", [3, 4]), ("", [2])])
def test_a_silence_has_those_probed_that_are_not_asked(
    ours: Connections, played: Played, evidence: Evidence, probed: list[int]
) -> None:
    """They may be behind the same cable, where nothing else would tell of them."""
    in_a_ring_of_five(played)
    ours._take_turn()
    played.refuses = {3: TimeoutError("timed out")}
    ours.on_lost(1, PeerLost(1, "a test", "it broke", evidence))
    ours._take_turn()
    assert sorted(played.probed) == probed
    is_silent = evidence == "silence"
    assert (status_of(ours, TWO) is Status.SUSPECT) == is_silent
    assert played.evicted == []


def test_who_stops_asking_is_asked_on(ours: Connections, played: Played) -> None:
    """The thread that has answered it ends its lane, as `test_transport.py` says."""
    ours._take_turn()
    ended = ended_by(played)
    ours.on_left(1, for_good=False)
    ours._take_turn()
    assert ended == []
    assert (status_of(ours, ONE), ours._dialed) == (Status.ALIVE, {1, 2})


def test_who_is_asked_for_weights_alone_is_asked_until_they_have_come(
    ours: Connections, played: Played
) -> None:
    """A turn meanwhile would end the connection over which they come."""
    in_a_ring_of_five(played)
    ours._take_turn()
    meanwhile = list[set[int]]()

    def pull(*_: object) -> str:
        ours._take_turn()
        meanwhile.append({*ours._dialed})
        return "weights"

    played.engine.pull, ours._woken = pull, False
    assert ours.pull(2, 60.0) == "weights"
    assert (meanwhile, ours._woken) == ([{1, 2, 4}], True)
    ours._take_turn()
    assert (ours._dialed, played.dropped) == ({1, 4}, [2])


def test_what_a_dial_takes_is_missing_for_the_weights_and_none_is_made_twice(
    ours: Connections, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = still_clock(monkeypatch, connections)

    def connect(*_: object) -> None:
        clock.now += 4.0

    left = list[float]()
    played.transport.connect = connect
    played.engine.pull = lambda number, seconds, watch: left.append(seconds)
    for _ in range(2):
        ours.pull(1, 10.0)
    assert left == [6.0, 10.0]
    assert ours.pull(9, 10.0) is None  # it is not on the list
    assert ours._dialed == {1}


@pytest.mark.parametrize("begun", [False, True])
def test_weights_that_come_too_late_are_told_and_warned_of_at_a_start(
    ours: Connections, begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    has_begun(ours, begun)
    assert ours.pull(1, 0.0) is None
    (told,) = caplog.records
    assert told.getMessage() == f"{ONE} gave no weights: they came too late"
    assert told.levelname == ("INFO" if begun else "WARNING")
    assert ours.why_none == {ONE.incarnation: "they came too late"}


def test_after_a_stop_of_the_process_nothing_is_done_before_the_list_is_read(
    ours: Connections, played: Played
) -> None:
    ours._take_turn()
    ours.on_lost(1, PeerLost(1, "a test", "it broke"))
    for is_awake, status in ((False, Status.ALIVE), (True, Status.SUSPECT)):
        played.membership.is_awake = is_awake
        ours._take_turn()
        assert status_of(ours, ONE) is status


def test_who_is_off_the_list_exchanges_with_nobody_until_it_is_back(
    ours: Connections, played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    unlisted = list[int]()
    ours._on_unlisted = lambda: unlisted.append(1)
    ours._take_turn()
    played.membership.is_in = False
    ours.on_lost(1, PeerLost(1, "a test", "it broke"))
    for _ in range(2):
        ours._take_turn()
    assert unlisted == [1, 1]
    assert (ours._dialed, played.forgotten, played.dropped) == (set(), [1, 2], [])
    assert ours.engine.members.live_schedule.numbers == (0,)
    assert caplog.messages == []
    played.membership.is_in = True
    ours._take_turn()
    assert (ours._dialed, ours.joined, ours.lost) == ({1, 2}, 2, 0)
    back = "is on the member list again after a break in the connection"
    assert [back in message for message in caplog.messages] == [True] * 2


def test_a_new_number_comes_after_the_end_of_every_connection(
    ours: Connections, played: Played
) -> None:
    """Lanes are named by the numbers of both ends."""
    in_a_ring_of_five(played)
    ours._take_turn()
    ended, before = ended_by(played), list[set[tuple[int, ...]]]()
    played.transport.rename = lambda *_: before.append({*ended})
    played.membership.member = own = OWN._replace(number=7)
    members = {m.number: m for m in (own, ONE, TWO, *FAR)}
    played.membership.members = MemberList(2, members)
    ours._take_turn()
    assert before == [{(number,) for number in (1, 2, 3, 4)}]
    assert ours._dialed == {1, 4}


def test_a_member_is_asked_under_its_new_number(
    ours: Connections, played: Played
) -> None:
    ours._take_turn()
    again = ONE._replace(number=5)
    played.membership.members = MemberList(2, {0: OWN, 2: TWO, 5: again})
    ours._take_turn()
    assert (ours._dialed, played.forgotten, ours.joined) == ({2, 5}, [1], 2)
    assert ours.engine.members.live_schedule.numbers == (0, 2, 5)


def test_who_refuses_this_island_is_left_out_and_ends_nothing(
    ours: Connections, played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(number: int, *_: object) -> None:
        if number == 1:
            raise Refused("models differ")

    played.transport.connect = refuse
    ours._take_turn()
    assert (status_of(ours, ONE), ours._dialed) == (Status.SUSPECT, {2})
    assert caplog.messages == []  # the list may be about to say that it has left
    ours.on_lane(0, 1)
    ours._take_turn()
    played.transport.connect = lambda *_: None
    ours.on_lane(0, 1)
    ours._take_turn()
    lost, reached = caplog.messages
    assert lost.startswith(f"lost {ONE}: models differ")
    assert reached == f"{ONE} can be reached again"
    assert (ours._dialed, ours.lost) == ({1, 2}, 1)
