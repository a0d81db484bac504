"""One connection of a link: messages both ways, moved by whoever waits for one."""

import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from lightning_adpsgd.transport.base import Evidence, PeerLost
from lightning_adpsgd.transport.links.frames import (
    HEADER,
    BadFrame,
    check_header,
    make_header,
)
from lightning_adpsgd.transport.links.sockets import evidence_of, is_cut, wake_after

# A message that is not longer leaves in one packet with its header.
_SHORT_BYTES = 1024
# TLS sends again what did not fit, from its beginning.
_MOST_BYTES_AT_ONCE = 1 << 18
# Every wake-up costs more than the packet that came: of a long message, so much first.
_WORTH_WAKING_FOR = 1 << 20
_SECONDS_BETWEEN_LOOKS = 0.25


class _Operation(Protocol):
    @property
    def done(self) -> bool: ...

    @property
    def num_left(self) -> int:
        """Bytes that it can move before it looks at what they say."""
        ...

    def step(self, sock: socket.socket) -> None:
        """One try; raises what the socket raises where nothing can move."""
        ...


class Connection:
    """Messages to and from one peer; for one thread at a time.

    No thread is behind it. Posted operations are in two queues; whoever waits for one
    of them moves the bytes of both, so that two ends that both send first do not block
    each other, as long as both have posted what they receive. A wait that timed out
    does no harm: the operation stays posted. What was posted and not waited for moves
    while others are waited for.

    `_turn` guards the queues and the socket, and is held by whoever waits. `break_off`
    may be called by any thread: it wakes the one that waits.

    Args:
        sock: Connected, with its handshake behind it.
        peer: Number of the member at the other end.
        on_broken: Called in the thread that is told of the break.
        notices_cuts: Whether a cut of the link breaks it within seconds; otherwise it
            goes on when the link is whole again, if nobody's timeout is over by then.
        whom: What messages call the learner at the other end.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        on_broken: Callable[[], None] = lambda: None,
        notices_cuts: bool = True,
        whom: str = "it",
    ) -> None:
        sock.setblocking(False)
        self._notices_cuts, self._whom = notices_cuts, whom
        self._socket, self._peer, self._on_broken = sock, peer, on_broken
        self._sends: deque[_Operation] = deque()
        self._receives: deque[_Operation] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._turn = threading.Lock()
        self._broken = ""
        self._evidence: Evidence = ""

    def post_receive(self, into: Tensor) -> "Posted":
        """Posts a receive into a contiguous tensor of the host."""
        doing = f"receiving from {self._whom}"
        return self._post(self._receives, _Receive(_memory_of(into)), doing)

    def post_send(self, tensor: Tensor) -> "Posted":
        """Posts a send; what the kernel takes at once is on its way."""
        doing = f"sending to {self._whom}"
        posted = self._post(self._sends, _Send(_memory_of(tensor)), doing)
        with self._turn:
            while self._sends and not self._broken:
                if not self._try(self._sends, selectors.EVENT_WRITE)[0]:
                    break
        return posted

    def break_off(self, reason: str) -> None:
        """Ends the connection, in whatever thread; who waits is told the reason."""
        self._broken = self._broken or reason
        self._shut()
        with self._turn:
            self._close()

    def _post(
        self, queue: deque[_Operation], operation: _Operation, doing: str
    ) -> "Posted":
        if self._broken:
            self._tell(doing)
        with self._turn:
            queue.append(operation)
        return Posted(self, operation, doing)

    def wait(self, operation: _Operation, doing: str, timeout: timedelta) -> None:
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
            self._tell(doing)

    def _tell(self, doing: str) -> None:
        self._on_broken()
        raise PeerLost(self._peer, doing, self._broken, self._evidence)

    def _move(self) -> int:
        """One try each way; returns for what to wait, or 0 if something has moved."""
        sent, wants = self._try(self._sends, selectors.EVENT_WRITE)
        received, also_wants = self._try(self._receives, selectors.EVENT_READ)
        return 0 if sent or received else wants | also_wants

    def _try(self, queue: deque[_Operation], event: int) -> tuple[bool, int]:
        """Whether something has moved, and if not for what to wait."""
        if not queue or self._broken:
            return bool(self._broken), 0
        try:
            queue[0].step(self._socket)
        except ssl.SSLWantReadError:
            return False, selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return False, selectors.EVENT_WRITE
        except BlockingIOError:
            return False, event
        except (OSError, BadFrame) as error:
            self._fail(str(error), evidence_of(error))
            return True, 0
        if queue[0].done:
            queue.popleft()
        return True, 0

    def _sleep(self, events: int, begin: float, timeout: timedelta) -> bool:
        """Waits until something can move; returns whether time was left."""
        seconds = begin + timeout.total_seconds() - time.monotonic()
        if seconds <= 0:
            return False
        if self._receives:
            enough = min(self._receives[0].num_left, _WORTH_WAKING_FOR)
            wake_after(self._socket, enough)
        self._selector.modify(self._socket, events)
        if not self._notices_cuts:
            self._selector.select(seconds)
        elif not self._selector.select(min(seconds, _SECONDS_BETWEEN_LOOKS)):
            self._look(time.monotonic() - begin)
        return True

    def _look(self, waited_s: float) -> None:
        try:
            cut = is_cut(self._socket, waited_s)
        except OSError as error:
            self._fail(str(error), evidence_of(error))
        else:
            if cut:
                reason = "the link is cut: nothing that was sent is acknowledged"
                self._fail(reason, "silence")

    def _fail(self, reason: str, evidence: Evidence) -> None:
        if not self._broken:
            self._evidence = evidence
        self._broken = self._broken or reason
        self._shut()
        self._close()

    def _shut(self) -> None:
        with suppress(OSError):  # it was broken already
            # Not that of TLS, which would let who reads see what is encrypted.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _close(self) -> None:
        self._selector.close()
        self._socket.close()


class Posted:
    """A posted operation of a connection."""

    def __init__(
        self, connection: Connection, operation: _Operation, doing: str
    ) -> None:
        self._connection, self._operation = connection, operation
        self._doing = doing

    def wait(self, timeout: timedelta) -> None:
        """Returns once it is done; raises `PeerLost` after the timeout or a break."""
        self._connection.wait(self._operation, self._doing, timeout)


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

    @property
    def num_left(self) -> int:
        return sum(map(len, self._left))

    def step(self, sock: socket.socket) -> None:
        sent = sock.send(self._left[0][:_MOST_BYTES_AT_ONCE])
        self._left[0] = self._left[0][sent:]
        if not self._left[0]:
            self._left.pop(0)


class _Receive:
    def __init__(self, into: memoryview) -> None:
        self._header, self._into = bytearray(HEADER.size), into
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
        raise ValueError("a link takes contiguous tensors of the host")
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
