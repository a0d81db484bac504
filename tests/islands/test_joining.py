"""What the learners of one island agree upon before they ask others for weights."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.gossip.protocol import BEGINNING, Position, Pulled, furthest
from lightning_adpsgd.islands import joining as joining_module
from lightning_adpsgd.islands import waiting
from lightning_adpsgd.islands.island import Island
from lightning_adpsgd.islands.joining import Joining
from lightning_adpsgd.islands.member_list import Heartbeat, Member, MemberList
from lightning_adpsgd.islands.membership_reader import MembershipReader
from lightning_adpsgd.islands.rendezvous import RendezvousAddress
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import LiveSchedule, Schedule
from lightning_adpsgd.transport.links.handshake import Refused
from tests import helpers
from tests.islands.archipelago import PATIENCE, still_clock

ROWS = {
    number: Member(number, f"start {number}", "host", (), origin)
    for number, origin in enumerate(["behind", "far", "far"])
}


class Learner:
    """One learner of an island that begins, and the members that it has asked."""

    def __init__(
        self,
        index: int,
        store: HashStore,
        steps_of: dict[int, int],  # by the numbers of `ROWS`
        shares_epochs: bool = False,
    ) -> None:
        self.asked: list[int] = []
        self.why_none: dict[str, str] = {}
        self.positions: dict[int, Position] = {}
        membership: Any = SimpleNamespace(describe=lambda origin: None)
        if index > 0:
            nothing: Any = lambda *_: None  # noqa: E731
            membership = MembershipReader(store, Heartbeat(), nothing, nothing)
        membership.member = Member(5, "mine", "host", ())
        membership.members = MemberList(1, ROWS)
        membership.steps_of = {f"start {n}": steps for n, steps in steps_of.items()}
        threads = SimpleNamespace(raise_if_failed=lambda: None)
        live_schedule = LiveSchedule.of(Schedule(find_topology("complete"), 1), (), 5)
        connections: Any = SimpleNamespace(
            engine=SimpleNamespace(
                threads=threads,
                members=SimpleNamespace(live_schedule=live_schedule),
                replica=SimpleNamespace(put=lambda values: None),
            ),
            pull=self._pull,
            why_none=self.why_none,
        )
        group: Any = SimpleNamespace(
            index=index, size=1, agree=lambda numbers, timeout: numbers, holders=None
        )
        self.joining = Joining(
            [],
            RendezvousAddress("127.0.0.1", 1, "job"),
            membership,
            connections,
            group,
            store,
            PATIENCE,
            helpers.PATIENCE,
            shares_epochs,
        )

    def _pull(self, number: int, seconds: float, watch: object) -> Pulled:
        self.asked.append(number)
        position = self.positions.get(number, Position(1, 1, 0))
        return Pulled(position, [torch.ones(1)])

    def joins_at(self, own: Position) -> Position | None:
        """The position that it takes from the others; None if it keeps its own."""
        self.joining._engine.members.position = own
        found = self.joining._weights_for_all()
        assert found is not None
        return self.joining._go_on_from(found)


def test_all_learners_of_an_island_take_weights_of_one_training() -> None:
    """Only the first one hears how far the others have come."""
    store = HashStore()
    learners = [Learner(0, store, {0: 1, 1: 50, 2: 60}), Learner(1, store, {})]
    for one in learners:
        assert not one.joining._is_first()
        assert one.joining._weights_for_all() is not None
    assert [set(one.asked) for one in learners] == [{1, 2}, {1, 2}]
    assert [one.joining.origin for one in learners] == ["far", "far"]


@pytest.mark.parametrize(
    ("host", "at", "is_told"),
    [
        ("node0", "127.0.1.1:9", True),
        ("node0", "[::1]:9", True),
        ("node0", "10.0.0.3:9", False),
        ("node0", "name:9", False),
        ("host", "127.0.0.1:9", False),  # this host
    ],
)
def test_who_gives_no_weights_is_named_with_its_address(
    host: str, at: str, is_told: bool
) -> None:
    joining = Learner(0, HashStore(), {}).joining
    joining._membership.members = MemberList(1, {3: Member(3, "start", host, (at,))})
    why = joining._why_none()
    assert why.startswith(f"none of island 3 on host {host} at {at} gave them")
    assert ("a loopback address, which no other host can reach" in why) == is_told
    assert ("Set GLOO_SOCKET_IFNAME on host node0" in why) == is_told


def test_the_reason_why_a_member_gives_no_weights_is_told() -> None:
    learner = Learner(0, HashStore(), {})
    learner.why_none["start 1"] = "certificate has expired"
    expected = "gave them; island 1 on host host: certificate has expired"
    assert learner.joining._why_none().endswith(expected)


def test_of_many_who_give_no_weights_some_are_named() -> None:
    joining = Learner(0, HashStore(), {}).joining
    far = {n: Member(n, str(n), "far", ("127.0.0.1:9",)) for n in range(9)}
    joining._membership.members = MemberList(1, far)
    why = joining._why_none()
    assert "island 3 on host far at 127.0.0.1:9, 5 more gave them" in why
    assert why.count("Set GLOO_SOCKET_IFNAME") == 4
    joining._membership.members = MemberList(1, {0: Member(0, "0", "far", ())})
    assert joining._why_none() == (
        "none of island 0 on host far at no address gave them"
    )
    joining._membership.members = MemberList(1, {})
    assert joining._why_none() == "the member list is empty"


def test_a_wait_for_weights_says_how_many_have_come() -> None:
    joining, said = Learner(0, HashStore(), {}).joining, list[str]()
    joining._on_progress = said.append
    joining._watch(3, 0.125)
    assert said == ["12% of the weights of island 3 came"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time for one that joins: it stands still at 100 s."""
    return still_clock(monkeypatch, joining_module)


def test_weights_that_take_half_the_timeout_are_not_waited_for_by_several_learners(
    clock: SimpleNamespace,
) -> None:
    """The others of this island wait for them, and for no longer than the timeout."""
    joining = Learner(0, HashStore(), {}).joining
    for size, waits in ((1, True), (2, False)):
        joining._group.size = size
        joining._weights_of_origin()
        clock.now += helpers.PATIENCE_S / 2 - 1.0
        joining._watch(1, 0.5)
        clock.now += 2.0
        with nullcontext() if waits else pytest.raises(TimeoutError):
            joining._watch(1, 0.5)


def test_after_the_first_weights_others_are_waited_for_as_long_as_for_one_pull(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not until the wait of the start is over, which would lose those that came."""
    joining = Learner(0, HashStore(), {}).joining

    def over(what: str) -> None:
        raise RuntimeError("the start is over")

    def slow(
        number: int, seconds: float, watch: Callable[[float], None]
    ) -> Pulled | None:
        if number > 0:
            with suppress(TimeoutError):
                while clock.now < 1e4:
                    clock.now += 1.0
                    watch(0.5)
            return None
        return pulled

    pulled, joining._on_progress = Pulled(BEGINNING, [torch.ones(2)]), over
    monkeypatch.setattr(joining._connections, "pull", slow)
    assert list(joining._pull_from([0, 1])) == [pulled]
    seconds = joining._timeouts.pull.total_seconds()
    assert seconds < clock.now - 100.0 < seconds + 2.0


def test_one_that_does_not_come_back_says_so_ever_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner = Learner(0, HashStore(), {1: 50, 2: 60})
    connections: Any = learner.joining._connections
    connections.pull = lambda *_: None
    for _ in range(5):
        assert learner.joining.weights_of_neighbours() is None
    said = [one.message for one in caplog.records]
    assert all(
        f"(asked {number} times)" in text
        for number, text in zip((1, 2, 4), said, strict=True)
    )
    connections.pull = learner._pull
    assert learner.joining.weights_of_neighbours() is not None
    assert len(caplog.records) == 3


@pytest.mark.parametrize("shares_epochs", [False, True])
def test_the_latest_epoch_is_the_furthest_where_islands_share_it(
    shares_epochs: bool,
) -> None:
    """An island that accumulates more batches makes fewer steps in each epoch."""
    learner = Learner(0, HashStore(), {1: 90, 2: 60}, shares_epochs)
    most_steps, latest = Position(90, 0, 3), Position(60, 0, 9)
    learner.positions = {1: most_steps, 2: latest}
    learner.joining.origin = "far"
    furthest = latest if shares_epochs else most_steps
    assert learner.joins_at(Position(50, 0, 5)) == furthest
    # It has made more steps than all others, in fewer epochs.
    assert learner.joins_at(Position(500, 0, 5)) == (latest if shares_epochs else None)
    assert learner.joins_at(Position(500, 0, 10)) is None


@pytest.mark.parametrize("shares_epochs", [False, True])
def test_one_that_comes_back_is_where_the_furthest_is(shares_epochs: bool) -> None:
    own, theirs = Position(90, 0, 3), Position(60, 0, 9)
    members = SimpleNamespace(position=own)
    island: Any = SimpleNamespace(
        _rejoined_at=theirs,
        position=own,
        engine=SimpleNamespace(members=members),
        _shares_epochs=shares_epochs,
    )
    assert Island.note(island, samples=1, epochs=3) == theirs
    assert members.position == (theirs if shares_epochs else own)


def test_of_two_that_are_as_far_the_one_that_knows_of_more_samples_counts() -> None:
    both = Position(1, 5, 3), Position(1, 2, 3)
    assert furthest(both, shares_epochs=True) == both[0]
    assert furthest(both, shares_epochs=False) == both[0]


def test_weights_that_one_learner_lacks_are_taken_by_none() -> None:
    """Shards of two moments are no weights."""
    learner = Learner(0, HashStore(), {1: 50, 2: 60})
    learner.joining.origin = "far"
    group: Any = learner.joining._group

    def another_lacks_them(numbers: list[int], _: object) -> list[int]:
        return [1, *numbers[1:]]

    def another_is_further(numbers: list[int], _: object) -> list[int]:
        return [*numbers[:2], 70, 8, 2]

    group.agree = another_lacks_them
    assert learner.joining._weights_for_all() is None
    group.agree = another_is_further
    found = learner.joining._weights_for_all()
    assert found is not None
    assert found.position == Position(70, 8, 2)
    connections: Any = learner.joining._connections
    connections.pull = lambda *_: None
    assert learner.joining._weights_for_all() is None


def test_a_refusal_ends_a_start_only_if_it_lasts(clock: SimpleNamespace) -> None:
    """A dead member may be on the list while another process has its port."""
    joining = Learner(0, HashStore(), {1: 50, 2: 60}).joining
    joining.origin, joining._membership.members = "far", MemberList(1, {1: ROWS[1]})
    lasting_s = 2 * joining._timeouts.heartbeat.silence_s
    answers = iter([None, "no", "no", None, "no", "no"])

    def pull(*_: object) -> None:
        if answer := next(answers):
            raise Refused(answer)

    connections: Any = joining._connections
    connections.pull = pull
    for seconds in (0.0, 0.0, lasting_s - 0.1, 0.2, lasting_s - 0.1):
        clock.now += seconds
        assert joining._weights_for_all() is None
    clock.now += lasting_s + 0.1
    with pytest.raises(Refused, match="no"):
        joining._weights_for_all()


@pytest.mark.parametrize(
    ("origins", "steps", "leads"),
    [
        ([], 9, False),  # nobody would be led
        (["theirs", "more"], 9, True),
        (["theirs", "mine"], 9, False),
        (["theirs", ""], 9, False),
        (["theirs"], 1, False),
    ],
)
def test_who_is_further_than_all_others_of_other_trainings_leads(
    origins: list[str], steps: int, leads: bool
) -> None:
    joining = Learner(0, HashStore(), {0: 4, 5: 99}).joining
    own = joining._membership.member._replace(origin="mine")
    joining._membership.member = own
    others = {
        n: Member(n, f"start {n}", "host", (), one) for n, one in enumerate(origins)
    }
    joining._membership.members = MemberList(1, {**others, 5: own})
    joining._engine.members.position = Position(steps)
    assert joining.leads() == leads


def test_who_was_left_behind_waits_for_a_heartbeat_of_each_member() -> None:
    """Else the furthest of all, whose first heartbeat is to come, has no steps yet."""
    joining = Learner(0, HashStore(), {0: 4, 1: 50}).joining
    own = joining._membership.member
    joining._membership.members = MemberList(1, {**ROWS, 5: own})
    assert not joining.knows_all()
    joining._membership.steps_of["start 2"] = 0
    assert joining.knows_all()
    # Another process has this island's number, which is drawn again.
    joining._membership.members = MemberList(1, {5: own._replace(incarnation="other")})
    assert not joining.knows_all()


def test_if_no_neighbour_gives_weights_others_are_asked_the_furthest_first() -> None:
    steps_of = {number: 10 * number for number in range(5)} | {6: 5}
    learner = Learner(0, HashStore(), steps_of)
    numbers = (*range(5), 6, 7)
    far = {n: Member(n, f"start {n}", "host", (), "far") for n in numbers}
    learner.joining._membership.members = MemberList(1, far)
    learner.joining.origin = "far"
    connections: Any = learner.joining._connections

    def pull(number: int, *how: Any) -> Pulled | None:
        found = learner._pull(number, *how)
        return found if number == 6 else None

    connections.pull = pull
    assert learner.joining._weights_of_origin() is not None
    assert learner.asked == [4, 3, 2, 1, 6]
    learner.asked.clear()
    connections.pull = learner._pull
    assert learner.joining._weights_of_origin() is not None
    assert learner.asked == [4, 3, 2, 1]


@pytest.mark.parametrize("weights", [[float("nan")], [float("inf")]])
def test_diverged_weights_are_taken_by_nobody(weights: list[float]) -> None:
    joining = Learner(0, HashStore(), {}).joining
    pulled = Pulled(BEGINNING, [torch.ones(1), torch.tensor(weights)])
    connections: Any = joining._connections
    connections.pull = lambda *_: pulled
    assert joining._pull_finite(1) is None


def test_a_learner_waits_for_no_word_of_others_that_have_failed() -> None:
    store = HashStore()
    joining, looks = Learner(1, store, {}).joining, list[int]()

    def fail_at_last() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise RuntimeError("a learner has failed")

    threads: Any = joining._engine.threads
    threads.raise_if_failed = fail_at_last
    with pytest.raises(RuntimeError, match="a learner has failed"):
        joining.published("key")
    store.set("key", "a word")
    assert joining.published("key") == "a word"


class Passing:
    """A clock whose seconds pass while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def test_an_island_listens_where_it_reaches_the_rendezvous_or_is_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passing, tries = Passing(), list[int]()
    for module in (joining_module, waiting):
        monkeypatch.setattr(module, "time", passing)
    joining = Learner(0, HashStore(), {}).joining
    joining._timeouts = replace(PATIENCE, start=timedelta(seconds=9))
    line = SimpleNamespace(getsockname=lambda: ("192.0.2.7", 4000))

    def connect(address: Any) -> Any:
        tries.append(address.port)
        if len(tries) < 4:
            raise ConnectionRefusedError("refused")
        return nullcontext(line)

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(joining_module, "connect", connect)
    assert joining.own_address() == "192.0.2.7"
    assert tries == [1] * 4
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setattr(joining_module, "gloo_addresses", lambda: ["198.51.100.1"])
    assert joining.own_address() == "198.51.100.1"
    monkeypatch.setattr(joining_module, "gloo_addresses", list)
    monkeypatch.setattr(joining_module, "connect", _refuse)
    with pytest.raises(RuntimeError, match=r"rendezvous at .* \(refused\)"):
        joining.own_address()
    assert passing.now > 109.0


def _refuse(address: object) -> None:
    raise ConnectionRefusedError("refused")


def test_who_waits_for_a_number_rests_between_its_looks() -> None:
    """It may wait for half an hour."""
    joining, rests = Learner(0, HashStore(), {}).joining, list[float]()
    joining._timeouts = replace(PATIENCE, start=timedelta(seconds=1))
    membership: Any = joining._membership
    membership.outage, member = "it is away", membership.member
    membership.member = member._replace(number=-1)

    def refresh(seconds: float) -> None:
        rests.append(seconds)
        membership.member = member._replace(number=len(rests) - 3)

    membership.refresh = refresh
    joining.await_number()
    assert rests == [1.0] * 3
