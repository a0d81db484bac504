"""Turns of the thread that keeps the member list, taken by hand, at its own clock."""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.islands import membership
from lightning_adpsgd.islands.member_list import Beat, Heartbeat, Member, MemberList
from lightning_adpsgd.islands.member_store import MemberStore
from lightning_adpsgd.islands.membership import Membership
from lightning_adpsgd.islands.rendezvous import (
    Rendezvous,
    RendezvousAddress,
    RendezvousUnreachable,
)
from lightning_adpsgd.islands.service import uptime_s
from lightning_adpsgd.islands.signatures import Signatures
from lightning_adpsgd.transport.links.credentials import Credentials
from tests.helpers import PATIENCE_S
from tests.islands.archipelago import NOBODY_LISTENS, left_at_each_list

SILENCE_S = 3.0
OTHER = Member(7, "the other", "host", ())


class Clock:
    """The time that the membership sees."""

    def __init__(self) -> None:
        self.now, self.suspended_s = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def uptime_s(self) -> float:
        return self.now + self.suspended_s


class Turns:
    """A membership without its thread, over a store that can be away."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.store, self.is_away = clock, HashStore(), False
        self.steps, self.seen = 5, list[str]()
        client: Any = Rendezvous(RendezvousAddress("127.0.0.1", 1, "job"))
        client.ask = self._ask
        member = Member(-1, "mine", "host", ())
        self.one = Membership(
            client,
            member,
            lambda: self.steps,
            Heartbeat(silence_s=SILENCE_S),
            on_change=lambda: self.seen.append("change"),
            on_left_behind=lambda: self.seen.append("left behind"),
            on_turn=lambda: self.seen.append("turn"),
            fail=NOBODY_LISTENS["fail"],
        )
        self.listed = MemberStore(self.store, Signatures(Credentials(), "job"))

    def _ask(self, action: Callable[[Any], Any]) -> Any:
        if self.is_away:
            raise RendezvousUnreachable("it is away")
        return action(self.store)

    def take(self, number: int = 1, seconds: float = 0.5) -> None:
        for _ in range(number):
            self.clock.now += seconds
            self.one._take_turn()

    def enter(self) -> None:
        self.one.enter()
        self.take()

    def put(self, *others: Member) -> None:
        """These and this island are the list, as if another member had written it."""
        mine = [one for one in [self.one.member] if self.one.is_in]
        listed = {one.number: one for one in (*mine, *others)}
        self.listed.change(0, lambda old: listed)

    def list_another_alone(self) -> None:
        """Another member, which lives, is the list: it has evicted this island."""
        self.listed.change(0, lambda old: {7: OTHER})
        self.listed.show(OTHER, Beat(1, 0))

    def stop(self, seconds: float) -> None:
        """This process stands still for so long, while the thread of the list rests."""
        state: Any = self.one._state
        wait, state.wait = state.wait, lambda _: self.take_time(seconds)
        self.one._rest()
        state.wait = wait

    def take_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @property
    def numbers(self) -> set[int]:
        return set(self.listed.members()[1].by_number)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    clock = Clock()
    monkeypatch.setattr(membership, "time", clock)
    monkeypatch.setattr(membership, "uptime_s", clock.uptime_s)
    return Turns(clock)


def test_a_process_is_awake_before_its_first_turn_and_while_it_trains(
    turns: Turns,
) -> None:
    assert turns.one.is_awake
    turns.take()
    turns.clock.now += 100
    assert not turns.one.is_awake
    turns.steps = 6
    assert not turns.one.is_awake
    turns.steps = 7
    assert turns.one.is_awake


def test_who_is_on_the_list_without_knowing_it_takes_itself_off_at_the_end(
    turns: Turns,
) -> None:
    """The answer to its own change was lost."""
    turns.take()
    mine = turns.one.member
    turns.listed.change(0, lambda old: {**old, mine.number: mine, 7: OTHER})
    turns.enter()
    assert turns.numbers == {mine.number, 7}
    turns.one._say_goodbye()
    assert turns.numbers == {7}
    assert turns.listed.has_said_goodbye(mine)


def test_who_has_stood_aside_still_puts_the_list_into_an_empty_rendezvous(
    turns: Turns,
) -> None:
    turns.enter()
    turns.listed.change(0, lambda old: {7: OTHER})
    turns.one._stand_aside("a reason")
    turns.take(2)
    turns.store.set("members", "")
    turns.store.set("version", "another")
    turns.take()
    assert turns.numbers == {7}


def test_the_log_says_that_a_rendezvous_is_away_and_when_it_is_back(
    turns: Turns, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    turns.enter()
    turns.is_away = True
    turns.take(3)
    assert turns.one.outage == "it is away"
    turns.is_away = False
    turns.take(3)
    assert turns.one.outage == ""
    away, back = (record.message for record in caplog.records)
    assert "cannot be reached (it is away): training continues" in away
    assert "is back after 2 s, with 1 islands" in back


@pytest.mark.parametrize("num_before", [5, 6])
def test_what_stood_still_during_an_outage_was_the_rendezvous(
    turns: Turns, num_before: int
) -> None:
    """Also where it was about to count as a silence when the rendezvous went."""
    turns.list_another_alone()
    turns.enter()
    turns.take(num_before)
    turns.is_away = True
    turns.take(20)
    turns.is_away = False
    turns.take(5)
    assert turns.numbers == {7, 8}
    turns.take(6)
    assert turns.numbers == {8}


def test_who_was_stopped_and_evicted_meanwhile_stands_aside(turns: Turns) -> None:
    turns.enter()
    turns.list_another_alone()
    ask = turns.one._rendezvous.ask
    turns.clock.now += 0.5

    def stopped_within(action: Callable[[Any], Any]) -> Any:
        turns.clock.now += 100
        return ask(action)

    turns.one._rendezvous.ask = stopped_within  # pyright: ignore
    turns.take()
    assert not turns.one.is_in
    assert turns.numbers == {7}


def test_the_first_of_a_list_begins_at_an_epoch_after_all_known(turns: Turns) -> None:
    turns.listed.replace("", MemberList(4))
    turns.one._begins_list = True
    turns.take(2)
    assert turns.numbers == set()
    turns.take(20)
    found = turns.listed.members()[1]
    assert (found.epoch, set(found.by_number)) == (5, {0})
    assert found.by_number[0].origin == "mine"


def test_nobody_begins_a_list_without_being_told_to(turns: Turns) -> None:
    turns.take(40)
    assert turns.numbers == set()


def test_who_waits_outside_takes_another_number_when_its_own_is_taken(
    turns: Turns,
) -> None:
    turns.take()
    number = turns.one.member.number
    turns.listed.change(0, lambda old: {number: OTHER._replace(number=number)})
    turns.take(2)
    assert turns.one.member.number > number
    assert turns.numbers == {number}


def test_who_was_stopped_during_an_outage_stands_aside(turns: Turns) -> None:
    turns.enter()
    turns.list_another_alone()
    ask = turns.one._rendezvous.ask

    def stopped_and_away(action: Callable[[Any], Any]) -> Any:
        turns.clock.now += 100
        raise RendezvousUnreachable("it is away")

    turns.one._rendezvous.ask = stopped_and_away  # pyright: ignore
    turns.take()
    turns.one._rendezvous.ask = ask
    turns.take()
    assert not turns.one.is_in
    assert turns.numbers == {7}


def test_who_makes_no_steps_is_awake_for_as_long_as_a_silence(turns: Turns) -> None:
    turns.steps = 0
    assert turns.one.is_awake
    turns.take()
    for seconds, is_awake in ((SILENCE_S, True), (0.25, False)):
        turns.clock.now += seconds
        assert turns.one.is_awake == is_awake


def test_the_time_between_making_a_membership_and_its_start_is_no_stop(
    turns: Turns,
) -> None:
    turns.steps = 0
    turns.clock.now += 100
    turns.one._ending = True  # its thread ends without a turn
    turns.one.start()
    turns.one.stop(PATIENCE_S)
    assert turns.one.is_awake


@pytest.mark.parametrize("seconds", [SILENCE_S, SILENCE_S + 0.25])
def test_who_rests_for_longer_than_a_silence_and_was_evicted_stands_aside(
    turns: Turns, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    turns.enter()
    turns.list_another_alone()
    turns.stop(seconds)
    turns.take()
    was_stopped = seconds > SILENCE_S
    assert ("a call held Python's interpreter lock" in caplog.text) == was_stopped
    assert turns.one.is_in != was_stopped
    assert turns.numbers == ({7} if was_stopped else {0, 7})
    assert ("left behind" in turns.seen) == was_stopped


def test_a_stop_counts_between_a_turn_and_work_that_waits_for_the_next(
    turns: Turns,
) -> None:
    turns.enter()
    turns.list_another_alone()
    turns.one.evict(Member(9, "dead", "host", ()))
    turns.clock.now += 100
    turns.one._rest()
    turns.take()
    assert "left behind" in turns.seen


def test_a_suspended_machine_was_stopped_though_its_monotonic_clock_was_too(
    turns: Turns,
) -> None:
    turns.enter()
    turns.list_another_alone()
    turns.clock.suspended_s = 100.0
    assert not turns.one.is_awake
    turns.stop(0.0)
    turns.take()
    assert turns.numbers == {7}
    assert "left behind" in turns.seen


@pytest.mark.skipif(sys.platform != "linux", reason="another clock")
def test_the_uptime_is_that_of_a_clock_which_counts_a_suspend() -> None:
    assert abs(uptime_s() - time.clock_gettime(time.CLOCK_BOOTTIME)) < PATIENCE_S


def test_who_was_stopped_and_is_still_on_the_list_stays_there(turns: Turns) -> None:
    """An eviction later on is a mistake, after which it adds itself again."""
    turns.enter()
    turns.stop(100)
    turns.take()
    assert turns.one.is_in
    turns.listed.change(0, lambda old: {7: OTHER})
    turns.take()
    assert turns.numbers == {0, 7}
    assert "left behind" not in turns.seen


def test_who_was_stopped_before_it_ever_was_on_the_list_enters(turns: Turns) -> None:
    turns.take()
    turns.stop(100)
    turns.enter()
    assert turns.one.is_in


@pytest.mark.parametrize(
    ("before", "more_steps", "is_in"),
    [(0, 1, False), (0, 2, True), (10, 199, False), (10, 200, True)],
)
def test_who_trains_while_a_request_hangs_was_not_stopped(
    turns: Turns, before: int, more_steps: int, is_in: bool
) -> None:
    """Training goes on after a stop too, before the turn in which it was has ended."""
    turns.enter()
    for _ in range(12):
        turns.take()
        turns.steps += before  # in the half second until the next turn
    turns.list_another_alone()
    ask = turns.one._rendezvous.ask

    def hangs(action: Callable[[Any], Any]) -> Any:
        turns.clock.now += 100
        turns.steps += more_steps
        return ask(action)

    turns.one._rendezvous.ask = hangs  # pyright: ignore
    turns.take()
    assert turns.one.is_in == is_in


def test_a_list_whose_writer_died_before_it_raised_the_version_is_read(
    turns: Turns,
) -> None:
    """Each tenth turn reads it in any case."""
    turns.take()
    turns.listed.store.set("members", MemberList(9, {7: OTHER}).to_json())
    turns.take(9)
    assert turns.one.members.by_number == {}
    turns.take()
    assert turns.one.members.by_number == {7: OTHER}
    turns.listed.store.set("members", MemberList(9, {}).to_json())
    for number in range(10):
        assert turns.one.members.by_number == {7: OTHER}
        turns.listed.show(OTHER, Beat(1 + number, 0))
        turns.take()
    assert turns.one.members.by_number == {}


@pytest.mark.parametrize(
    "begins", ["told to", "the last left", "outage", "another store"]
)
def test_a_list_must_have_been_empty_for_long_before_somebody_begins_it(
    turns: Turns, begins: str
) -> None:
    """Twice a silence, from when it was seen to be empty; 6 seconds."""
    turns.one._begins_list = begins != "told to"
    if begins == "the last left":
        turns.put(OTHER)
        turns.take()
    # Less than would let it begin, or more where it may not begin.
    turns.take(*((1, 100.0) if begins in ("told to", "the last left") else (2, 2.0)))
    if begins == "the last left":
        assert turns.one.members.by_number == {7: OTHER}
        turns.listed.change(0, lambda old: {})
    elif begins == "outage":
        turns.is_away = True
        turns.take(1, 4.0)
        turns.is_away = False
    elif begins == "another store":
        turns.store = HashStore()
        turns.listed = MemberStore(turns.store, turns.listed._signatures)
        turns.take(1, 4.0)
    turns.one._begins_list = True
    began = turns.clock.now
    while not turns.numbers and turns.clock.now < began + 20:
        turns.take()
    assert turns.numbers == {turns.one.member.number}
    assert turns.clock.now - began == 6.0


def test_of_two_that_find_an_empty_list_one_begins_it(turns: Turns) -> None:
    turns.one._begins_list = True
    turns.take()
    replace = MemberStore.replace

    def late(store: MemberStore, text: str, members: MemberList) -> bool:
        assert replace(turns.listed, text, MemberList(1, {7: OTHER}))
        return replace(store, text, members)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemberStore, "replace", late)
        turns.take(1, 6.0)
    assert turns.numbers == {7}
    assert not turns.one.is_in
    turns.take()
    assert turns.one.members.by_number == {7: OTHER}


def test_nobody_begins_a_list_that_was_written_since_it_was_read(turns: Turns) -> None:
    turns.one._begins_list = True
    turns.take(2)
    turns.listed.store.set("members", MemberList(1, {7: OTHER}).to_json())
    turns.take(1, 6.0)
    assert turns.numbers == {7}
    assert not turns.one.is_in


@pytest.mark.parametrize("raises_version", [True, False])
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_the_first_of_a_list_goes_on_where_the_answer_came_too_late(
    turns: Turns, is_waited_for: bool, raises_version: bool
) -> None:
    """Nobody else on that list could ever give it weights."""
    turns.one._begins_list = True
    turns.take()
    replace = MemberStore.replace

    def late(store: MemberStore, text: str, members: MemberList) -> bool:
        if raises_version:
            replace(store, text, members)
        else:
            store.store.compare_set("members", text, members.to_json())
        raise RendezvousUnreachable("no answer within 2 s")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemberStore, "replace", late)
        turns.take(1, 6.0)
    assert (turns.numbers, turns.one.is_in) == ({0}, False)
    turns.one._begins_list = is_waited_for
    turns.take(10)
    if not is_waited_for:
        assert (turns.numbers, turns.one.is_in) == (set(), False)
        turns.one._begins_list = True
        turns.take(13)
    assert (turns.numbers, turns.one.is_in) == ({0}, True)
    assert turns.one.member.origin == "mine"


def test_who_has_given_up_beginning_a_list_begins_none(turns: Turns) -> None:
    turns.one._begins_list = True
    turns.take()
    replace = MemberStore.replace

    def late(store: MemberStore, text: str, members: MemberList) -> bool:
        turns.one._begins_list = False
        return replace(store, text, members)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemberStore, "replace", late)
        turns.take(1, 6.0)
    turns.take()
    assert (turns.numbers, turns.one.is_in) == (set(), False)


THEIRS = OTHER._replace(origin="theirs")


@pytest.mark.parametrize(("steps", "gives_way"), [(11, True), (10, False)])
def test_a_training_that_is_less_than_half_as_far_as_another_gives_way(
    turns: Turns, steps: int, gives_way: bool
) -> None:
    turns.one.describe(origin="mine")
    turns.enter()
    turns.put(THEIRS)
    turns.listed.show(THEIRS, Beat(1, steps))
    turns.take(2)
    assert turns.numbers == ({7} if gives_way else {0, 7})
    assert turns.one.is_in != gives_way
    assert ("left behind" in turns.seen) == gives_way
    turns.take(2)
    assert turns.numbers == ({7} if gives_way else {0, 7})


def test_who_comes_back_with_other_weights_replaces_the_row_of_its_former_training(
    turns: Turns,
) -> None:
    """A member that had not read that it gave way has restored that row."""
    turns.one.describe(origin="mine")
    turns.enter()
    former = turns.one.member
    turns.put(THEIRS)
    turns.listed.show(THEIRS, Beat(1, 11))
    turns.take(2)
    turns.listed.change(0, lambda old: {former.number: former, 7: THEIRS})
    turns.take()
    turns.one.describe(origin="theirs")
    turns.enter()
    listed = turns.listed.members()[1].by_number
    assert listed == {former.number: former._replace(origin="theirs"), 7: THEIRS}


def test_who_is_outside_gives_way_to_nobody(turns: Turns) -> None:
    turns.one.describe(origin="mine")
    turns.put(THEIRS)
    turns.listed.show(THEIRS, Beat(1, 99))
    turns.take(3)
    assert "left behind" not in turns.seen


def test_the_eight_after_this_one_are_watched_and_one_of_another_training(
    turns: Turns,
) -> None:
    turns.one.describe(origin="mine")
    turns.enter()
    others = [Member(n, f"start {n}", "host", (), "mine") for n in range(1, 13)]
    others[10] = others[10]._replace(origin="theirs")
    others[11] = others[11]._replace(origin="theirs")
    turns.put(*others)
    for other in others:
        turns.listed.show(other, Beat(1, 5 + other.number))
    turns.take(2)
    assert turns.one.steps_of == {f"start {n}": 5 + n for n in (*range(1, 9), 11)}


def test_who_is_not_on_the_list_hears_of_all_that_are(turns: Turns) -> None:
    others = [Member(n, f"start {n}", "host", ()) for n in range(1, 13)]
    turns.put(*others)
    for other in others[1:]:
        turns.listed.show(other, Beat(1, other.number))
    turns.take(2)
    assert turns.one.steps_of == {f"start {n}": n for n in range(2, 13)}


def test_those_that_say_goodbye_have_left_and_the_others_are_gone(
    turns: Turns,
) -> None:
    turns.enter()
    others = [Member(n, f"start {n}", "host", ()) for n in (1, 2, 3)]
    turns.put(*others)
    turns.listed.show(others[0], Beat(None, 4))
    turns.listed.show(others[1], Beat(3, 4))
    turns.take()
    assert turns.one.left == set()
    turns.put()
    turns.take()
    assert turns.one.left == {"start 1"}


def test_no_list_shows_before_those_that_have_left_it_are_known(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread would take who is missing from it for lost."""
    turns.enter()
    left = left_at_each_list(Membership, monkeypatch)
    turns.put(OTHER)
    turns.listed.show(OTHER, Beat(None, 4))
    turns.take()
    turns.put()
    turns.take()
    assert left == [set(), {OTHER.incarnation}]


def test_a_change_of_the_list_is_told_once(turns: Turns) -> None:
    turns.enter()
    turns.seen.clear()
    turns.take(3)
    assert turns.seen == ["turn"] * 3
    turns.put(OTHER)
    turns.seen.clear()
    turns.take(2)
    assert turns.seen == ["change", "turn", "turn"]
    turns.is_away = True
    turns.seen.clear()
    turns.take(2)
    assert turns.seen == ["change", "turn", "turn"]


def test_a_dead_member_is_evicted_once_and_others_stay(turns: Turns) -> None:
    turns.enter()
    third = Member(8, "the third", "host", ())
    turns.put(OTHER, third)
    for other in (OTHER, third):
        turns.listed.show(other, Beat(1, 0))
    turns.take()
    turns.one.evict(OTHER)
    turns.take()
    assert turns.numbers == {0, 8}
    assert turns.one._dead == set()
    turns.put(OTHER, third)
    turns.one.evict(OTHER)
    turns.take()
    assert turns.numbers == {0, 7, 8}


def test_a_member_is_described_by_what_is_said_of_it(turns: Turns) -> None:
    turns.one.describe(addresses=("here:1",))
    turns.one.describe(origin="mine")
    turns.one.describe()
    described = Member(-1, "mine", "host", ("here:1",), "mine")
    assert turns.one.member == described
    turns.enter()
    assert turns.listed.members()[1].by_number == {0: described._replace(number=0)}


def test_the_log_says_nothing_of_an_outage_before_training(
    turns: Turns, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever only begins waits for the rendezvous, and says so elsewhere."""
    caplog.set_level(logging.WARNING)
    turns.is_away = True
    turns.take(3)
    assert turns.one.outage == "it is away"
    assert caplog.records == []


def test_a_goodbye_can_be_read_though_no_step_was_made(turns: Turns) -> None:
    turns.enter()
    turns.steps = -1
    turns.one._say_goodbye()
    assert turns.listed.has_said_goodbye(turns.one.member)
    assert turns.numbers == set()


def test_who_was_never_on_the_list_says_no_goodbye(turns: Turns) -> None:
    turns.take()
    turns.one._say_goodbye()
    assert not turns.listed.has_said_goodbye(turns.one.member)


def test_a_goodbye_to_a_rendezvous_that_is_away_is_no_error(turns: Turns) -> None:
    turns.enter()
    turns.is_away = True
    turns.one._say_goodbye()
    assert turns.numbers == {0}


def test_nobody_waits_who_gives_no_time(turns: Turns) -> None:
    assert not turns.one.enter()
    assert not turns.one.begin_list(0.0)
    assert not turns.one.refresh(0.0)
    turns.take()
    assert turns.one.is_in
    assert turns.one.enter()


def test_an_outage_ends_the_wait_for_an_empty_list(turns: Turns) -> None:
    """Whoever waits then says for what, and asks again."""
    turns.is_away = True
    turns.take()
    assert not turns.one.begin_list(10 * PATIENCE_S)


def test_who_has_just_begun_a_list_takes_itself_off_at_the_end(turns: Turns) -> None:
    turns.one._begins_list = True
    turns.take(2)
    turns.take(1, 6.0)
    assert turns.numbers == {0}
    turns.one._say_goodbye()
    assert turns.numbers == set()


def test_a_number_that_is_drawn_anew_has_a_heartbeat_before_others_read_of_it(
    turns: Turns,
) -> None:
    """Who finds a member without one measures its silence from then on."""
    turns.take()
    turns.one.enter()
    turns.put(OTHER._replace(number=turns.one.member.number))
    turns.take()
    assert turns.one.is_in
    _, beats = turns.listed.beats([turns.one.member])
    assert beats["mine"] is not None


@pytest.mark.parametrize(
    ("wanted", "dead", "is_away", "fails", "waits"),
    [
        (False, False, False, False, True),
        (True, False, False, False, False),
        (False, True, False, False, False),
        (True, True, True, False, True),
        (True, True, False, True, True),
    ],
)
def test_what_there_is_to_do_is_done_at_once_unless_it_has_just_failed(
    turns: Turns, wanted: bool, dead: bool, is_away: bool, fails: bool, waits: bool
) -> None:
    """Else an outage would cost a core."""
    one: Any = turns.one
    turns.is_away = is_away
    turns.take()
    one._wanted = wanted
    if dead:
        one.evict(OTHER)
    one._in_a_row = int(fails)
    waited = list[float]()
    one._state.wait = waited.append
    one._rest()
    assert waited == ([Heartbeat().interval_s] if waits else [])


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_the_thread_is_a_goodbye_and_the_end_of_its_connection(
    turns: Turns, fails: bool
) -> None:
    turns.enter()
    one: Any = turns.one
    closed, one._fail = list[int](), lambda error: None
    one._rendezvous.close = lambda: closed.append(1)
    one._ending = not fails
    if fails:
        one._visit = None
        one._state.wait = lambda _: None
    one._work()
    assert closed == [1]
    assert turns.numbers == ({0} if fails else set())


def test_a_member_that_dies_during_an_outage_is_evicted_afterwards(
    turns: Turns,
) -> None:
    turns.enter()
    turns.put(OTHER)
    turns.listed.show(OTHER, Beat(1, 0))
    turns.take()
    turns.is_away = True
    turns.one.evict(OTHER)
    turns.take(2)
    turns.is_away = False
    turns.take()
    assert turns.numbers == {0}


def test_who_has_waited_in_vain_for_an_empty_list_begins_none_later(
    turns: Turns,
) -> None:
    turns.take()
    assert not turns.one.begin_list(0.0)
    turns.take(40)
    assert turns.numbers == set()


def test_a_row_that_was_spoiled_is_written_again_and_what_is_newer_stays(
    turns: Turns,
) -> None:
    turns.enter()
    third, newer = (Member(8, name, "host", ()) for name in ("the third", "newer"))
    turns.put(OTHER, third)
    turns.take()
    spoiled = json.dumps([9, [turns.one.member, [7, 5, None], newer]])
    turns.store.set("members", spoiled)
    turns.store.set("version", "another")
    turns.take()
    listed = turns.listed.members()[1].by_number
    assert (listed[7], listed[8]) == (OTHER, newer)
