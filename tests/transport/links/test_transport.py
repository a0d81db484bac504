"""The transport of islands: the promises of the others, and peers that come and go."""

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.gossip.engine import Gossip
from lightning_adpsgd.transport.base import (
    PeerLost,
    Transport,
    lane_of,
)
from lightning_adpsgd.transport.links import listener as bounds
from lightning_adpsgd.transport.links.connection import Connection
from lightning_adpsgd.transport.links.credentials import BadCredentials, Credentials
from lightning_adpsgd.transport.links.handshake import Refused
from lightning_adpsgd.transport.links.listener import Listener
from lightning_adpsgd.transport.links.peer_info import PeerInfo
from lightning_adpsgd.transport.links.sockets import Address, probe
from lightning_adpsgd.transport.links.transport import LinkTransport, _OpenConnections
from tests.helpers import (
    PATIENCE,
    PATIENCE_S,
    Swap,
    engine_threads,
    engines_over,
    random_rows,
    running,
    settle,
    swap,
    together,
    until,
)
from tests.threads import ThreadTransport
from tests.transport.links.ends import LOOPBACK, TOKEN, info, linked, tcp_pair

FOREVER = timedelta(minutes=5)


def ignore(number: int) -> None:
    """Of no interest to the test."""


def test_each_swaps_with_each_other_on_both_lanes() -> None:
    def program(transport: LinkTransport) -> list[list[float]]:
        peers = [j for j in range(3) if j != transport.index]
        got = []
        for peer in peers:
            for lane in (0, 1):
                into = torch.zeros(1)
                value = torch.full((1,), transport.index + 10.0 * lane)
                swap(transport, lane, [Swap(peer, value, into)], PATIENCE)
                got.append(into.item())
        return got

    with linked(3) as transports:
        got = together([lambda t=t: program(t) for t in transports])
    assert got == [[1, 11, 2, 12], [0, 10, 2, 12], [0, 10, 1, 11]]


def test_a_broken_lane_is_nobodys() -> None:
    """So that a peer that has begun anew can take it."""
    lanes = _OpenConnections()
    with tcp_pair() as (first, _):
        lanes.put(1, 0, first, "start 1")
        assert lanes.holder(1, 0) == "start 1"
        assert lanes.holder(1, 1) == lanes.holder(2, 0) == ""
        lanes.get(1, 0).break_off("the peer has gone")
        assert lanes.holder(1, 0) == ""


def test_a_thread_ends_no_lane_that_has_replaced_its_own() -> None:
    """It hears a goodbye late, when the peer has connected again."""
    with linked(2) as (first, second):
        lane, accepted = lane_of(0, 1), threading.Semaphore(0)
        listener = second.listen(LOOPBACK, lambda *_: accepted.release())
        answers = second.bound(0, lane)
        first.connect(1, listener.address)
        assert accepted.acquire(timeout=PATIENCE_S)
        answers.hang_up()
        into = torch.zeros(1)
        first.bound(1, lane).post_send(1, lane, torch.ones(1)).wait(PATIENCE)
        second.bound(0, lane).post_receive(0, lane, into).wait(PATIENCE)
        assert (into.item(), second.callers()) == (1, [0])
        second.bound(0, lane).hang_up()
        with pytest.raises(PeerLost, match="closed the connection"):
            first.bound(1, lane).post_receive(1, lane, into).wait(FOREVER)
        assert second.callers() == []
        listener.close()


def test_a_lane_that_is_replaced_is_broken_off_once_the_new_one_has_been_told_of() -> (
    None
):
    """Who waits on it is told first that this is no loss."""
    second, came = LinkTransport(info(1), TOKEN), list[bool]()
    old = list[Connection]()

    def on_lane(number: int) -> None:
        came.append(bool(old) and not old[0].is_broken)
        old.append(second._lanes._connections[0, 0][0])

    listener = second.listen(LOOPBACK, on_lane)
    dialers = [LinkTransport(info(0), TOKEN) for _ in range(2)]
    for number, dialer in enumerate(dialers, 1):
        dialer.connect(1, listener.address)
        until(lambda n=number: len(old) == n, "the lane")
    until(lambda: old[0].is_broken, "the end of the old one")
    assert came == [False, True]
    assert not old[1].is_broken
    end(listener, *dialers, second)


def test_no_lane_is_put_where_links_are_closed() -> None:
    lanes = _OpenConnections()
    lanes.close()
    with tcp_pair() as (first, second):
        with pytest.raises(ConnectionAbortedError, match="has closed its links"):
            lanes.put(1, 0, first, "start 1")
        assert lanes.connected() == []
        assert second.recv(1) == b""


def test_one_who_only_looks_whether_anybody_listens_is_not_turned_away() -> None:
    with linked(1) as (transport,):
        door = transport.listen(LOOPBACK, ignore)
        for _ in range(5):
            assert probe(door.address) is None
        late = LinkTransport(info(1), TOKEN)
        late.connect(0, door.address)
        until(lambda: not door._pending, "the end of all that came")
        assert door.turned_away == {}
        late.close()
        door.close()


def test_a_stranger_who_says_nothing_is_turned_away_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "HANDSHAKE_S", 0.1)
    with linked(1) as (transport,):
        door = transport.listen(LOOPBACK, ignore)
        with socket.create_connection(door.address):
            until(lambda: door.turned_away["TimeoutError"] == 1, "the end of its time")
        door.close()


def test_a_peer_that_was_never_connected_is_lost_by_name() -> None:
    transport = LinkTransport(info(0), TOKEN)
    with pytest.raises(PeerLost, match=r"super-learner 5 while using lane 1.*not conn"):
        transport.post_send(5, 1, torch.zeros(1))


def test_there_is_no_mean_over_members_that_come_and_go() -> None:
    with pytest.raises(NotImplementedError, match="no mean"):
        LinkTransport(info(0), TOKEN).post_mean(torch.zeros(1))


def test_numbers_of_peers_need_not_be_dense() -> None:
    first, second = (LinkTransport(info(n), TOKEN) for n in (7, 1000))
    came: list[int] = []
    listener = second.listen(LOOPBACK, came.append)
    first.connect(1000, listener.address)
    until(lambda: came == [7], "the lane")
    into = torch.zeros(1)
    first.post_send(1000, lane_of(7, 1000), torch.ones(1)).wait(PATIENCE)
    second.post_receive(7, lane_of(7, 1000), into).wait(PATIENCE)
    assert into.item() == 1
    end(listener, first, second)


def end(listener: Listener, *transports: LinkTransport) -> None:
    listener.close()
    for transport in transports:
        transport.close()


def test_the_loss_of_one_peer_is_noticed_at_once_and_is_of_that_peer_alone() -> None:
    with linked(3) as transports:
        into = torch.zeros(1)
        receive = transports[0].post_receive(1, 0, into)
        transports[1].close()
        with pytest.raises(PeerLost, match="lost super-learner 1") as lost:
            receive.wait(FOREVER)
        assert lost.value.peer == 1
        transports[2].post_send(0, 0, torch.ones(1)).wait(PATIENCE)
        transports[0].post_receive(2, 0, into).wait(PATIENCE)
        assert into.item() == 1


def test_a_lane_is_made_anew_and_takes_nothing_from_the_one_before() -> None:
    first, second = (LinkTransport(info(n), TOKEN) for n in (0, 1))
    ready = threading.Semaphore(0)
    listener = second.listen(LOOPBACK, lambda *_: ready.release())
    first.connect(1, listener.address)
    assert ready.acquire(timeout=PATIENCE_S)
    old = second.post_receive(0, 0, torch.zeros(1))
    first.disconnect(1)
    anew = threading.Thread(target=first.connect, args=(1, listener.address))
    anew.start()
    with pytest.raises(PeerLost):
        old.wait(FOREVER)
    assert ready.acquire(timeout=PATIENCE_S)
    anew.join()
    into = torch.zeros(1)
    first.post_send(1, 0, torch.ones(1)).wait(PATIENCE)
    second.post_receive(0, 0, into).wait(PATIENCE)
    assert into.item() == 1
    end(listener, first, second)


def test_a_peer_that_connects_again_breaks_off_its_old_lane() -> None:
    """It has noticed that a connection broke, and this end has not."""
    second = LinkTransport(info(1), TOKEN)
    ready = threading.Semaphore(0)
    listener = second.listen(LOOPBACK, lambda *_: ready.release())
    before, after = (LinkTransport(info(0), TOKEN) for _ in range(2))
    before.connect(1, listener.address)
    assert ready.acquire(timeout=PATIENCE_S)
    waits = second.post_receive(0, 0, torch.zeros(1))

    def told() -> str:
        with pytest.raises(PeerLost) as lost:
            waits.wait(FOREVER)
        return str(lost.value)

    reason, _ = together([told, lambda: str(after.connect(1, listener.address))])
    assert "the peer has connected again" in reason
    assert ready.acquire(timeout=PATIENCE_S)
    end(listener, before, after, second)


def test_who_used_a_lane_before_does_not_get_into_the_one_that_follows() -> None:
    """It was busy with something else when the lane was lost and made anew."""
    with linked(2) as (first, second):
        lane = lane_of(0, 1)
        first.post_send(1, lane, torch.ones(1)).wait(PATIENCE)
        accepted = threading.Semaphore(0)
        listener = second.listen(LOOPBACK, lambda *_: accepted.release())
        old = first._lanes.get(1, lane)
        first.connect(1, listener.address)
        assert accepted.acquire(timeout=PATIENCE_S)
        assert old.is_broken
        with pytest.raises(PeerLost, match="the peer has connected again"):
            first.post_send(1, lane, torch.zeros(1))
        into = torch.zeros(1)

        def use_it_from_now_on() -> None:
            first.post_send(1, lane, torch.full((1,), 2.0)).wait(PATIENCE)
            second.post_receive(0, lane, into).wait(PATIENCE)

        together([use_it_from_now_on])
        assert into.item() == 2
        listener.close()


def test_who_has_not_used_a_lane_yet_does_not_get_into_the_one_that_follows() -> None:
    """Its thread had to wait for the processor from its start until then."""
    with linked(2) as (first, second):
        lane, accepted = lane_of(0, 1), threading.Semaphore(0)
        listener = second.listen(LOOPBACK, lambda *_: accepted.release())
        asks, answers = first.bound(1, lane), second.bound(0, lane)
        first.connect(1, listener.address)
        assert accepted.acquire(timeout=PATIENCE_S)
        for _ in range(2):
            with pytest.raises(PeerLost, match="the peer has connected again"):
                asks.post_send(1, lane, torch.zeros(1))
            with pytest.raises(PeerLost, match="the peer has connected again"):
                answers.post_receive(0, lane, torch.zeros(1))
        into = torch.zeros(1)
        first.bound(1, lane).post_send(1, lane, torch.ones(1)).wait(PATIENCE)
        second.bound(0, lane).post_receive(0, lane, into).wait(PATIENCE)
        assert into.item() == 1
        listener.close()


def test_who_came_when_a_lane_was_gone_does_not_get_into_the_one_that_follows() -> None:
    """It was dropped between its handshake and the start of its thread."""
    with linked(2) as (first, second):
        lane, accepted = lane_of(0, 1), threading.Semaphore(0)
        listener = second.listen(LOOPBACK, lambda *_: accepted.release())
        first.disconnect(1, lane)
        asks = first.bound(1, lane)
        first.connect(1, listener.address)
        assert accepted.acquire(timeout=PATIENCE_S)
        with pytest.raises(PeerLost, match="the peer has connected again"):
            asks.post_send(1, lane, torch.zeros(1))
        first.bound(1, lane).post_send(1, lane, torch.ones(1)).wait(PATIENCE)
        listener.close()


def test_a_lane_is_told_of_before_the_next_one_replaces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told of late, the dead one would pass for the loss of the one that stands."""
    second, told = LinkTransport(info(1), TOKEN), list[bool]()
    dialers = [LinkTransport(info(0), TOKEN) for _ in range(2)]
    again = threading.Thread(target=lambda: dialers[1].connect(1, listener.address))
    comes, replaced, put = threading.Event(), threading.Event(), second._lanes.put

    def put_and_tell(*given: Any) -> Connection | None:
        if (old := put(*given)) is not None:
            replaced.set()
        return old

    def on_lane(_: int) -> None:
        here = second._lanes.find(0, 0)
        if not comes.is_set():
            comes.set()
            again.start()
            replaced.wait(0.3)  # in vain
        told.append(second._lanes.find(0, 0) is here)

    monkeypatch.setattr(second._lanes, "put", put_and_tell)
    listener = second.listen(LOOPBACK, on_lane)
    dialers[0].connect(1, listener.address)
    until(lambda: len(told) == 2, "both lanes")
    again.join()
    assert told == [True, True]
    end(listener, *dialers, second)


def test_one_lane_can_be_ended_by_itself() -> None:
    with linked(2) as (first, second):
        assert second.callers() == [0]
        first.disconnect(1, lane_of(0, 1))
        with pytest.raises(PeerLost):
            second.post_receive(0, lane_of(0, 1), torch.zeros(1)).wait(FOREVER)
        assert (first.callers(), second.callers()) == ([1], [])
        into, other = torch.zeros(1), lane_of(1, 0)
        second.post_send(0, other, torch.ones(1)).wait(PATIENCE)
        first.post_receive(1, other, into).wait(PATIENCE)
        assert into.item() == 1


@pytest.mark.parametrize(
    ("listener_info", "listener_token", "message"),
    [
        (info(1), b"another token!!!", "its token differs"),
        (info(1, job="vision"), TOKEN.token, "`job` is 'a job' here and 'vision'"),
        (info(2), TOKEN.token, "super-learner 2 .* where super-learner 1 was"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_and_the_next_one_is_not(
    listener_info: PeerInfo, listener_token: bytes, message: str
) -> None:
    second = LinkTransport(listener_info, Credentials(listener_token))
    listener = second.listen(LOOPBACK, ignore)
    dialer = LinkTransport(info(0), TOKEN)
    with pytest.raises(Refused, match=rf"super-learner 1 at 127.0.0.1:.*{message}"):
        dialer.connect(1, listener.address)
    until(lambda: listener.turned_away["Refused"] == 1, "its own notice")
    fits = LinkTransport(info(0, job=listener_info.job), Credentials(listener_token))
    fits.connect(listener_info.member, listener.address)
    end(listener, dialer, fits, second)


def test_an_address_without_a_listener_is_a_loss_by_name() -> None:
    second = LinkTransport(info(1), TOKEN)
    listener = second.listen(LOOPBACK, ignore)
    listener.close()
    with pytest.raises(PeerLost, match=r"lost super-learner 1 while connecting to 127"):
        LinkTransport(info(0), TOKEN).connect(1, listener.address)


def test_something_else_that_listens_is_a_loss_by_name() -> None:
    def speak(sock: socket.socket, deadline: object) -> None:
        with sock:
            sock.sendall(b"220 mail.example ESMTP\r\n" * 3)

    listener = Listener(LOOPBACK, speak)
    listener.start()
    with pytest.raises(PeerLost, match=r"begins with b'220 mail'"):
        LinkTransport(info(0), TOKEN).connect(1, listener.address)
    listener.close()


def test_without_a_token_it_listens_on_loopback_alone() -> None:
    transport = LinkTransport(info(0), Credentials())
    transport.listen(LOOPBACK, ignore).close()
    with pytest.raises(BadCredentials, match=r"0\.0\.0\.0 is not a loopback address"):
        transport.listen(Address("0.0.0.0", 0), ignore)


def test_who_cannot_be_answered_is_not_connected() -> None:
    def on_lane(number: int) -> None:
        raise ConnectionRefusedError("too many already ask")

    second, dialer = LinkTransport(info(1), TOKEN), LinkTransport(info(0), TOKEN)
    listener = second.listen(LOOPBACK, on_lane)
    dialer.connect(1, listener.address)
    with pytest.raises(PeerLost):
        dialer.post_receive(1, 0, torch.zeros(1)).wait(PATIENCE)
    until(lambda: bool(listener.turned_away), "its own notice")
    assert second.callers() == []
    end(listener, dialer, second)


def test_nobody_takes_the_lane_of_a_process_that_is_connected() -> None:
    second = LinkTransport(info(1), TOKEN)
    listener = second.listen(LOOPBACK, ignore)
    first, other = (
        LinkTransport(info(0, incarnation=name), TOKEN) for name in ("one", "other")
    )
    first.connect(1, listener.address)
    until(lambda: second.callers() == [0], "the lane")
    with pytest.raises(Refused, match="number 0 belongs to another process, now conn"):
        other.connect(1, listener.address)
    second.disconnect(0)
    other.connect(1, listener.address)
    end(listener, first, other, second)


def test_a_dialer_hears_of_a_further_objection() -> None:
    second, dialer = LinkTransport(info(1), TOKEN), LinkTransport(info(0), TOKEN)
    seen = list[PeerInfo]()

    def objection(theirs: PeerInfo) -> str:
        seen.append(theirs)
        return "not today"

    listener = second.listen(LOOPBACK, ignore, objection)
    with pytest.raises(Refused, match="not today"):
        dialer.connect(1, listener.address)
    assert seen == [info(0)]
    assert second.callers() == []
    end(listener, dialer, second)


def test_no_link_that_leaves_the_host_is_dialed_without_protection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "lightning_adpsgd.transport.links.credentials.is_loopback"
    second, dialer = (LinkTransport(info(n), Credentials()) for n in (1, 0))
    listener = second.listen(LOOPBACK, ignore)
    monkeypatch.setattr(module, lambda host: False)
    with pytest.raises(BadCredentials, match="is not a loopback address"):
        dialer.connect(1, listener.address)
    end(listener, dialer, second)


@pytest.mark.parametrize("size", [2, 3])
def test_engines_over_links_keep_the_mean(size: int) -> None:
    rows = random_rows(size, length=5000)
    vectors = [row.clone() for row in rows]
    with linked(size) as transports:
        gossips = engines_over(transports, vectors, "ring", chunk_elements=700)
        with running(gossips):
            together(
                [
                    lambda v=v, g=g: train(v, g)
                    for v, g in zip(vectors, gossips, strict=True)
                ]
            )
            until(lambda: all(g.statistics().exchanges for g in gossips), "exchanges")
    total = torch.stack(vectors).sum(0)
    torch.testing.assert_close(total, rows.sum(0) + 30 * size, atol=1e-10, rtol=0)
    assert not any(name.startswith("adpsgd-a") for name in engine_threads())


def train(vector: Tensor, gossip: Gossip) -> None:
    for _ in range(30):
        gossip.before_update()
        vector.add_(1.0)
        gossip.after_update()


def lockstep(transports: Sequence[Transport]) -> list[Tensor]:
    """Ten rounds of two engines, each with one exchange once both have stepped."""
    vectors = [row.clone() for row in random_rows(2, length=5000)]
    gossips = engines_over(transports, vectors, "complete", chunk_elements=700)
    with running(gossips):
        for number in range(1, 11):
            first = 0 if number.bit_count() % 2 else 1
            for index in (first, 1 - first):
                gossips[index].before_update()
                vectors[index].mul_(1 + 0.1 * index)
                gossips[index].after_update()
            for gossip in gossips:
                until(lambda g=gossip, n=number: g.statistics().exchanges == n, "it")
        settle(gossips)
    return vectors


def test_engines_over_links_do_what_they_do_over_threads() -> None:
    expected = lockstep(ThreadTransport.connect(2))
    with linked(2) as transports:
        got = lockstep(transports)
    assert torch.equal(torch.stack(got), torch.stack(expected))
