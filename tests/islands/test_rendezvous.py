"""The store of islands: what else is in the process, and who else connects."""

import ctypes
import logging
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

from lightning_adpsgd.islands import rendezvous as rendezvous_module
from lightning_adpsgd.islands.rendezvous import (
    Bounds,
    Rendezvous,
    RendezvousAddress,
    RendezvousUnreachable,
    _close_newest,
    _keep_within,
    serve,
)
from lightning_adpsgd.transport.links.sockets import Address
from tests import warm
from tests.helpers import PATIENCE_S, default_timeout, forked, free_port, until
from tests.islands.archipelago import rendezvous, still_clock

_FIRST_FD_TOO_HIGH_FOR_SELECT = 1024


def test_a_descriptor_above_1023_is_no_obstacle() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * _FIRST_FD_TOO_HIGH_FOR_SELECT:
        pytest.skip("this system gives too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    with ExitStack() as stack:
        for _ in range(_FIRST_FD_TOO_HIGH_FOR_SELECT):
            stack.enter_context(socket.socket())
        # Made before them, the server would give low numbers back meanwhile.
        server = stack.enter_context(rendezvous())
        client = Rendezvous(server.address, answer_s=PATIENCE_S)
        assert [client.ask(lambda store: store.add("n", 1)) for _ in range(3)] == [
            1,
            2,
            3,
        ]
        assert client._line is not None
        assert client._line.fileno() >= _FIRST_FD_TOO_HIGH_FOR_SELECT
        client.close()


def test_sockets_of_other_families_do_not_end_the_client() -> None:
    """It hangs up on a server that is silent, among all sockets of the process."""
    with ExitStack() as stack:
        if hasattr(socket, "AF_NETLINK"):
            stack.enter_context(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
        for one in socket.socketpair():
            stack.enter_context(one)
        hangs = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = RendezvousAddress("127.0.0.1", hangs.getsockname()[1], "job")
        client = Rendezvous(address, answer_s=0.1)
        with pytest.raises(RendezvousUnreachable, match="no answer within"):
            client.ask(lambda store: store.check(["key"]))
        client.close()


def test_sockets_of_the_process_stay_blocking_whatever_their_default_timeout() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        default_timeout(1.0),
        socket.create_connection(server.getsockname()) as one,
    ):
        for blocks in (True, False):
            one.setblocking(blocks)
            rendezvous_module._hang_up_on(("192.0.2.1", 1))
            assert os.get_blocking(one.fileno()) is blocks


def test_a_name_that_is_looked_up_for_long_is_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The resolver is behind the cut, too: who waited for it counted as stopped."""
    found, connect = threading.Event(), rendezvous_module.connect
    in_time = list[bool]()

    def looks_up(address: Address) -> socket.socket:
        in_time.append(found.wait(PATIENCE_S))
        return connect(address)

    monkeypatch.setattr(rendezvous_module, "connect", looks_up)
    with rendezvous() as server:
        client = Rendezvous(server.address, answer_s=0.05)
        with pytest.raises(RendezvousUnreachable, match=r"no answer within 0.05 s"):
            client.ask(lambda store: store.check(["key"]))
        found.set()
        until(lambda: _answers(client), "an answer")
        assert all(in_time)
        client.close()


def test_a_store_that_comes_late_serves_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's client looks up the name of the other end, which may take seconds."""
    found, made = threading.Event(), list[TCPStore]()

    def connects(*place: Any, **options: Any) -> TCPStore:
        assert found.wait(PATIENCE_S)
        made.append(TCPStore(*place, **options))
        return made[-1]

    with rendezvous() as server:
        monkeypatch.setattr(rendezvous_module, "TCPStore", connects)
        client = Rendezvous(server.address, answer_s=0.05)
        for _ in range(2):
            with pytest.raises(RendezvousUnreachable, match=r"no answer within 0.05 s"):
                client.ask(lambda store: store.check(["key"]))
        found.set()
        until(lambda: _answers(client), "an answer")
        assert len(made) == 1
        client.close()


def test_a_client_that_could_not_connect_tries_for_twice_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to a bound, and from the beginning once it has connected."""
    waited = list[float]()

    def connects(*place: Any, timeout: timedelta, **options: Any) -> TCPStore:
        waited.append(timeout.total_seconds())
        if len(waited) in (8, 9):
            return TCPStore(*place, timeout=timeout, **options)
        raise DistNetworkError("timed out")

    with rendezvous() as server:
        monkeypatch.setattr(rendezvous_module, "TCPStore", connects)
        client = Rendezvous(server.address, answer_s=PATIENCE_S)
        until(lambda: _answers(client), "an answer")
        client.close()
        assert _answers(client)
        client.close()
    assert waited == [1, 2, 4, 8, 16, 32, 32, 32, 1]


def test_the_process_of_a_rendezvous_asks_no_name_server() -> None:
    """torch's server looks up each client's name: one that is slow stops all others."""

    def program(rank: int) -> tuple[bool, list[Any]]:
        real, asked = ctypes.CDLL, list[Any]()

        def library(name: None) -> Any:
            configure = real(name)["__nss_configure_lookup"]
            note = partial(_noted, asked, configure)
            return SimpleNamespace(__nss_configure_lookup=note)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ctypes, "CDLL", library)
            rendezvous_module._ask_no_name_server()
        return bool(socket.getaddrinfo("localhost", 80)), asked

    if not hasattr(ctypes.CDLL(None), "__nss_configure_lookup"):
        pytest.skip("this system has no glibc")
    assert forked(1, program)[0].value == (True, [(b"hosts", b"files", 0)])


def _noted(asked: list[Any], configure: Any, *words: bytes) -> None:
    asked.append((*words, configure(*words)))


def test_the_store_is_asked_at_the_address_of_a_name_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch would try the first one alone, which may be down."""
    connect = rendezvous_module.connect
    with rendezvous() as server:
        place = Address(server.address.host, server.address.port)
        monkeypatch.setattr(rendezvous_module, "connect", lambda _: connect(place))
        address = server.address._replace(host="a-name.invalid")
        client = Rendezvous(address, answer_s=PATIENCE_S)
        assert client.ask(lambda store: store.add("n", 1)) == 1
        client.close()


def test_jobs_of_one_rendezvous_share_nothing() -> None:
    with rendezvous() as server, ExitStack() as stack:
        for job in ("one", "other"):
            client = Rendezvous(server.address._replace(job=job), PATIENCE_S)
            stack.callback(client.close)
            assert client.ask(lambda store: store.add("n", 1)) == 1


def test_the_reason_of_an_outage_is_the_first_line_of_what_torch_says() -> None:
    """Behind it come pages of frames."""

    def fail(store: object) -> None:
        raise DistNetworkError("Connection reset by peer\nException raised from\n...")

    with rendezvous() as server:
        client = Rendezvous(server.address, PATIENCE_S)
        with pytest.raises(RendezvousUnreachable, match=r"^Connection reset by peer$"):
            client.ask(fail)
        assert client._line is None
        client.close()


def test_the_line_to_the_store_notices_a_lost_host_and_is_closed() -> None:
    with rendezvous() as server:
        client = Rendezvous(server.address, PATIENCE_S)
        for _ in range(2):  # it can be used again
            assert _answers(client)
            line = client._line
            assert line is not None
            assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            client.close()
            assert line.fileno() == -1


def test_a_flood_does_not_take_the_places_of_those_who_are_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    stop, port = threading.Event(), free_port()
    bounds = Bounds(connections=12, of_address=8, look_s=0.02)
    thread = threading.Thread(target=serve, args=("127.0.0.1", port, stop, bounds))
    thread.start()
    client = Rendezvous(RendezvousAddress("127.0.0.1", port, "job"), PATIENCE_S)
    until(lambda: _answers(client), "the rendezvous")
    with ExitStack() as stack:
        flood = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(40)
        ]
        until(lambda: sum(map(_is_closed, flood)) >= 34, "closed connections")
        assert _answers(client)
        until(lambda: "of one address" in caplog.text, "a warning")
    client.close()
    stop.set()
    thread.join(PATIENCE_S)


def test_a_flood_is_told_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    flood = [(inode, "192.0.2.1", 4242) for inode in range(99)], set[Any]()
    monkeypatch.setattr(rendezvous_module, "_connections_at", lambda port: flood)
    monkeypatch.setattr(rendezvous_module, "_sockets", lambda: [])
    clock = still_clock(monkeypatch, rendezvous_module)

    def wait(seconds: float) -> bool:
        clock.now += seconds
        return clock.now > 280.0

    over: Any = SimpleNamespace(wait=wait)
    _keep_within(free_port(), Bounds(1, 1), over)
    told = [one.message for one in caplog.records if "of one address" in one.message]
    assert len(told) == 3
    assert told[0].startswith("closed 98 connections")


def test_its_own_connection_is_the_last_to_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(inode, "127.0.0.1", 4000 + inode) for inode in range(3)]
    ends = found, {("127.0.0.1", 4001)}
    monkeypatch.setattr(rendezvous_module, "_connections_at", lambda port: ends)
    monkeypatch.setattr(rendezvous_module, "_sockets", lambda: [])
    assert _close_newest(80, {2}, Bounds(1, 1)) == ({1}, 2)
    assert _close_newest(80, {2}, Bounds(2, 2)) == ({1, 2}, 1)


def test_a_connection_that_came_after_the_look_is_not_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be the store's own."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(3)]
        for one in (end for pair in pairs for end in pair):
            stack.enter_context(one)
        kept, beyond, late = (near for near, _ in pairs)
        inodes = [os.fstat(one.fileno()).st_ino for one in (kept, beyond)]
        ends = [(inode, "10.0.0.1", 4000) for inode in inodes], set[tuple[str, int]]()
        monkeypatch.setattr(rendezvous_module, "_connections_at", lambda port: ends)
        monkeypatch.setattr(rendezvous_module, "_sockets", lambda: [kept, beyond, late])
        assert _close_newest(80, set(), Bounds(1, 1)) == ({inodes[0]}, 1)
        assert [_is_closed(far) for _, far in pairs] == [False, True, False]


def _answers(client: Rendezvous) -> bool:
    try:
        return client.ask(lambda store: store.add("n", 1)) > 0
    except RendezvousUnreachable:
        return False


def _is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_it_listens_at_the_interface_that_was_named_alone() -> None:
    with rendezvous() as server:
        for host in ("127.0.0.2", "::1"):
            with pytest.raises(OSError, match=r"refused|assign"):
                socket.create_connection((host, server.address.port), 1).close()


@contextmanager
def served(host: str) -> Iterator[int]:
    """The port of a rendezvous that listens at a host."""
    stop, ready, port = threading.Event(), threading.Event(), free_port()
    thread = threading.Thread(
        target=lambda: serve(host, port, stop, on_ready=lambda _: ready.set()),
        daemon=True,
    )
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield port
    finally:
        stop.set()
        thread.join(PATIENCE_S)


def _is_served(host: str, port: int) -> bool:
    client = Rendezvous(RendezvousAddress(host, port, "job"), PATIENCE_S)
    try:
        return _answers(client)
    finally:
        client.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="a host of IPv4 alone")
def test_without_a_host_it_listens_at_ipv4_and_ipv6() -> None:
    with served("") as port:
        assert _is_served("127.0.0.1", port)
        assert _is_served("::1", port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="a host of IPv4 alone")
@pytest.mark.parametrize("has_ipv4", [False, True])
def test_a_name_is_listened_at_by_the_family_that_it_has(
    monkeypatch: pytest.MonkeyPatch, has_ipv4: bool
) -> None:
    look_up = socket.getaddrinfo
    places = [(socket.AF_INET6, "::1"), *([(socket.AF_INET, "127.0.0.1")] * has_ipv4)]

    def found(host: str, port: int, *further: Any, **named: Any) -> list[Any]:
        if host != "a-name.invalid":
            return look_up(host, port, *further, **named)
        stream = socket.SOCK_STREAM, 6, ""
        return [(family, *stream, (place, port)) for family, place in places]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with served("a-name.invalid") as port:
        assert _is_served("127.0.0.1" if has_ipv4 else "::1", port)


def test_a_host_that_is_busy_for_a_second_ends_no_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own client waited for one second, and the rendezvous ended at its start."""
    timeouts, store_at = list[timedelta](), rendezvous_module.store_at

    def timed(*place: Any, timeout: timedelta, **options: Any) -> TCPStore:
        timeouts.append(timeout)
        return store_at(*place, timeout=timeout, **options)

    monkeypatch.setattr(rendezvous_module, "store_at", timed)
    with served("127.0.0.1"):
        assert timeouts == [timedelta(minutes=1)]


_SERVE_WITH_FEW_DESCRIPTORS = """
import resource, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
from lightning_adpsgd.islands.rendezvous import serve
serve("127.0.0.1", {}, threading.Event())
"""


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="its server ends (store.store_at)"
)
def test_a_flood_beyond_the_descriptors_ends_no_rendezvous() -> None:
    port = free_port()
    server = subprocess.Popen(
        [warm.python(), "-c", _SERVE_WITH_FEW_DESCRIPTORS.format(port)]
    )
    client = Rendezvous(RendezvousAddress("127.0.0.1", port, "job"), PATIENCE_S)
    try:
        until(lambda: _answers(client), "the rendezvous")
        with ExitStack() as stack:
            flood = [stack.enter_context(socket.socket()) for _ in range(240)]
            for one in flood:
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            until(lambda: sum(map(_is_closed, flood)) > 100, "closed connections")
            assert _answers(client)
            assert server.poll() is None
    finally:
        client.close()
        server.kill()
        server.wait()


_SERVE_AFTER_A_FLOOD = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
from lightning_adpsgd.islands import rendezvous
store_at = rendezvous.store_at
def late(*place, **options):
    sys.stdin.readline()
    return store_at(*place, **options)
rendezvous.store_at = late
ready = lambda found: print("ready", flush=True)
rendezvous.serve("127.0.0.1", {}, threading.Event(), on_ready=ready)
"""


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="its server ends (store.store_at)"
)
def test_a_flood_before_its_own_connection_ends_no_rendezvous() -> None:
    """Which waited for a descriptor, and nobody closed one meanwhile."""
    port, pipe = free_port(), subprocess.PIPE
    program = [warm.python(), "-c", _SERVE_AFTER_A_FLOOD.format(port)]
    with (
        subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True) as server,
        ExitStack() as stack,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        stack.callback(server.kill)
        until(lambda: _listens(port), "the socket")
        flood = [stack.enter_context(socket.socket()) for _ in range(120)]
        for one in flood:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        server.stdin.write("\n")
        server.stdin.flush()
        assert server.stdout.readline() == "ready\n"
        until(lambda: sum(map(_is_closed, flood)) > 80, "closed connections")


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_the_bounds_leave_room_for_other_files() -> None:
    assert Bounds(4096, 1024).within(1 << 20) == Bounds(4096, 1024)
    assert Bounds(4096, 1024).within(1024) == Bounds(960, 240)
    assert Bounds(4096, 1024).within(16) == Bounds(1, 1)
