"""An island that others cannot connect to hears of it once, with the likely cause."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_adpsgd.islands import callers
from lightning_adpsgd.islands.callers import CallersWatch
from lightning_adpsgd.islands.member_list import Member, MemberList
from lightning_adpsgd.transport.links.sockets import Address, source_towards


class Course:
    """A watch that looks at an island, with what the island knows and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.watch, self.callers = 100.0, CallersWatch(), list[int]()
        own, other = (
            Member(n, f"start {n}", "host", (f"127.0.0.1:{n}",)) for n in (1, 2)
        )
        self.links: Any = SimpleNamespace(
            callers=lambda: self.callers,
            address_of=lambda member: Address.parse(member.addresses[0]),
        )
        members = MemberList(1, {1: own, 2: other})
        self.membership: Any = SimpleNamespace(member=own, members=members)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(callers, "time", clock)

    def run(self, seconds: int, asked: set[int]) -> None:
        for _ in range(seconds):
            self.watch.look(self.links, self.membership, asked)
            self.now += 1.0


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> Course:
    return Course(monkeypatch)


def test_who_is_called_by_nobody_hears_of_a_firewall_once(
    course: Course, caplog: pytest.LogCaptureFixture
) -> None:
    course.run(19, {2})
    assert caplog.messages == []
    course.run(90, {2})
    (message,) = caplog.messages
    assert "no island has connected to this one at 127.0.0.1:1 for 2" in message
    assert "it reaches 1 of them" in message
    assert message.endswith("an address translation on the side of this host")


def test_who_has_another_address_now_hears_which(
    course: Course, caplog: pytest.LogCaptureFixture
) -> None:
    own = course.membership.member._replace(addresses=("192.0.2.7:1",))
    course.membership.member = own
    course.run(60, {2})
    (message,) = caplog.messages
    assert "at 192.0.2.7:1 for" in message
    assert "The address of this host towards 127.0.0.1 is 127.0.0.1 now" in message
    assert message.endswith("start this island again, from its checkpoint")


def test_who_has_several_addresses_hears_of_a_firewall(
    course: Course, caplog: pytest.LogCaptureFixture
) -> None:
    """It reaches others from another one than that it listens at."""
    own = course.membership.member._replace(addresses=("127.0.0.2:1",))
    course.membership.member = own
    course.run(60, {2})
    (message,) = caplog.messages
    assert message.endswith("an address translation on the side of this host")


def test_who_is_called_or_alone_hears_nothing(
    course: Course, caplog: pytest.LogCaptureFixture
) -> None:
    course.run(60, set())
    course.run(15, {2})
    course.callers = [2]
    course.run(60, {2})
    course.callers = []
    course.run(15, {2})
    course.run(60, {7})  # it has left the list
    assert caplog.messages == []


def test_seconds_in_which_the_process_was_stopped_do_not_count(
    course: Course, caplog: pytest.LogCaptureFixture
) -> None:
    course.run(5, {2})
    course.now += 600.0
    course.run(5, {2})
    assert caplog.messages == []


def test_the_source_of_a_route_is_known_without_a_word_to_the_other_end() -> None:
    assert source_towards(Address("127.0.0.1", 2)) == "127.0.0.1"
    assert source_towards(Address("", 0)) in ("", "127.0.0.1")
    if socket.has_dualstack_ipv6():
        assert source_towards(Address("::1", 2)) == "::1"
