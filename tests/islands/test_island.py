"""What an island does with what it knows: its parts are only played."""

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_adpsgd.coordination.store import LearnerFailed
from lightning_adpsgd.gossip.engine import GossipOptions
from lightning_adpsgd.gossip.protocol import Position, Pulled
from lightning_adpsgd.islands import island as island_module
from lightning_adpsgd.islands.island import Island
from lightning_adpsgd.islands.joining import Timeouts
from lightning_adpsgd.islands.member_list import Member, MemberList
from lightning_adpsgd.islands.rendezvous import RendezvousAddress
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.handshake import Refused
from tests.islands.archipelago import still_clock
from tests.transport.links.ends import info

OTHERS = {n: Member(n, f"start {n}", "host", (), "theirs") for n in range(1, 6)}
FOUND = Pulled(Position(50, 0, 2), [torch.ones(2)])


def played(**parts: Any) -> Any:
    """An island of these parts alone."""
    island: Any = Island.__new__(Island)
    vars(island).update(parts)
    return island


# --- the way onto the list


def test_a_failure_ends_the_wait_for_the_member_list() -> None:
    """Such as that of the island's first learner, which keeps the list."""
    never = Timeouts(pull=timedelta(days=1))
    threads = SimpleNamespace(raise_if_failed=Mock(side_effect=LearnerFailed("why")))
    island = played(
        membership=SimpleNamespace(enter=lambda: False, is_in=False),
        engine=SimpleNamespace(threads=threads),
        _timeouts=never,
    )
    with pytest.raises(LearnerFailed, match="why"):
        island._enter()


# --- the way back


class Apart:
    """An island that others have left behind, and what it does."""

    def __init__(
        self, found: Pulled | None, leads: bool = False, others: bool = True
    ) -> None:
        self.done, self.asked_as = list[str](), "not asked"
        self.adopted = threading.Event()
        self.adopted.set()
        member = Member(0, "start 0", "host", (), "mine")
        self.membership: Any = SimpleNamespace(
            member=member,
            members=MemberList(1, OTHERS if others else {}),
            describe=self._describe,
            enter=lambda: self.done.append("enters"),
        )
        self.joining: Any = SimpleNamespace(
            origin="theirs",
            knows_all=lambda: True,
            leads=lambda: leads,
            weights_of_neighbours=self._ask,
        )
        self.found = found
        self.island = played(
            membership=self.membership,
            engine=SimpleNamespace(adopt=self._adopt),
            _connections=SimpleNamespace(take_number=lambda: None),
            _joining=self.joining,
            _group=SimpleNamespace(size=1),
            _is_left_behind=True,
            _ended=False,
            _rejoined_at=None,
            _origin="",
        )

    def _describe(self, origin: str) -> None:
        self.membership.member = self.membership.member._replace(origin=origin)

    def _ask(self) -> Pulled | None:
        self.asked_as = self.membership.member.origin
        return self.found

    def _adopt(self, values: object) -> threading.Event:
        self.done.append("adopts")
        return self.adopted

    @property
    def origin(self) -> str:
        return self.membership.member.origin


def test_who_was_left_behind_adopts_the_weights_of_others_and_is_back() -> None:
    apart = Apart(FOUND)
    for _ in range(2):  # once is enough
        apart.island._rejoin()
    assert apart.done == ["adopts", "enters"]
    assert apart.asked_as == ""  # or it were refused the weights of another training
    assert (apart.origin, apart.island._rejoined_at) == ("theirs", FOUND.position)


def test_who_was_left_behind_is_dialed_by_nobody_before_it_has_their_weights() -> None:
    """It shows no origin then, so members would average its weights with theirs."""
    apart, said = Apart(FOUND), list[str]()
    dialer, objection = info(1, origin="theirs"), apart.island._objection
    told = lambda *_: said.append(objection(dialer))  # noqa: E731
    apart.island._connections.take_number = told
    apart.adopted.wait = told  # pyright: ignore[reportAttributeAccessIssue]
    apart.island._ended = True
    assert objection(info(1)) == ""  # it was left behind as well, and needs weights
    apart.island._rejoin()
    # When it shows none, until it has theirs, and when it shows theirs.
    assert said == ["this island has yet to take the weights of the others"] * 3
    assert objection(dialer) == ""


def test_who_gets_no_weights_stays_away_from_those_that_are_there() -> None:
    """Its own are old: to average them would take the others back."""
    apart = Apart(None)
    apart.island._rejoin()
    assert apart.done == []
    assert (apart.origin, apart.island._is_left_behind) == ("mine", True)
    apart.found = FOUND
    apart.island._rejoin()
    assert apart.done == ["adopts", "enters"]


@pytest.mark.parametrize("others", [True, False])
def test_who_met_an_error_while_it_asked_belongs_to_its_training_still(
    others: bool,
) -> None:
    """Back without an origin, others would average its weights with their own."""
    apart = Apart(None)

    def ask() -> Pulled | None:
        raise RuntimeError("can't start new thread")

    apart.joining.weights_of_neighbours = ask
    with pytest.raises(RuntimeError, match="can't start new thread"):
        apart.island._rejoin()
    apart.joining.leads = lambda: apart.origin == "mine"
    if not others:
        apart.membership.members = MemberList()
    apart.island._rejoin()
    assert (apart.done, apart.origin) == (["enters"], "mine")


@pytest.mark.parametrize("size", [1, 2])
def test_who_finds_nobody_there_goes_on_with_its_own_weights(size: int) -> None:
    apart = Apart(None, others=False)
    apart.island._group.size = size
    for _ in range(2):
        apart.island._rejoin()
    assert apart.done == ["enters"]
    assert (apart.origin, apart.island._rejoined_at) == ("mine", None)


def test_who_is_further_than_all_others_is_back_with_its_own_weights() -> None:
    apart = Apart(FOUND, leads=True)
    for _ in range(2):
        apart.island._rejoin()
    assert (apart.done, apart.asked_as, apart.origin) == (
        ["enters"],
        "not asked",
        "mine",
    )


@pytest.mark.parametrize("leads", [True, False])
def test_who_does_not_know_how_far_the_others_are_waits_until_it_does(
    leads: bool,
) -> None:
    apart = Apart(FOUND, leads=leads)
    apart.joining.knows_all = lambda: False
    apart.island._rejoin()
    assert (apart.done, apart.island._is_left_behind) == ([], True)
    apart.joining.knows_all = lambda: True
    apart.island._rejoin()
    assert apart.done[-1:] == ["enters"]


def test_an_island_of_several_learners_ends_where_others_went_on_without_it() -> None:
    """It has no step at which all of them could take weights; a launcher starts it."""
    apart, failures = Apart(FOUND), list[BaseException]()
    apart.island._group.size = 2
    apart.island.engine.threads = SimpleNamespace(fail=failures.append)
    apart.island._rejoin()
    (error,) = failures
    assert str(error).startswith("the others went on without this island of 2 learners")
    assert apart.done == []


def test_an_island_that_was_never_left_behind_keeps_its_weights() -> None:
    island: Any = island_of()
    island._joining = None
    island._rejoin()
    assert island._rejoined_at is None


def test_an_island_that_ends_waits_for_no_step_to_adopt_weights_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = Apart(FOUND)
    apart.adopted.clear()
    waits = list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        apart.island._ended = len(waits) >= 3
        assert len(waits) < 9
        return False

    monkeypatch.setattr(apart.adopted, "wait", wait)
    apart.island._rejoin()
    assert len(waits) == 3


# --- the end


def ending(said: list[str], size: int = 1, leaves: bool = False) -> Any:
    """An island whose parts say what they are told."""

    def say(word: str) -> Callable[..., None]:
        return lambda *_: said.append(word)

    engine = {
        word: say(word)
        for word in ("drain", "merge_all", "release", "say_goodbye", "abort")
    }
    return played(
        engine=SimpleNamespace(**engine, leaves=leaves),
        membership=SimpleNamespace(stop=say("off the list")),
        _connections=SimpleNamespace(stop=say("connections end")),
        _group=SimpleNamespace(size=size),
        _listeners=[SimpleNamespace(close=say("listener closes"))],
        _transports=[SimpleNamespace(close=say("links close"))],
    )


def test_nobody_is_cut_off_before_it_has_heard_the_goodbye() -> None:
    """Off the list, the thread of connections would: a loss to every other island."""
    said = list[str]()
    ending(said).stop()
    assert [*dict.fromkeys(said)] == [
        "connections end",
        "drain",
        "off the list",
        "say_goodbye",
        "release",
        "listener closes",
        "links close",
        "abort",
    ]


def test_an_abort_leaves_no_thread_and_no_socket() -> None:
    said = list[str]()
    island = ending(said)
    island.abort()
    assert island._ended
    assert {*said} == {
        "release",
        "off the list",
        "connections end",
        "listener closes",
        "links close",
        "abort",
    }


@pytest.mark.parametrize(
    ("size", "leaves", "merges"), [(1, False, True), (2, True, True), (2, False, False)]
)
def test_who_departs_merges_what_has_come_if_all_its_learners_do(
    size: int, leaves: bool, merges: bool
) -> None:
    """To merge is a collective: a learner that came alone would wait for good."""
    said = list[str]()
    ending(said, size, leaves).depart()
    assert said[: 1 + merges] == ["drain", "merge_all"][: 1 + merges]
    assert ("merge_all" in said) == merges
    assert "say_goodbye" in said


# --- the mean


def test_a_mean_takes_no_longer_than_its_time_and_leaves_out_who_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = still_clock(monkeypatch, island_module)
    asked = list[tuple[int, float]]()

    def pull(number: int, seconds: float) -> Pulled | None:
        asked.append((number, seconds))
        if number == 1:
            raise Refused("of another training")
        clock.now += seconds
        return Pulled(Position(), [torch.full((2,), 3.0)]) if number == 2 else None

    own = Member(0, "start 0", "host", ())
    island = played(
        membership=SimpleNamespace(member=own, members=MemberList(1, OTHERS)),
        engine=SimpleNamespace(
            replica=SimpleNamespace(snapshot=lambda: [torch.ones(2)])
        ),
        _connections=SimpleNamespace(pull=pull),
        _timeouts=Timeouts(pull=timedelta(seconds=20), mean=timedelta(seconds=40.5)),
        _origin="",
    )
    mean = island.mean()
    assert asked == [(1, 20.0), (2, 20.0), (3, 20.0), (4, 0.5)]
    assert (mean.members, mean.values[0].tolist()) == (2, [2.0, 2.0])


# --- the position


def test_each_batch_counts_for_all_islands_that_are_there() -> None:
    members = SimpleNamespace(
        position=Position(7, 100, 1), live_schedule=SimpleNamespace(numbers=(0, 3, 5))
    )
    engine = SimpleNamespace(members=members)
    island = played(engine=engine, _rejoined_at=None, _shares_epochs=False)
    assert island.note(samples=10, epochs=2) is None
    assert members.position == Position(7, 130, 2)


def test_a_way_back_is_told_to_training_once() -> None:
    members = SimpleNamespace(
        position=Position(7, 100, 1), live_schedule=SimpleNamespace(numbers=(0,))
    )
    engine = SimpleNamespace(members=members)
    island = played(engine=engine, _rejoined_at=Position(50), _shares_epochs=False)
    assert [island.note(10, 1) for _ in range(2)] == [Position(50), None]
    assert members.position == Position(50, 10, 1)


def test_the_name_of_an_island_is_short_and_its_own() -> None:
    member = Member(3, 4 * "0123456789abcdef", "host", ())
    island = played(membership=SimpleNamespace(member=member))
    assert island.name == "3-01234567"


# --- in what islands must agree


def island_of(gain: float = 1.0, **options: Any) -> Island:
    return Island(
        [torch.zeros(3)],
        RendezvousAddress("127.0.0.1", 1, "job"),
        Schedule(find_topology("ring"), 1, gain),
        GossipOptions(**options),
        "layout",
        Credentials(),
    )


def settings_of(**change: Any) -> Any:
    (transport,) = island_of(**change)._transports
    return transport._info.settings


@pytest.mark.parametrize(
    ("name", "change"),
    [("wire_dtype", {"wire_dtype": torch.float16}), ("mixing_gain", {"gain": 0.5})],
)
def test_what_both_ends_of_an_exchange_compute_with_must_be_equal(
    name: str, change: dict[str, Any]
) -> None:
    before, after = settings_of(), settings_of(**change)
    assert {key for key in before if before[key] != after[key]} == {name}
    assert before.keys() == after.keys()
