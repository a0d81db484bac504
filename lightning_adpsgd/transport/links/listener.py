"""A bounded listener, which accepts connections and serves each in its own thread."""

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable

from lightning_adpsgd.transport.links.sockets import Address, Deadline, shut_down

_log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Seconds for a handshake, at either end; it takes some round trips."""

# The limits on concurrent handshakes, in total and from one address.
MOST_PENDING, MOST_OF_ADDRESS = 64, 16


class Probe(Exception):
    """The other end only checked whether anything listens."""


class Listener:
    """Listens at one address until it is closed.

    `_lock` guards `_pending` and `turned_away`. `_pending` has the threads that greet a
    connection. The accepting thread adds each with the address of the other end and a
    second handle of the socket, as TLS takes over the first. The thread removes itself.

    Args:
        address: address of an interface of this host; port 0: any free port.
        welcome: called in a thread of its own with a connection, which it owns if it
            returns. Its exception turns the connection away; the log says why, unless
            it is a `Probe`.

    Attributes:
        address: address where it listens, once started.
        turned_away: number of connections turned away, by kind of reason.
    """

    _socket: socket.socket

    def __init__(
        self, address: Address, welcome: Callable[[socket.socket, Deadline], None]
    ) -> None:
        self.address, self.turned_away = address, Counter[str]()
        self._welcome, self._lock = welcome, threading.Lock()
        self._pending: dict[threading.Thread, tuple[str, socket.socket]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept_all, daemon=True)
        self._thread.name = "adpsgd-listen"

    def start(self) -> None:
        """Binds and listens.

        Raises:
            OSError: The address is in use, or does not belong to this host.
        """
        self._socket = _bind(self.address)
        self.address = Address(*self._socket.getsockname()[:2])
        self._thread.start()

    def close(self) -> None:
        """Stops listening, and ends handshakes under way."""
        self._closing.set()
        shut_down(self._socket)
        self._thread.join()
        self._socket.close()
        with self._lock:
            for _, sock in self._pending.values():
                shut_down(sock)
            threads = list(self._pending)
        for thread in threads:
            thread.join()

    def _accept_all(self) -> None:
        while not self._closing.is_set():
            try:
                sock, source = self._socket.accept()
            except OSError as error:
                # An error of this process, such as too many open files; it may pass.
                self._count("accept", "a connection", error)
                self._closing.wait(0.05)
                continue
            try:
                self._receive(sock, source[0])
            except Exception as error:
                # No thread or descriptor is available; that may be temporary too.
                sock.close()
                self._count(type(error).__name__, source[0], error)

    def _receive(self, sock: socket.socket, host: str) -> None:
        deadline = Deadline(HANDSHAKE_S)
        thread = threading.Thread(
            target=self._greet, args=(sock, host, deadline), daemon=True
        )
        thread.name = "adpsgd-greet"
        with self._lock:
            hosts = [pending for pending, _ in self._pending.values()]
            full = (
                self._closing.is_set()
                or len(hosts) >= MOST_PENDING
                or hosts.count(host) >= MOST_OF_ADDRESS
            )
            if not full:
                self._pending[thread] = host, sock.dup()
        if full:
            sock.close()
            self._count("full", host, "too many connections are not admitted yet")
            return
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._pending.pop(thread)[1].close()
            raise

    def _greet(self, sock: socket.socket, host: str, deadline: Deadline) -> None:
        try:
            self._welcome(sock, deadline)
        except Probe:
            sock.close()
        except Exception as error:
            # Whatever went wrong here does not affect the next connection.
            sock.close()
            self._count(type(error).__name__, host, error)
        finally:
            with self._lock:
                self._pending.pop(threading.current_thread())[1].close()

    def _count(self, kind: str, host: str, reason: object) -> None:
        if self._closing.is_set():
            return
        with self._lock:
            self.turned_away[kind] += 1
            number = self.turned_away[kind]
        if number.bit_count() == 1:  # 1, 2, 4, 8, ...: a flood fills no disk
            _log.warning(
                "turned away %s: %s (%s, %d so far)", host, reason, kind, number
            )


def _bind(address: Address) -> socket.socket:
    family, *_, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    sock = socket.create_server(place, family=family)
    sock.settimeout(None)  # whatever the program's default for sockets is
    return sock
