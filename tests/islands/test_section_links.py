"""A member is asked for all sections or for none, and hears of the end first."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import override

from lightning_adpsgd.islands import section_links
from lightning_adpsgd.islands.member_list import Member
from lightning_adpsgd.islands.section_links import SectionLinks
from lightning_adpsgd.transport.base import PeerLost, lane_of
from lightning_adpsgd.transport.links.credentials import BadCredentials
from lightning_adpsgd.transport.links.handshake import Refused
from lightning_adpsgd.transport.links.sockets import Address
from tests.islands.archipelago import still_clock

ONE = Member(1, "start 1", "host", ("a:1", "a:2", "a:3"))
ASKING = lane_of(0, 1)


class Told(threading.Event):
    """It is set as soon as somebody waits for it."""

    @override
    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert timeout >= 0
        self.set()
        return True


class Section:
    """A transport and the threads of one section, with what is asked of them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.told = error, Told()
        self.dialed = list[tuple[int, Address, str]]()
        self.ended, self.names = list[tuple[int, ...]](), list[tuple[Any, ...]]()
        self.added = list[int]()
        self.transport: Any = SimpleNamespace(
            index=0,
            connect=self._connect,
            disconnect=lambda *which: self.ended.append(which),
            rename=lambda *name: self.names.append(name),
        )
        self.dropped = list[int]()
        self.peers: Any = SimpleNamespace(add=self.added.append, drop=self._drop)

    def _drop(self, number: int) -> Told:
        self.dropped.append(number)
        return self.told

    def _connect(self, number: int, address: Address, name: str) -> None:
        if self.error is not None:
            raise self.error
        self.dialed.append((number, address, name))


def links_of(*sections: Section, shards: tuple[int, ...] = (2, 0)) -> SectionLinks:
    transports = [one.transport for one in sections]
    peers = [one.peers for one in sections]
    return SectionLinks(transports, peers, shards)


def test_each_section_is_dialed_at_the_address_of_its_owner() -> None:
    first, second = Section(), Section()
    links_of(first, second).ask(ONE)
    assert first.dialed == [(1, Address("a", 3), "start 1")]
    assert second.dialed == [(1, Address("a", 1), "start 1")]
    assert first.added == second.added == [1]


def test_nobody_listens_where_a_member_has_too_few_addresses() -> None:
    links = links_of(Section(), Section(), shards=(2, 3))
    assert links.address_of(ONE) == Address("a", 3)
    assert links.address_of(ONE, 1) == Address("", 0)


@pytest.mark.parametrize(
    "error", [PeerLost(1, "a test", "lost"), Refused("no"), BadCredentials("old")]
)
def test_who_gives_one_section_alone_is_asked_for_none(error: Exception) -> None:
    first, second = Section(), Section(error)
    with pytest.raises(type(error)):
        links_of(first, second).ask(ONE)
    assert first.added == second.added == []
    assert first.ended == second.ended == [(1, ASKING)]


def test_who_cannot_be_asked_for_one_section_is_asked_for_none() -> None:
    """Or the next attempt would connect all again under the threads that ask."""

    def refuse(number: int) -> None:
        raise RuntimeError("can't start new thread")

    first, second = Section(), Section()
    second.peers.add = refuse
    with pytest.raises(RuntimeError, match="can't start new thread"):
        links_of(first, second).ask(ONE)
    assert first.dropped == second.dropped == [1]
    assert first.ended == second.ended == [(1, ASKING)]


def test_who_is_asked_no_more_hears_so_before_its_connections_end() -> None:
    """Those over which it asks stay: it would take their end for a loss."""
    sections = Section(), Section()
    links = links_of(*sections)
    links.ask(ONE)
    links.stop_asking({1}, 2.0)
    for one in sections:
        assert one.told.is_set()
        assert one.ended == [(1, ASKING)]


def test_the_time_of_all_goodbyes_is_that_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = still_clock(monkeypatch, section_links)
    waits = list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.now += 1.5

    section = Section()
    monkeypatch.setattr(section.told, "wait", wait)
    links_of(section).stop_asking([1, 2, 3], 2.0)
    assert waits == [2.0, 0.5, 0.0]


def test_all_sections_get_the_number_incarnation_and_origin() -> None:
    sections = Section(), Section()
    links_of(*sections).rename(Member(7, "start", "host", (), "origin"))
    assert [one.names for one in sections] == [[(7, "start", "origin")]] * 2
