"""Addresses, deadlines, and whether a link is cut."""

import errno
import select
import socket
import sys

import pytest

from lightning_adpsgd.transport.links.sockets import (
    _KEEPALIVE,
    Address,
    Deadline,
    connect,
    evidence_of,
    is_cut,
    probe,
    receive_all,
    send_all,
    tune,
    wake_after,
)
from lightning_adpsgd.transport.network_interfaces import is_loopback
from tests.helpers import PATIENCE_S, until
from tests.transport.links.ends import tcp_pair


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host:80", Address("host", 80)),
        ("10.0.0.1:29400", Address("10.0.0.1", 29400)),
        ("[::1]:7", Address("::1", 7)),
    ],
)
def test_an_address_is_read_as_it_is_written(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:port", "host:65536", "::1:7", "[host]:7"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\[host\]:port"):
        Address.parse(text)


@pytest.mark.parametrize("host", ["a..b", ".", "x" * 64, "\udc80"])
def test_what_can_be_no_name_of_a_host_is_not_reached(host: str) -> None:
    """Anyone can write such an address into a rendezvous without a token."""
    error = probe(Address(host, 80))
    assert isinstance(error, OSError)
    assert f"{host!r} cannot be a host's name" in str(error)
    assert evidence_of(error) == ""


def test_a_deadline_passes() -> None:
    assert 0 < Deadline(60).left() <= 60
    with pytest.raises(TimeoutError):
        Deadline(0).left()


def test_less_than_what_was_announced_is_an_error() -> None:
    with tcp_pair() as (first, second):
        first.sendall(b"abc")
        first.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError, match="has closed"):
            receive_all(second, 4, Deadline(PATIENCE_S))


def test_one_who_sends_a_byte_now_and_then_gets_no_more_time() -> None:
    with tcp_pair() as (first, second):
        first.sendall(b"abc")
        with pytest.raises(TimeoutError):
            receive_all(second, 4, Deadline(0.05))


def test_what_a_reader_does_not_take_in_time_is_not_sent() -> None:
    with tcp_pair() as (first, _):
        first.settimeout(1.0)
        with pytest.raises(TimeoutError):
            send_all(first, bytes(1 << 26), Deadline(0.05))
        assert (first.gettimeout() or 1.0) <= 0.05


def test_a_dark_host_costs_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = list[float]()

    def note(address: Address, timeout: float) -> socket.socket:
        seconds.append(timeout)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", note)
    for left in (0.25, 5.0):
        connect(Address("10.0.0.1", 1), left).close()
    assert probe(Address("10.0.0.1", 1)) is None
    assert seconds == [0.25, 1.0, 1.0]


def test_a_silent_host_is_asked_whether_it_is_there() -> None:
    with tcp_pair() as (first, _):
        tune(first)
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        # The defaults ask after two hours.
        for name, value in _KEEPALIVE:
            assert first.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


def test_a_small_message_waits_for_no_other() -> None:
    with tcp_pair() as (first, _):
        tune(first)
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_peer_that_reads_nothing_is_not_cut_off() -> None:
    with tcp_pair() as (first, second):
        tune(first)
        second.setblocking(False)
        first.settimeout(0.05)
        with pytest.raises(TimeoutError):
            first.sendall(bytes(1 << 26))
        assert not is_cut(first, 60.0)


class Reported(socket.socket):
    """What the kernel says of it is given: packets under way, and for how long."""

    under_way, silence_ms = 0, 0

    def getsockopt(self, level: int, option: int, buflen: int = 0) -> bytes:  # type: ignore[override]
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        info = bytearray(buflen)
        info[24:28] = self.under_way.to_bytes(4, sys.byteorder)  # tcpi_unacked
        info[56:60] = self.silence_ms.to_bytes(4, sys.byteorder)  # tcpi_last_ack_recv
        return bytes(info)


@pytest.mark.parametrize(
    ("under_way", "silence_ms", "waited_s", "cut"),
    [
        (3, 2000, 60.0, False),  # a machine may stand still for that long
        (0, 60_000, 60.0, False),
        (1, 2500, 60.0, True),
        (1, 60_000, 2.0, False),  # it was idle, and has just been sent something
        (1, 60_000, 2.5, True),
    ],
)
def test_a_link_that_acknowledges_nothing_is_cut(
    under_way: int, silence_ms: int, waited_s: float, cut: bool
) -> None:
    with Reported() as sock:
        sock.under_way, sock.silence_ms = under_way, silence_ms
        assert is_cut(sock, waited_s) is cut


def test_a_probe_tells_whether_anybody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname())
        assert probe(address) is None
    assert evidence_of(probe(address)) == "refusal"


@pytest.mark.parametrize(
    ("error", "evidence"),
    [
        (TimeoutError("timed out"), "silence"),
        (OSError(errno.EHOSTUNREACH, "no route"), "silence"),
        (OSError(errno.ECONNRESET, "reset"), ""),
        (None, ""),
    ],
)
def test_what_errors_say_about_the_other_end(
    error: OSError | None, evidence: str
) -> None:
    assert evidence_of(error) == evidence


@pytest.mark.parametrize(
    ("host", "leads_back"),
    [
        *(("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True)),
        *(("10.0.0.1", False), ("fe80::1%eth0", False)),
    ],
)
def test_loopback_is_known(host: str, leads_back: bool) -> None:
    assert is_loopback(host) is leads_back


@pytest.mark.skipif(sys.platform != "linux", reason="the dial is Linux's")
def test_a_reader_is_woken_when_enough_is_there_or_nothing_more_will_come() -> None:
    def has_come(sock: socket.socket) -> int:
        return len(sock.recv(100, socket.MSG_PEEK | socket.MSG_DONTWAIT))

    def is_woken(sock: socket.socket, seconds: float = 0.0) -> bool:
        return bool(select.select([sock], [], [], seconds)[0])

    with tcp_pair() as (reader, writer):
        for last in (lambda: writer.send(b"!"), writer.close):
            wake_after(reader, 1)
            writer.send(b"12")
            assert is_woken(reader, PATIENCE_S)
            until(lambda: has_come(reader) == 2, "two bytes")
            wake_after(reader, 3)
            assert not is_woken(reader)
            last()
            assert is_woken(reader, PATIENCE_S)
            reader.recv(100)
