"""Sockets of links: their options, their time limits, and whether a link is cut."""

import errno
import socket
import ssl
import struct
import sys
import time
from typing import NamedTuple

from lightning_adpsgd.transport.base import Evidence

# A host that is gone is noticed on a silent connection after 1 + 2 * 1 seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2))
# A machine that stands still for 2 s does not count as gone.
_SILENCE_S = 2.25
_CONNECT_S = 1.0
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
# Two of the fields that follow the first 8 bytes of Linux's `struct tcp_info`.
_INFO = struct.Struct("@8x 4x 4x 4x 4x I 4x 4x 4x 4x 4x 4x 4x I")


class Address(NamedTuple):
    """Where a member listens; written "host:port", or "[host]:port" for IPv6."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Reads what `str` writes.

        Raises:
            ValueError: The text is something else.
        """
        host, colon, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        bracketed = host != bare
        if not (colon and bare and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError(
                f"an address is `host:port` or `[host]:port`, got {text!r}"
            )
        if bracketed != (":" in bare):
            raise ValueError(f"write IPv6 addresses as `[host]:port`, got {text!r}")
        return cls(bare, int(port))


class Deadline:
    """The end of a time limit, from now on, that several operations share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Returns the seconds that are left, or raises `TimeoutError`."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        return seconds


def tune(sock: socket.socket) -> None:
    """Sends small messages at once, and soon notices that the other host is gone.

    The kernel chooses the sizes of the buffers: it lets them grow with the link, and
    further than a process may ask for.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def wake_after(sock: socket.socket, num_bytes: int) -> None:
    """Lets the kernel wake a reader only when so many bytes are there.

    A reader that asks for no more than what is sure to come is woken less often, and
    never too late. With TLS, whose records the kernel cannot count, and on systems
    without this option, each packet wakes it.
    """
    if sys.platform == "linux" and not isinstance(sock, ssl.SSLSocket):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(num_bytes, 1))


def connect(address: Address, seconds: float = _CONNECT_S) -> socket.socket:
    """Connects to an address, or raises `OSError`, within a second.

    The other host's kernel accepts a connection, whatever its process does.
    """
    return socket.create_connection(address, min(seconds, _CONNECT_S))


def probe(address: Address) -> OSError | None:
    """Returns why an address cannot be connected to; None if it can."""
    try:
        connect(address).close()
    except OSError as error:
        return error
    return None


def evidence_of(error: object) -> Evidence:
    """Returns what an error says about the other end."""
    if isinstance(error, ConnectionRefusedError):
        return "refusal"
    silent = isinstance(error, OSError) and error.errno in _SILENT
    return "silence" if silent or isinstance(error, TimeoutError) else ""


def is_cut(sock: socket.socket, waited_s: float) -> bool:
    """Returns whether nothing has acknowledged for seconds what was sent.

    `TCP_USER_TIMEOUT` would also count a peer that is only slow to read: one that is
    stopped for a while, or limits its traffic. The kernel of such a peer answers. The
    socket may have been idle before the seconds that the caller has waited.
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
    """Receives so many bytes, a checked number, in time, or raises `OSError`."""
    data = bytearray(num_bytes)
    room = memoryview(data)
    while room:
        sock.settimeout(deadline.left())
        received = sock.recv_into(room)
        if not received:
            raise ConnectionResetError("the other end has closed the connection")
        room = room[received:]
    return bytes(data)
