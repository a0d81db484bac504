"""The rendezvous of islands: a key-value store that may come and go.

The store is torch's, served by a small separate process (`serve`). It holds the member
list, heartbeats and, with `work_sharing`, the ledgers of epochs. Training needs none of
these, so it can be killed and restarted empty at any time. A torch client raises on
every use once its server has gone; `Rendezvous` then makes a new one. A torch client
also waits forever for a server that hangs, so `TimedCalls` uses it in a separate
thread. This module does not decide who is alive.
"""

import ctypes
import logging
import math
import os
import re
import resource
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from lightning_adpsgd.coordination.store import store_at
from lightning_adpsgd.islands.signatures import Signatures
from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.sockets import Address, connect, tune
from lightning_adpsgd.transport.network_interfaces import ip_address
from lightning_adpsgd.weights.worker import CallTimedOut, TimedCalls

T = TypeVar("T")
_log = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "LIGHTNING_ADPSGD_ISLANDS"
"""Used where `islands=` is not given."""

# Shorter than the silence after which a member counts as dead.
_ANSWER_S = 2.0
# The least time between two warnings, so that a flood fills no disk.
_QUIET_S = 60.0
_NO_CREDENTIALS = Credentials()
# How long a client tries to connect, twice as long each time. torch also looks up the
# name of the other end, and a name server may not answer.
_CONNECT, _LONGEST_CONNECT = timedelta(seconds=1), timedelta(seconds=32)
# The same for the server's own client: a busy host is no reason to end.
_OWN_CONNECT = timedelta(minutes=1)
_JOB = re.compile(r"[A-Za-z0-9._-]{1,64}")
_AS_NUMBERS = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
_borrowing = threading.Lock()


class RendezvousUnreachable(Exception):
    """The store is currently unreachable."""


class RendezvousAddress(NamedTuple):
    """The address of the store, and the job whose islands meet there.

    Attributes:
        job: name of the job; islands with the same name train together.
    """

    host: str
    port: int
    job: str

    @classmethod
    def parse(cls, url: str) -> "RendezvousAddress":
        """Reads ``tcp://host:port`` or ``tcp://host:port/job``; else a ValueError."""
        parts = urlsplit(url)
        with suppress(ValueError):
            job = parts.path.strip("/") or "job"
            plain = not (parts.query or parts.fragment or parts.username)
            is_url = parts.scheme == "tcp" and plain and _JOB.fullmatch(job)
            if is_url and parts.hostname and parts.port:
                return cls(parts.hostname, parts.port, job)
        raise ValueError(
            "`islands` must be tcp://host:port or tcp://host:port/job, with a job name "
            f"of at most 64 letters, digits and . _ -, got {url!r}"
        )

    def __str__(self) -> str:
        return f"tcp://{Address(self.host, self.port)}/{self.job}"


class Rendezvous:
    """A client of the store that finds a restarted server; for one thread at a time.

    No request takes longer than some seconds. A late one counts as an outage, which
    ends when its answer comes. A second connection, over which nothing is sent,
    distinguishes a server that hangs from one that has gone: it closes when the
    server's process ends, and soon after the link is cut.

    Args:
        answer_s: longest time for the answer to one request, in seconds.

    Attributes:
        signatures: signer and verifier of this job's texts.
    """

    def __init__(
        self,
        address: RendezvousAddress,
        answer_s: float = _ANSWER_S,
        credentials: Credentials = _NO_CREDENTIALS,
    ) -> None:
        self.address, self._answer_s = address, answer_s
        self._host = address.host
        self.signatures = Signatures(credentials, address.job)
        self._store: Store | None = None
        self._line: socket.socket | None = None
        self._calls = TimedCalls("adpsgd-rendezvous")
        self._server: tuple[str, int] | None = None
        self._patience = _CONNECT

    def ask(self, action: Callable[[Store], T]) -> T:
        """Runs an action on the store of this job, and returns its result.

        Raises:
            RendezvousUnreachable: The server cannot be reached, was replaced since the
                last call, or does not answer in time; the next call tries again.
        """
        try:
            return action(self._connected())
        except CallTimedOut as error:
            reason = f"no answer within {self._answer_s:g} s"
            raise RendezvousUnreachable(reason) from error
        except (OSError, DistError) as error:
            self.close()
            raise RendezvousUnreachable(str(error).partition("\n")[0]) from error

    def close(self) -> None:
        """Closes the connection; the next use makes a new one."""
        if self._line is not None:
            if not self._calls.await_last(0.0):
                _hang_up_on(self._server)
            self._line.close()
        self._calls.stop()
        self._store = self._line = None

    def _connected(self) -> Store:
        # torch prints a trace when it finds a closed connection, so check ours first.
        if self._line is not None and _is_readable(self._line):
            raise ConnectionError("the server has closed the connection")
        if self._line is None:
            self._in_time(self._make_line)
        if self._store is None:
            self._in_time(self._make_store)
        assert self._store is not None
        return self._store

    def _make_line(self) -> None:
        # A look-up of the name has no time limit: a late line serves the next request.
        if self._line is not None:
            return
        line = connect(Address(self.address.host, self.address.port))
        tune(line)
        place = line.getpeername()
        # The one of a name's addresses that answers, with its zone: torch would spend
        # all its time on the first of them.
        self._host, _ = socket.getnameinfo(place, _AS_NUMBERS)
        self._server, self._line = _host_and_port(place), line

    def _make_store(self) -> None:
        # As with a line, a late one serves the next request.
        if self._store is not None:
            return
        line, patience = self._line, self._patience
        self._patience = min(2 * patience, _LONGEST_CONNECT)
        plain = TCPStore(
            self._host,
            self.address.port,
            timeout=patience,
            is_master=False,
            wait_for_workers=False,
        )
        plain.set_timeout(_CONNECT)
        self._patience = _CONNECT
        store = PrefixStore(f"islands/{self.address.job}", plain)
        if self._line is line:  # else it has been closed meanwhile
            self._store = cast(Store, _TimedStore(store, self._in_time))

    def _in_time(self, action: Callable[[], T]) -> T:
        return self._calls.run(action, self._answer_s)


class _TimedStore:
    """A store whose operations finish in time or raise `CallTimedOut`."""

    def __init__(
        self, store: Store, in_time: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._store, self._in_time = store, in_time

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)
        return lambda *words: self._in_time(partial(method, *words))


def _is_readable(sock: socket.socket) -> bool:
    # Not `select`, which takes no descriptor above 1023.
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _hang_up_on(server: tuple[str, int] | None) -> None:
    """Shuts down all connections of this process with a server.

    Only this makes torch's client stop waiting.
    """
    for sock in _sockets():
        with suppress(OSError):
            if _host_and_port(sock.getpeername()) == server:
                sock.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """The internet sockets of this process, one at a time; they stay open."""
    for number in _descriptors():
        with suppress(OSError), _borrowed(number) as sock:
            # Others, such as those of netlink, have names of other forms.
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                yield sock


def _descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        # No descriptor is left to read the folder, so all up to the limit are in use.
        return range(_most_files())


def _most_files() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if most == resource.RLIM_INFINITY else most


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Wraps a descriptor as a socket, without a copy that would need another one."""
    with _borrowing:
        # The program's default timeout for sockets would make torch's non-blocking.
        is_blocking = os.get_blocking(number)
        sock = socket.socket(fileno=number)
        if socket.getdefaulttimeout() is not None:
            os.set_blocking(number, is_blocking)
    try:
        yield sock
    finally:
        sock.detach()


def _host_and_port(name: Any) -> tuple[str, int]:
    host, port = name[:2]
    return str(ip_address(host)), port


class Bounds(NamedTuple):
    """The limits on a rendezvous's connections; the newest beyond them are closed.

    Attributes:
        connections: largest number in total; an island has at most 4 at once.
        of_address: largest number from one address.
        look_s: seconds between two checks.
    """

    connections: int = 4096
    of_address: int = 1024
    look_s: float = 0.25

    def within(self, descriptors: int) -> "Bounds":
        """These limits, or proportionally less if the process may open fewer files."""
        most = min(self.connections, max(1, descriptors - _OTHER_FILES))
        of_address = self.of_address * most // self.connections
        return self._replace(connections=most, of_address=max(1, of_address))


_BOUNDS, _OTHER_FILES = Bounds(), 64


def serve(
    host: str,
    port: int,
    stop: threading.Event,
    bounds: Bounds = _BOUNDS,
    on_ready: Callable[[str], None] = lambda found: None,
    has_process: bool = False,
) -> None:
    """Serves the store from memory until `stop` is set.

    Args:
        host: address or name of the interface to listen at; empty: all interfaces.
        on_ready: called once the store is served, with the address that it listens at.
        has_process: whether nothing else in this process looks up names of hosts.

    Raises:
        OSError: The address is in use, or does not belong to this host.
    """
    # Bounded from the start, because the store itself needs a connection, too.
    with _listener(host, port) as listener, _bounded(port, bounds):
        if has_process:
            _ask_no_name_server()
        found, _ = socket.getnameinfo(listener.getsockname(), _AS_NUMBERS)
        # The store takes over the socket, and closes it in the end.
        store = store_at(
            listener.detach(),
            found if host else "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_OWN_CONNECT,
        )
        on_ready(found)
        stop.wait()
    del store


def _ask_no_name_server() -> None:
    """Makes this process look up names of hosts in /etc/hosts alone.

    torch's server looks up the name of each client, in its only thread: a name server
    that does not answer would keep all islands waiting.
    """
    with suppress(AttributeError, OSError):  # a function of glibc
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


@contextmanager
def _bounded(port: int, bounds: Bounds) -> Iterator[None]:
    """A context in which a thread closes connections beyond the limits."""
    over, most = threading.Event(), bounds.within(_most_files())
    keep_within = partial(_keep_within, port, most, over)
    thread = threading.Thread(target=keep_within, name="adpsgd-bounds", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _keep_within(port: int, bounds: Bounds, over: threading.Event) -> None:
    known, told_at = set[int](), -math.inf
    while not over.wait(bounds.look_s):
        known, num_closed = _close_newest(port, known, bounds)
        now = time.monotonic()
        if num_closed and now - told_at > _QUIET_S:
            told_at = now
            _log.warning(
                "closed %d connections to the rendezvous beyond %d, or beyond %d of "
                "one address",
                *(num_closed, bounds.connections, bounds.of_address),
            )


def _listener(host: str, port: int) -> socket.socket:
    """A listening socket; at an address of IPv4 if a name has some of both kinds."""
    if not host and socket.has_dualstack_ipv6():
        both = {"family": socket.AF_INET6, "dualstack_ipv6": True}
        return socket.create_server(("", port), **both)
    found = socket.getaddrinfo(
        *(host or None, port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, *_, place = min(found, key=lambda one: one[0] != socket.AF_INET)
    return socket.create_server(place, family=family)


def _close_newest(port: int, known: set[int], bounds: Bounds) -> tuple[set[int], int]:
    """Closes connections beyond the limits; keeps the store's own and known ones.

    Returns:
        The inodes of the kept connections, and the number of the closed ones.
    """
    kept, of_address = set[int](), Counter[str]()
    found, own = _connections_at(port)
    found.sort(key=lambda one: (one[1:] not in own, one[0] not in known))
    for inode, host, _ in found:
        is_full = of_address[host] >= bounds.of_address
        if is_full or len(kept) >= bounds.connections:
            continue
        of_address[host] += 1
        kept.add(inode)
    # Not all that are not kept: a new one may be the store's own.
    closed = {inode for inode, *_ in found} - kept
    for sock in _sockets() if closed else ():
        with suppress(OSError):
            if os.fstat(sock.fileno()).st_ino in closed:
                sock.shutdown(socket.SHUT_RDWR)
    return kept, len(closed)


def _connections_at(
    port: int,
) -> tuple[list[tuple[int, str, int]], set[tuple[str, int]]]:
    """Connections that came in at a port, and where this process's own to it begin.

    Those that came in are given by their inodes and their other ends.
    """
    found, own = list[tuple[int, str, int]](), set[tuple[str, int]]()
    for sock in _sockets():
        with suppress(OSError):
            if _is_at(sock, port):
                inode = os.fstat(sock.fileno()).st_ino
                found.append((inode, *_host_and_port(sock.getpeername())))
            elif sock.getpeername()[1] == port:
                own.add(_host_and_port(sock.getsockname()))
    return found, own


def _is_at(sock: socket.socket, port: int) -> bool:
    """Whether a connection came in at a port; raises `OSError` for other sockets."""
    sock.getpeername()
    return sock.getsockname()[1] == port
