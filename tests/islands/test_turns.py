"""Turns of the thread that keeps the member list, taken by hand, at its own clock."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.islands import membership
from lightning_adpsgd.islands.member_store import MemberStore
from lightning_adpsgd.islands.members import Beat, Heartbeat, Member, MemberList
from lightning_adpsgd.islands.membership import Membership
from lightning_adpsgd.islands.rendezvous import (
    Rendezvous,
    RendezvousAddress,
    RendezvousUnreachable,
)
from lightning_adpsgd.islands.signatures import Signatures
from lightning_adpsgd.transport.links import Credentials

SILENCE_S = 3.0
OTHER = Member(7, "the other", "host", ())


class Clock:
    """The time that the membership sees."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Turns:
    """A membership without its thread, over a store that can be away."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.store, self.is_away = clock, HashStore(), False
        self.steps = 5
        client: Any = Rendezvous(RendezvousAddress("127.0.0.1", 1, "job"))
        client.ask = self._ask
        member = Member(-1, "mine", "host", ())
        heartbeat = Heartbeat(silence_s=SILENCE_S)
        self.one = Membership(client, member, lambda: self.steps, heartbeat)
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

    @property
    def numbers(self) -> set[int]:
        return set(self.listed.members().members.by_number)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    clock = Clock()
    monkeypatch.setattr(membership, "time", clock)
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
    assert "cannot be reached (it is away): training goes on" in away
    assert "is back after 2 s, with 1 super-learners" in back


@pytest.mark.parametrize("num_before", [5, 6])
def test_what_stood_still_during_an_outage_was_the_rendezvous(
    turns: Turns, num_before: int
) -> None:
    """Also where it was about to count as a silence when the rendezvous went."""
    turns.listed.change(0, lambda old: {7: OTHER})
    turns.listed.show(OTHER, Beat(1, 0))
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
    turns.listed.change(0, lambda old: {7: OTHER})
    turns.listed.show(OTHER, Beat(1, 0))
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
    turns.one._founds = True
    turns.take(2)
    assert turns.numbers == set()
    turns.take(20)
    found = turns.listed.members().members
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
    turns.listed.change(0, lambda old: {7: OTHER})
    turns.listed.show(OTHER, Beat(1, 0))
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
