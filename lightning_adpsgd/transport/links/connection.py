"""One connection of a link, whose messages the waiting thread moves in both directions.

Each message follows a header, so that both ends agree on its size first:

    4 bytes   a mark, which reveals a stream that is out of step
    8 bytes   size of the message in bytes, in network order

The receiver has posted a tensor for the message, and refuses a header with any other
size before it reads a byte of the message. A header never causes an allocation.
"""

import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_adpsgd.transport.base import Evidence, PeerLost
from lightning_adpsgd.transport.links.sockets import (
    evidence_of,
    is_cut,
    shut_down,
    wake_after,
)

_HEADER, _MARK = struct.Struct("!4sQ"), b"\xadpsg"
# A message of at most so many bytes leaves in one packet with its header.
_SHORT_BYTES = 1024
# TLS repeats a send that did not fit, from its beginning.
_MOST_BYTES_AT_ONCE = 1 << 18
# A wake-up costs more than a packet, so wait for this much of a long message.
_WORTH_WAKING_FOR = 1 << 20
_SECONDS_BETWEEN_CHECKS = 0.25


def make_header(num_bytes: int) -> bytes:
    """Makes the header of a message of `num_bytes` bytes."""
    return _HEADER.pack(_MARK, num_bytes)


def check_header(header: bytes | bytearray, num_bytes: int) -> None:
    """Accepts only the header of a message of `num_bytes` bytes.

    Raises:
        ConnectionError: The message is a different one; names both sizes.
    """
    mark, announced = _HEADER.unpack(header)
    if mark != _MARK:
        raise ConnectionError(
            f"its stream is out of step: a message begins with {mark!r}"
        )
    if announced != num_bytes:
        raise ConnectionError(
            f"the peer's next message has {announced} bytes, {num_bytes} expected; "
            "check that both run the same model and options"
        )


class Connection:
    """Messages to and from one peer; for one thread at a time.

    It has no thread of its own. Posted operations are in two queues, and a thread that
    waits for one of them moves the bytes of both. Two ends that both send first do not
    block each other, as long as both have posted their receives. A wait that times out
    is harmless: the operation stays posted.

    `_turn` guards the queues and the socket; the thread that waits holds it.
    `break_off` may be called by any thread, and wakes the one that waits.

    Args:
        sock: connected socket, after its handshake.
        on_broken: function called in the thread that learns of the break.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        on_broken: Callable[[], object] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        self._socket, self._peer, self._on_broken = sock, peer, on_broken
        self._sends, self._receives = deque[_Send](), deque[_Receive]()
        self._turn = threading.Lock()
        self._broken = ""
        self._evidence: Evidence = ""

    def post_receive(self, into: Tensor) -> "Posted":
        """Posts a receive into a contiguous tensor in host memory."""
        doing, receive = "receiving from it", _Receive(_memory_of(into))
        self._check(doing)
        with self._turn:
            self._receives.append(receive)
        return Posted(self, receive, doing)

    def post_send(self, tensor: Tensor) -> "Posted":
        """Posts a send; sends as much as the kernel accepts at once."""
        doing, send = "sending to it", _Send(_memory_of(tensor))
        self._check(doing)
        with self._turn:
            self._sends.append(send)
            while self._sends and not self._broken:
                if self._try(self._sends, select.POLLOUT) is not None:
                    break
        return Posted(self, send, doing)

    @property
    def is_broken(self) -> bool:
        """Whether the connection has ended, as far as this end has noticed."""
        return bool(self._broken)

    def break_off(self, reason: str) -> None:
        """Ends the connection, in any thread; a waiting thread gets the reason."""
        self._broken = self._broken or reason
        shut_down(self._socket)
        with self._turn:
            self._socket.close()

    def wait(
        self, operation: "_Send | _Receive", doing: str, timeout: timedelta
    ) -> None:
        """Returns once it is done; raises `PeerLost` after the timeout or a break."""
        begin = time.monotonic()
        with self._turn:
            while not (operation.done or self._broken):
                blocked = self._move()
                if operation.done or not blocked:
                    continue
                if not self._sleep(blocked, begin, timeout):
                    seconds = timeout.total_seconds()
                    reason = f"it was not done within {seconds:g} s"
                    raise PeerLost(self._peer, doing, reason)
        if not operation.done:
            self._check(doing)

    def _check(self, doing: str) -> None:
        if self._broken:
            self._on_broken()
            raise PeerLost(self._peer, doing, self._broken, self._evidence)

    def _move(self) -> int:
        """Tries both directions once; returns events to wait for, or 0 on progress."""
        wants = self._try(self._sends, select.POLLOUT)
        also_wants = self._try(self._receives, select.POLLIN)
        return 0 if wants is None or also_wants is None else wants | also_wants

    def _try(self, queue: "deque[_Send] | deque[_Receive]", event: int) -> int | None:
        """Returns the events to wait for; None if bytes moved, or if it is broken."""
        if not queue or self._broken:
            return None if self._broken else 0
        try:
            queue[0].step(self._socket)
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except BlockingIOError:
            return event
        except OSError as error:
            self._fail(str(error), evidence_of(error))
            return None
        if queue[0].done:
            queue.popleft()
        return None

    def _sleep(self, events: int, begin: float, timeout: timedelta) -> bool:
        """Waits until bytes can move; returns whether time was left."""
        seconds = begin + timeout.total_seconds() - time.monotonic()
        if seconds <= 0:
            return False
        if self._receives:
            enough = min(self._receives[0].num_left, _WORTH_WAKING_FOR)
            wake_after(self._socket, enough)
        poll = select.poll()
        poll.register(self._socket, events)
        if not poll.poll(1000 * min(seconds, _SECONDS_BETWEEN_CHECKS)):
            self._check_for_cut(time.monotonic() - begin)
        return True

    def _check_for_cut(self, waited_s: float) -> None:
        try:
            cut = is_cut(self._socket, waited_s)
        except OSError as error:
            self._fail(str(error), evidence_of(error))
            return
        if cut:
            reason = "the link is cut: nothing that was sent is acknowledged"
            self._fail(reason, "silence")

    def _fail(self, reason: str, evidence: Evidence) -> None:
        if not self._broken:
            self._evidence = evidence
        self._broken = self._broken or reason  # another thread may break it off here
        shut_down(self._socket)
        self._socket.close()


class Posted(NamedTuple):
    """A posted operation of a connection."""

    connection: Connection
    operation: "_Send | _Receive"
    doing: str

    def wait(self, timeout: timedelta) -> None:
        """Returns once it is done; raises `PeerLost` after the timeout or a break."""
        self.connection.wait(self.operation, self.doing, timeout)


class _Send:
    def __init__(self, payload: memoryview) -> None:
        header = make_header(len(payload))
        if len(payload) <= _SHORT_BYTES:
            self._left = [memoryview(header + payload)]
        else:
            self._left = [memoryview(header), payload]

    @property
    def done(self) -> bool:
        return not self._left

    def step(self, sock: socket.socket) -> None:
        sent = sock.send(self._left[0][:_MOST_BYTES_AT_ONCE])
        self._left[0] = self._left[0][sent:]
        if not self._left[0]:
            self._left.pop(0)


class _Receive:
    def __init__(self, into: memoryview) -> None:
        self._header, self._into = bytearray(_HEADER.size), into
        self._room, self._at_header = memoryview(self._header), True

    @property
    def done(self) -> bool:
        return not (self._at_header or self._room)

    @property
    def num_left(self) -> int:
        return len(self._room)

    def step(self, sock: socket.socket) -> None:
        received = sock.recv_into(self._room)
        if not received:
            raise ConnectionResetError("it has closed the connection")
        self._room = self._room[received:]
        if self._at_header and not self._room:
            check_header(self._header, len(self._into))
            self._room, self._at_header = self._into, False


def _memory_of(tensor: Tensor) -> memoryview:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("a link takes contiguous tensors in host memory")
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
