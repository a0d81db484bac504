"""Sockets of links: options, time limits, and the detection of a cut link."""

import errno
import socket
import ssl
import struct
import sys
import time
from contextlib import suppress
from typing import NamedTuple

from lightning_adpsgd.transport.base import Evidence

# A host that is gone is noticed on a silent connection after 1 + 2 * 1 seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2))
# A machine that is stopped for 2 s does not count as gone.
_SILENCE_S = 2.25
_CONNECT_S = 1.0
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
# Two of the fields that follow the first 8 bytes of Linux's `struct tcp_info`.
_INFO = struct.Struct("@8x 4x 4x 4x 4x I 4x 4x 4x 4x 4x 4x 4x I")


class Address(NamedTuple):
    """The address of a member, written "host:port", or "[host]:port" for IPv6."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parses the text that `str` writes.

        Raises:
            ValueError: The text is not an address.
        """
        host, colon, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        bracketed = host != bare
        if not (colon and bare and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError(
                f"an address must be `host:port` or `[host]:port`, got {text!r}"
            )
        if bracketed != (":" in bare):
            raise ValueError(f"write IPv6 addresses as `[host]:port`, got {text!r}")
        return cls(bare, int(port))


class Deadline:
    """A time limit from now on, shared by several operations."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """The seconds that are left; raises `TimeoutError` if there are none."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        return seconds


def tune(sock: socket.socket) -> None:
    """Sets options to send small messages at once, and to notice a lost host soon.

    The kernel lets buffers grow with the link, beyond what a process may ask for.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def wake_after(sock: socket.socket, num_bytes: int) -> None:
    """Makes the kernel wake a reader only when `num_bytes` bytes have arrived.

    A reader that asks for no more bytes than are certain to come is woken less often,
    and never too late. With TLS, whose records the kernel cannot count, and on systems
    without this option, each packet wakes it.
    """
    if sys.platform == "linux" and not isinstance(sock, ssl.SSLSocket):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(num_bytes, 1))


def connect(address: Address, seconds: float = _CONNECT_S) -> socket.socket:
    """Connects to an address within a second, or raises `OSError`.

    The other host's kernel accepts a connection, whatever its process does.
    """
    try:
        return socket.create_connection(address, min(seconds, _CONNECT_S))
    except UnicodeError as error:
        raise OSError(f"{address.host!r} cannot be a host's name: {error}") from error


def shut_down(sock: socket.socket) -> None:
    """Ends a connection in both directions, which wakes a thread that waits on it."""
    with suppress(OSError):  # it has ended already
        # TLS's own shutdown would let a reader see what is encrypted.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def probe(address: Address) -> OSError | None:
    """The error of a connection attempt to an address; None if it succeeds."""
    try:
        connect(address).close()
    except OSError as error:
        return error
    return None


def evidence_of(error: object) -> Evidence:
    """The evidence that an error gives about the other end."""
    if isinstance(error, ConnectionRefusedError):
        return "refusal"
    silent = isinstance(error, OSError) and error.errno in _SILENT
    return "silence" if silent or isinstance(error, TimeoutError) else ""


def is_cut(sock: socket.socket, waited_s: float) -> bool:
    """Whether sent bytes have stayed unacknowledged for seconds.

    `TCP_USER_TIMEOUT` would also hit a peer that only reads slowly, because it is
    stopped for a while or limits its traffic. The kernel of such a peer still answers.
    Before the caller began to wait, the socket may have been idle for any time.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    unacknowledged, silence_ms = _INFO.unpack(info)
    return unacknowledged > 0 and min(silence_ms / 1000, waited_s) > _SILENCE_S


def send_all(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    """Sends all of the data before the deadline, or raises `OSError`."""
    sock.settimeout(deadline.left())
    sock.sendall(data)


def receive_all(sock: socket.socket, num_bytes: int, deadline: Deadline) -> bytes:
    """Receives `num_bytes` bytes, a checked number, in time, or raises `OSError`."""
    data = bytearray(num_bytes)
    room = memoryview(data)
    while room:
        sock.settimeout(deadline.left())
        received = sock.recv_into(room)
        if not received:
            raise ConnectionResetError("the other end has closed the connection")
        room = room[received:]
    return bytes(data)
