"""Sockets of links: how they are set, how long they may take, whether they are cut."""

import errno
import ipaddress
import socket
import ssl
import struct
import sys
import time
from typing import NamedTuple

from lightning_adpsgd.transport.base import Evidence

# A host that is gone is noticed on a silent connection after 1 + 2 * 1 seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2))
# A machine that stands still for 2 s is not taken for one that is gone.
_SILENCE_S = 2.25
_KNOCK_S = 1.0
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
# In Linux's `struct tcp_info`, after 8 bytes, the fields of which these are two.
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
        """The address that is written so.

        Raises:
            ValueError: It is not.
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
    """The end of a span of time for several operations together.

    Args:
        seconds: From this moment on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left.

        Raises:
            TimeoutError: None are.
        """
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        return seconds


def tune(sock: socket.socket, notices_silence: bool = True) -> None:
    """Small messages leave at once.

    The sizes of the buffers stay with the kernel, which lets them grow with the link,
    and further than a process may ask for.

    Args:
        sock: Connected.
        notices_silence: Whether a peer whose host is gone is lost within seconds.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not notices_silence:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def wake_after(sock: socket.socket, num_bytes: int) -> None:
    """Lets the kernel wake who waits to read only when so many bytes are there, or all.

    Who asks for no more than what is sure to come is woken less often, and never too
    late. Of TLS, which holds back what the kernel would have to count, and where there
    is no such dial, each packet wakes.
    """
    if sys.platform == "linux" and not isinstance(sock, ssl.SSLSocket):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(num_bytes, 1))


def connect(address: Address, seconds: float = _KNOCK_S) -> socket.socket:
    """A connection to an address, or `OSError` within a second, or sooner.

    It is the other host's kernel that takes a connection, whatever the process does.
    """
    return socket.create_connection(address, min(seconds, _KNOCK_S))


def knock(address: Address) -> OSError | None:
    """What keeps one from connecting to an address; none if nothing does."""
    try:
        connect(address).close()
    except OSError as error:
        return error
    return None


def evidence_of(error: object) -> Evidence:
    """What an error says about the other end."""
    if isinstance(error, ConnectionRefusedError):
        return "refusal"
    silent = isinstance(error, OSError) and error.errno in _SILENT
    return "silence" if silent or isinstance(error, TimeoutError) else ""


def is_cut(sock: socket.socket, waited_s: float) -> bool:
    """Whether what was sent has found no acknowledgement for seconds.

    `TCP_USER_TIMEOUT` would say so of a peer that is only slow to read as well: one
    that is stopped for a while, or spares its link. The kernel of such a peer answers.

    Args:
        sock: Connected.
        waited_s: For how long one has waited; before that nothing may have been sent.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    unacknowledged, silence_ms = _INFO.unpack(info)
    return unacknowledged > 0 and min(silence_ms / 1000, waited_s) > _SILENCE_S


def is_loopback(sock: socket.socket) -> bool:
    """Whether the address that a socket is bound to is of this host alone."""
    host = sock.getsockname()[0].partition("%")[0]
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def send_all(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    """Sends all of it before the deadline; else raises `OSError`."""
    sock.settimeout(deadline.left())
    sock.sendall(data)


def receive_all(sock: socket.socket, num_bytes: int, deadline: Deadline) -> bytes:
    """Receives so many bytes before the deadline; else raises `OSError`.

    Who calls has checked the number against a limit.
    """
    data = bytearray(num_bytes)
    room = memoryview(data)
    while room:
        sock.settimeout(deadline.left())
        received = sock.recv_into(room)
        if not received:
            raise ConnectionResetError("the other end has closed the connection")
        room = room[received:]
    return bytes(data)
