"""Messages over one connection: both ways, in pieces, to the end or to a named loss."""

import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.transport.links.connection import (
    Connection,
    check_header,
    make_header,
)
from tests.helpers import PATIENCE, PATIENCE_S, together
from tests.transport.links.ends import tcp_pair

SHORT = timedelta(seconds=0.1)
MANY = 1 << 20


@contextmanager
def connected() -> Iterator[tuple[Connection, Connection]]:
    with tcp_pair() as (first, second):
        ends = Connection(first, 1), Connection(second, 0)
        yield ends
        for end in ends:
            end.break_off("the test is over")


@contextmanager
def half() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection whose other end the test plays."""
    with tcp_pair() as (first, second):
        connection = Connection(first, 1)
        yield connection, second
        connection.break_off("the test is over")


def test_two_ends_that_both_wait_for_their_send_first_do_not_block() -> None:
    """Messages of 32 MB: more than any buffer of a kernel takes."""
    sent = torch.arange(2 * 4 * MANY).view(2, -1)

    def cross(end: Connection, index: int) -> torch.Tensor:
        into = torch.empty_like(sent[0])
        receive, send = end.post_receive(into), end.post_send(sent[index])
        send.wait(PATIENCE)
        receive.wait(PATIENCE)
        return into

    with connected() as (first, second):
        got = together([lambda: cross(first, 0), lambda: cross(second, 1)])
    assert torch.equal(got[0], sent[1])
    assert torch.equal(got[1], sent[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("length", [0, 1, 1000, 3000])
def test_a_message_arrives_as_it_is(dtype: torch.dtype, length: int) -> None:
    sent, into = torch.arange(length).to(dtype), torch.empty(length, dtype=dtype)
    with connected() as (first, second):
        first.post_send(sent).wait(PATIENCE)
        second.post_receive(into).wait(PATIENCE)
    assert torch.equal(into, sent)


def test_messages_keep_their_order_and_those_not_waited_for_move_as_well() -> None:
    rows = torch.randn(5, 10_000)
    into = torch.zeros_like(rows)
    with connected() as (first, second):
        sends = [first.post_send(row) for row in rows]
        receives = [second.post_receive(row) for row in into]
        together(
            [lambda: sends[-1].wait(PATIENCE), lambda: receives[-1].wait(PATIENCE)]
        )
        for posted in (*sends, *receives):
            posted.wait(timedelta(0))
    assert torch.equal(into, rows)


def test_a_message_may_come_byte_by_byte() -> None:
    sent = torch.tensor([1.5, -2.0])
    frame = make_header(8) + sent.numpy().tobytes()
    into = torch.zeros(2)
    with half() as (connection, other):
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        receive = connection.post_receive(into)
        for byte in frame:
            with pytest.raises(PeerLost, match="was not done within"):
                receive.wait(timedelta(0))
            other.sendall(bytes([byte]))
        receive.wait(PATIENCE)
    assert torch.equal(into, sent)


def test_a_message_leaves_before_anybody_waits_for_it() -> None:
    sent = torch.tensor([1.5, -2.0])
    with half() as (connection, other):
        other.settimeout(PATIENCE_S)
        connection.post_send(sent)
        frame = other.recv(100)
    assert frame == make_header(8) + sent.numpy().tobytes()


def test_a_wait_that_timed_out_does_no_harm() -> None:
    into, sent = torch.zeros(1), torch.ones(1)
    with connected() as (first, second):
        receive = first.post_receive(into)
        with pytest.raises(
            PeerLost, match=r"lost super-learner 1 while receiving from it: "
        ):
            receive.wait(SHORT)
        second.post_send(sent).wait(PATIENCE)
        receive.wait(PATIENCE)
    assert into.item() == 1


def test_a_frame_of_another_size_is_refused_with_both_sizes() -> None:
    into = torch.zeros(4)
    with half() as (connection, other):
        other.sendall(make_header(1 << 62) + b"\xff" * 16)
        with pytest.raises(PeerLost, match=rf"has {1 << 62} bytes, 16 expected"):
            connection.post_receive(into).wait(PATIENCE)
    assert not into.any()


def test_a_stream_that_is_out_of_step_is_refused() -> None:
    with half() as (connection, other):
        other.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(PeerLost, match=r"out of step.*'GET '"):
            connection.post_receive(torch.zeros(1)).wait(PATIENCE)


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 40])
def test_a_header_is_accepted_for_its_size_alone(num_bytes: int) -> None:
    check_header(make_header(num_bytes), num_bytes)
    with pytest.raises(ConnectionError, match=rf"{num_bytes} bytes, "):
        check_header(make_header(num_bytes), num_bytes + 1)


def closed(other: socket.socket) -> None:
    other.close()


def half_closed(other: socket.socket) -> None:
    other.shutdown(socket.SHUT_WR)


def reset(other: socket.socket) -> None:
    linger = struct.pack("ii", 1, 0)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    other.close()


@pytest.mark.parametrize("end", [closed, half_closed, reset])
@pytest.mark.parametrize("partly", [b"", make_header(4000)[:5], make_header(4000) * 9])
def test_an_end_that_goes_is_noticed_at_once_at_any_point(
    end: Callable[[socket.socket], None], partly: bytes
) -> None:
    with half() as (connection, other):
        receive = connection.post_receive(torch.zeros(1000))
        other.sendall(partly)
        end(other)
        for _ in range(2):  # and stays so
            with pytest.raises(PeerLost, match=r"lost super-learner 1 while receiving"):
                receive.wait(timedelta(minutes=5))


def test_a_send_to_an_end_that_has_gone_is_a_loss() -> None:
    with half() as (connection, other):
        other.close()
        with pytest.raises(PeerLost, match="while sending"):  # noqa: PT012
            for _ in range(3):
                connection.post_send(torch.zeros(MANY)).wait(timedelta(minutes=5))


def test_what_had_arrived_before_the_end_went_is_received() -> None:
    sent, into = torch.randn(100), torch.zeros(100)
    with connected() as (first, second):
        first.post_send(sent).wait(PATIENCE)
        first.break_off("it has left")
        second.post_receive(into).wait(PATIENCE)
        with pytest.raises(PeerLost, match="has closed"):
            second.post_receive(into).wait(PATIENCE)
    assert torch.equal(into, sent)


def test_a_connection_that_is_broken_off_wakes_who_waits() -> None:
    told: list[bool] = []
    with tcp_pair() as (first, _):
        connection = Connection(first, 7, lambda: told.append(True))
        receive = connection.post_receive(torch.zeros(1))
        waits = threading.Event()

        def wait() -> str:
            waits.set()
            with pytest.raises(PeerLost) as lost:
                receive.wait(timedelta(minutes=5))
            return str(lost.value)

        def break_off() -> str:
            waits.wait(PATIENCE_S)
            connection.break_off("the ring has closed around it")
            return ""

        reason, _ = together([wait, break_off])
        assert "super-learner 7" in reason
        assert "the ring has closed around it" in reason
        assert told == [True]
        with pytest.raises(PeerLost, match="ring has closed"):
            connection.post_send(torch.zeros(1))


def test_a_signal_in_the_middle_of_a_wait_is_no_error() -> None:
    heard, into = threading.Event(), torch.zeros(1)
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    try:
        with connected() as (first, second):
            here = threading.main_thread().ident
            assert here is not None

            def interrupt() -> None:
                signal.pthread_kill(here, signal.SIGUSR1)
                assert heard.wait(PATIENCE_S)
                second.post_send(torch.ones(1)).wait(PATIENCE)

            other = threading.Thread(target=interrupt)
            other.start()
            first.post_receive(into).wait(PATIENCE)
            other.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert into.item() == 1


def test_a_link_that_is_cut_is_a_loss_though_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "lightning_adpsgd.transport.links.connection.is_cut",
        lambda sock, waited_s: True,
    )
    with (
        half() as (connection, _),
        pytest.raises(PeerLost, match="the link is cut") as lost,
    ):
        connection.post_receive(torch.zeros(1)).wait(timedelta(minutes=5))
    assert lost.value.evidence == "silence"


def test_a_slow_reader_holds_the_sender_and_nothing_else() -> None:
    with half() as (connection, other):
        send = connection.post_send(torch.zeros(16 * MANY))
        with pytest.raises(PeerLost, match=r"within 0\.1 s"):
            send.wait(SHORT)
        reader = threading.Thread(target=read_all, args=(other, 64 * MANY))
        reader.start()
        send.wait(PATIENCE)
        reader.join()


def read_all(sock: socket.socket, num_bytes: int) -> None:
    sock.settimeout(PATIENCE_S)
    while num_bytes > 0:
        num_bytes -= len(sock.recv(1 << 16))


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4).T[1:], torch.zeros(4)[::2]])
def test_only_contiguous_tensors_are_taken(tensor: torch.Tensor) -> None:
    with (
        connected() as (first, _),
        pytest.raises(ValueError, match="contiguous tensors in host memory"),
    ):
        first.post_send(tensor)


def test_no_reader_is_woken_later_than_the_last_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_for = list[int]()
    monkeypatch.setattr(
        "lightning_adpsgd.transport.links.connection.wake_after",
        lambda sock, num_bytes: asked_for.append(num_bytes),
    )
    with half() as (connection, other):
        receive = connection.post_receive(torch.zeros(2))
        for sent in (b"", make_header(8), b"12345"):
            other.sendall(sent)
            with pytest.raises(PeerLost, match="was not done within"):
                receive.wait(timedelta(milliseconds=10))
    assert (asked_for[0], asked_for[-1]) == (12, 3)


CONNECTION = "lightning_adpsgd.transport.links.connection"


def test_who_waits_is_woken_by_a_message_and_not_by_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests = threading.Event()
    monkeypatch.setattr(f"{CONNECTION}._SECONDS_BETWEEN_CHECKS", 1000.0)
    monkeypatch.setattr(f"{CONNECTION}.wake_after", lambda *_: rests.set())
    into = torch.zeros(2)
    with connected() as (first, second):

        def send() -> None:
            assert rests.wait(PATIENCE_S)
            first.post_send(torch.ones(2)).wait(PATIENCE)

        begin = time.monotonic()
        together([send, lambda: second.post_receive(into).wait(PATIENCE)])
        assert time.monotonic() - begin < PATIENCE_S / 2
    assert into.tolist() == [1.0, 1.0]


def test_who_waits_rests_whatever_it_has_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    polls, poll = list[object](), select.poll
    monkeypatch.setattr(
        f"{CONNECTION}.select.poll", lambda: polls.append(poll()) or polls[-1]
    )
    with half() as (connection, other):
        other.sendall(make_header(8))  # nobody has posted its receive
        send = connection.post_send(torch.zeros(1 << 24))
        with pytest.raises(PeerLost, match="was not done within"):
            send.wait(timedelta(seconds=0.3))
    assert 1 <= len(polls) <= 9, len(polls)


def test_the_first_reason_of_a_break_is_the_one_that_is_told() -> None:
    with connected() as (first, _):
        first.break_off("this end has left")
        first.break_off("again")
        first._fail("nothing is acknowledged", "silence")
        with pytest.raises(PeerLost, match="this end has left") as lost:
            first.post_send(torch.zeros(1))
    assert lost.value.evidence == ""


def test_nothing_is_left_open() -> None:
    with tcp_pair() as (first, _):
        connection = Connection(first, 1)
        connection.break_off("over")
        connection.break_off("over again")
        assert first.fileno() == -1
