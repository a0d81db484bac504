"""The listener: few at a time, each for a short time, whatever comes."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from lightning_adpsgd.transport.links import listener as bounds
from lightning_adpsgd.transport.links.listener import Listener
from lightning_adpsgd.transport.links.sockets import Address, Deadline
from tests.helpers import PATIENCE_S, default_timeout, until
from tests.transport.links.ends import LOOPBACK

Welcome = Callable[[socket.socket, Deadline], None]


@contextmanager
def listening(welcome: Welcome, address: Address = LOOPBACK) -> Iterator[Listener]:
    listener = Listener(address, welcome)
    listener.start()
    try:
        yield listener
    finally:
        listener.close()


def dial(listener: Listener) -> socket.socket:
    return socket.create_connection(listener.address, timeout=20)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_listens_at_its_address_and_nowhere_else(host: str) -> None:
    welcomed: list[socket.socket] = []
    address = Address(host, 0)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, 0), family=family).close()
    except OSError:
        pytest.skip("this host has no such address")
    with listening(lambda sock, _: welcomed.append(sock), address=address) as listener:
        assert listener.address.host == host
        with dial(listener):
            until(lambda: len(welcomed) == 1, "the connection")
        welcomed[0].close()
        for elsewhere in {"127.0.0.1", "127.0.0.2", "::1"} - {host}:
            with pytest.raises(OSError, match=r"refused|unreachable|assign"):
                socket.create_connection((elsewhere, listener.address.port), 20)


def test_an_address_must_be_named() -> None:
    with pytest.raises(OSError, match="not known"):
        Listener(Address("", 0), lambda sock, deadline: None).start()


def hold(held: list[socket.socket], gate: threading.Event) -> Welcome:
    def welcome(sock: socket.socket, deadline: Deadline) -> None:
        held.append(sock)
        assert gate.wait(PATIENCE_S)
        raise RuntimeError("nothing was said")

    return welcome


@pytest.mark.parametrize("bound", ["MOST_PENDING", "MOST_OF_ADDRESS"])
def test_a_flood_takes_no_more_than_its_places(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, bound, 3)
    held: list[socket.socket] = []
    gate = threading.Event()
    with listening(hold(held, gate)) as listener, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(dial(listener))
        until(lambda: listener.turned_away["full"] == 17, "the flood")
        assert len(held) == 3
        gate.set()
        until(lambda: listener.turned_away["RuntimeError"] == 3, "their end")
        before = len(held)
        stack.enter_context(dial(listener))
        until(lambda: len(held) == before + 1, "the next one")


def test_one_who_says_nothing_is_turned_away_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "HANDSHAKE_S", 0.1)

    def welcome(sock: socket.socket, deadline: Deadline) -> None:
        sock.settimeout(deadline.left())
        sock.recv(1)

    with listening(welcome) as listener, dial(listener) as sock:
        until(lambda: listener.turned_away["TimeoutError"] == 1, "the end of its time")
        assert sock.recv(1) == b""


def test_an_error_of_this_process_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as too many open files: it goes on after a pause, and counts."""
    accept, left, pauses = socket.socket.accept, [3], list[float | None]()

    def accepts_at_last(sock: socket.socket) -> object:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(sock)

    welcomed: list[socket.socket] = []
    listener = Listener(LOOPBACK, lambda sock, _: welcomed.append(sock))
    monkeypatch.setattr(socket.socket, "accept", accepts_at_last)
    monkeypatch.setattr(listener._closing, "wait", pauses.append)
    listener.start()
    with dial(listener):
        until(lambda: len(welcomed) == 1, "the connection")
    assert listener.turned_away["accept"] == 3
    listener.close()
    assert all(pause is not None and pause > 0 for pause in pauses[:3])
    welcomed[0].close()


def test_a_thread_that_the_system_refuses_takes_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, welcomed = threading.Thread.start, list[socket.socket]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "adpsgd-greet":
            raise RuntimeError("can't start new thread")
        start(thread)

    with listening(lambda sock, _: welcomed.append(sock)) as listener:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with dial(listener) as sock:
                assert sock.recv(1) == b""
        until(lambda: listener.turned_away["RuntimeError"] == 1, "its notice")
        assert listener._pending == {}
        with dial(listener):
            until(lambda: len(welcomed) == 1, "the next one")
    welcomed[0].close()


def test_it_waits_whatever_the_default_timeout_of_sockets() -> None:
    welcomed: list[socket.socket] = []
    with (
        default_timeout(0.05),
        listening(lambda sock, _: welcomed.append(sock)) as listener,
    ):
        time.sleep(0.2)
        with dial(listener):
            until(lambda: len(welcomed) == 1, "the connection")
        assert not listener.turned_away
    welcomed[0].close()


def test_a_listener_takes_the_place_of_one_before_it_at_once() -> None:
    """Though connections that it has closed are remembered for a while."""

    def welcome(sock: socket.socket, deadline: Deadline) -> None:
        sock.close()

    address = LOOPBACK
    for _ in range(2):
        with listening(welcome, address=address) as listener:
            address = listener.address
            with dial(listener) as sock:
                assert sock.recv(1) == b""


def test_closing_ends_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HANDSHAKE_S", 300.0)
    came = threading.Event()

    def welcome(sock: socket.socket, deadline: Deadline) -> None:
        came.set()
        sock.settimeout(deadline.left())
        if not sock.recv(1):
            raise ConnectionResetError("closed")

    with listening(welcome) as listener, dial(listener):
        assert came.wait(PATIENCE_S)
    names = [thread.name for thread in threading.enumerate()]
    assert not {"adpsgd-listen", "adpsgd-greet"} & set(names)


def test_a_flood_fills_no_disk(caplog: pytest.LogCaptureFixture) -> None:
    def welcome(sock: socket.socket, deadline: Deadline) -> None:
        raise RuntimeError("nonsense")

    with listening(welcome) as listener:
        for number in range(20):
            with dial(listener) as sock:
                assert sock.recv(1) == b""
            until(lambda n=number: listener.turned_away["RuntimeError"] == n + 1, "it")
    numbers = [args[3] for r in caplog.records if isinstance(args := r.args, tuple)]
    assert numbers == [1, 2, 4, 8, 16]
