"""The member list: who is on it, who is evicted, and what a lost rendezvous does."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_adpsgd.islands.member_list import Heartbeat, Member, MemberList
from lightning_adpsgd.islands.membership import Membership
from lightning_adpsgd.islands.rendezvous import (
    Rendezvous,
    RendezvousAddress,
    RendezvousUnreachable,
)
from tests.helpers import PATIENCE_S, until
from tests.islands.archipelago import (
    HEARTBEAT,
    NOBODY_LISTENS,
    Server,
    fall_silent,
    rendezvous,
)

NAMES = st.text(max_size=5)
WAYS = st.sampled_from(["10.0.0.1:2", "[fe80::1]:65535", "node:29400"])
MEMBERS = st.builds(
    Member, st.integers(0, 9), NAMES, NAMES, st.tuples(WAYS) | st.just(()), NAMES
)


@given(epoch=st.integers(0, 100), members=st.lists(MEMBERS, max_size=5))
def test_a_member_list_comes_back_from_its_text(
    epoch: int, members: list[Member]
) -> None:
    listed = MemberList(epoch, {member.number: member for member in members})
    assert MemberList.from_json(listed.to_json()) == listed


_ODD_EPOCHS = [f"[{epoch}, []]" for epoch in ("-1", str((1 << 62) + 1), "9" * 4300)]


@pytest.mark.parametrize(
    "text", ["{", "7", "[1, 2]", '["x", []]', "[" * 9999, *_ODD_EPOCHS]
)
def test_what_is_no_member_list_counts_as_one_invalid_row(text: str) -> None:
    found = MemberList.from_json(text)
    assert (found, found.num_invalid) == (MemberList(), 1)


def test_the_members_after_a_number_wrap_around() -> None:
    listed = MemberList(0, {n: Member(n, str(n), "", ()) for n in (1, 4, 6, 8)})
    assert listed.after(4) == [6, 8, 1]
    assert listed.after(5) == [6, 8, 1, 4]


def test_a_member_counts_as_dead_after_three_seconds_and_an_outage_is_shorter() -> None:
    """The default; a lost rendezvous must show before its silence kills anybody."""
    assert Heartbeat().silence_s == 3.0
    one = Rendezvous(RendezvousAddress("127.0.0.1", 1, "job"))
    assert one._answer_s < Heartbeat().silence_s


def test_a_jump_of_the_wall_clock_evicts_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rendezvous() as server, members(server, 2) as both:
        epoch = both[0].members.epoch
        monkeypatch.setattr(time, "time", lambda: 4e9)
        for one in both:
            assert one.refresh(20)
        assert both[0].members.epoch == epoch


@contextmanager
def members(
    server: Server, num: int, heartbeat: Heartbeat = HEARTBEAT, **arguments: Any
) -> Iterator[list[Membership]]:
    """Memberships on the list, in order of their numbers."""
    found: list[Membership] = []
    with ExitStack() as stack:
        for index in range(num):
            one = make(server.address, f"incarnation {index}", heartbeat, **arguments)
            stack.callback(one.stop, 5.0)
            assert one.enter(20)
            found.append(one)
        until(
            lambda: all(len(one.members.by_number) == num for one in found), "the list"
        )
        yield found


def numbers(one: Membership) -> set[int]:
    return set(one.members.by_number)


def make(
    address: RendezvousAddress,
    name: str,
    heartbeat: Heartbeat = HEARTBEAT,
    **arguments: Any,
) -> Membership:
    member = Member(-1, name, "host", ("127.0.0.1:1",))
    called = {**NOBODY_LISTENS, **arguments}
    one = Membership(Rendezvous(address), member, lambda: 0, heartbeat, **called)
    one.start()
    return one


def die(one: Membership) -> None:
    """As a process that is killed."""
    fall_silent(one)
    one.stop(5.0)


def test_numbers_are_given_in_order_and_never_twice() -> None:
    with rendezvous() as server, members(server, 3) as three:
        assert [one.member.number for one in three] == [0, 1, 2]
        die(three[2])
        again = make(server.address, "another incarnation")
        assert again.enter(20)
        assert again.member.number == 3
        again.stop(5)


def test_a_silent_member_is_evicted_and_one_that_leaves_at_once() -> None:
    with rendezvous() as server, members(server, 3) as three:
        die(three[0])
        until(lambda: numbers(three[2]) == {1, 2}, "the eviction")
        three[1].stop(5)
        until(lambda: numbers(three[2]) == {2}, "the leave")
        assert three[2].members.epoch >= 5


def test_a_member_that_was_evicted_by_mistake_adds_itself_again() -> None:
    with rendezvous() as server, members(server, 2) as both:
        client = Rendezvous(server.address, answer_s=20.0)
        client.ask(lambda store: store.set("members", MemberList(99, {}).to_json()))
        client.ask(lambda store: store.add("version", 1))
        until(lambda: both[0].members.epoch > 99, "the next epoch")
        until(lambda: numbers(both[0]) == {0, 1}, "both again")
        client.close()


def test_an_empty_rendezvous_gets_the_list_back_from_the_first_to_find_it() -> None:
    with rendezvous() as server, members(server, 3) as three:
        lists = [one.members.by_number for one in three]
        server.stop()
        until(lambda: all(one.outage for one in three), "the loss of the rendezvous")
        assert [one.members.by_number for one in three] == lists
        server.start()
        until(lambda: not any(one.outage for one in three), "the way back")
        client = Rendezvous(server.address, answer_s=20.0)
        text = client.ask(lambda store: store.get("members").decode())
        assert MemberList.from_json(text).by_number == lists[0]
        late = make(server.address, "a late one")
        assert late.enter(20)
        assert late.member.number == 3  # though the counter had begun at 0 again
        late.stop(5)
        client.close()


def test_of_two_with_one_number_the_later_takes_another() -> None:
    # A call hangs for a second in torch 2.6, and is not to look like a stop.
    heartbeat = Heartbeat(interval_s=0.05, silence_s=10.0, empty_s=0.1)
    with rendezvous() as server, members(server, 1, heartbeat) as (old,):
        server.stop()
        until(lambda: bool(old.outage), "the loss")
        server.start()
        new = Member(0, "a newcomer", "host", ())
        client = Rendezvous(server.address, answer_s=20.0)
        # It came to the empty rendezvous first, and got the same number there.
        client.ask(
            lambda store: store.set("members", MemberList(1, {0: new}).to_json())
        )
        client.ask(lambda store: store.add("version", 1))
        until(lambda: old.member.number > 0 and old.is_in, "another number")
        assert old.members.by_number[0] == new
        client.close()


def test_a_rendezvous_that_takes_requests_and_answers_none_is_away() -> None:
    """As one that is stopped; who asks goes on, and finds the next one."""
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        server = Server()
        server.address = RendezvousAddress("127.0.0.1", hangs.getsockname()[1], "job")
        client = Rendezvous(server.address, answer_s=0.2)
        for _ in range(2):
            with pytest.raises(RendezvousUnreachable, match="no answer within"):
                client.ask(lambda store: store.add("number", 1))
        thread = thread_of(client)
    # Its end is seen by the second connection, and ends what waited on the first.
    with pytest.raises(RendezvousUnreachable, match="closed"):
        client.ask(lambda store: store.add("number", 1))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    server.start()
    try:
        until(lambda: answers(client), "an answer")
    finally:
        client.close()
        server.stop()


def answers(client: Rendezvous) -> bool:
    try:
        return client.ask(lambda store: store.add("number", 1)) > 0
    except RendezvousUnreachable:
        return False


def thread_of(client: Rendezvous) -> threading.Thread:
    """In which it waits for the server."""
    assert client._calls._worker is not None
    return client._calls._worker._thread


def test_a_call_over_a_cut_line_is_given_up() -> None:
    """Nothing comes from the server, and nothing ends: the client hangs up itself."""
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        address = RendezvousAddress("127.0.0.1", hangs.getsockname()[1], "job")
        client = Rendezvous(address)
        with pytest.raises(RendezvousUnreachable, match="no answer within"):
            client.ask(lambda store: store.check(["key"]))
        thread = thread_of(client)
        client.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_member_known_to_be_dead_is_evicted_at_once_and_only_once() -> None:
    heartbeat = Heartbeat(interval_s=0.05, silence_s=60.0)
    with rendezvous() as server, members(server, 3, heartbeat) as three:
        dead, alive = three[0].member, three[1].member
        die(three[0])
        three[2].evict(dead)
        rest = three[1:]
        until(lambda: all(numbers(o) == {1, 2} for o in rest), "the eviction")
        epoch = three[2].members.epoch
        # A mistake: the evicted one is back at once, and is not evicted forever.
        three[2].evict(alive)
        until(lambda: three[2].members.epoch == epoch + 2, "its way back")
        three[2].evict(alive)
        assert three[2].refresh(20)
        assert three[2].refresh(20)
        assert (three[2].members.epoch, numbers(three[2])) == (
            epoch + 2,
            {1, 2},
        )


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any, requests: Counter[str]) -> None:
        self._store, self._requests = store, requests

    def __getattr__(self, name: str) -> Any:
        self._requests[name] += 1
        return getattr(self._store, name)


@pytest.mark.parametrize("num", [2, 12])
def test_a_turn_costs_two_requests_whatever_the_number_of_members(num: int) -> None:
    requests = Counter[str]()
    heartbeat = Heartbeat(interval_s=0.02, silence_s=10.0)
    with rendezvous() as server, members(server, num, heartbeat) as all_of_them:
        one = all_of_them[0]
        until(lambda: len(one.steps_of) == min(num - 1, 8), "the beats of all watched")
        ask = one._rendezvous.ask
        counters: dict[int, Any] = {}

        def counted(action: Any) -> Any:
            return ask(
                lambda store: action(
                    counters.setdefault(id(store), Counting(store, requests))
                )
            )

        one._store = None
        one._rendezvous.ask = counted  # pyright: ignore[reportAttributeAccessIssue]
        one.refresh(20)
        one.refresh(20)
        requests.clear()
        for _ in range(5):
            one.refresh(20)
        assert requests["set"] == requests["multi_get"] <= 6
        # Every tenth turn it reads the list in any case.
        assert requests.total() <= 2 * requests["set"] + 2
