"""Links between islands of one process that can be damaged, slowed down and cut.

Every connection that is dialled while `wires` holds goes through a `Wire` of this
process, which reads what one end sends and passes it on.
"""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from lightning_adpsgd.transport.links.peer_info import Wanted
from lightning_adpsgd.transport.links.sockets import Address, Deadline
from lightning_adpsgd.transport.links.transport import LinkTransport
from tests.helpers import PATIENCE_S

_PIECE = 256


class Wire:
    """A connection in two, one to each end, and a thread for each way.

    `change` is called by both threads with each piece, and returns what is passed on;
    if that is shorter, the wire breaks after it.
    """

    def __init__(self, target: Address, change: "Change") -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._server.getsockname()[1])
        self._target, self._change = target, change
        self._ends: list[socket.socket] = []
        self._is_cut = False
        self._threads = [threading.Thread(target=self._connect, daemon=True)]
        self._threads[0].start()

    def _connect(self) -> None:
        with suppress(OSError):
            near, _ = self._server.accept()
            far = socket.create_connection(self._target, 5)
            far.settimeout(None)  # or it would break after 5 s in which nothing came
            self._ends = [near, far]
            if self._is_cut:
                self.cut()  # which found no ends yet
            for way in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass_on, args=way, daemon=True)
                thread.start()
                self._threads.append(thread)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                changed = self._change(bytearray(piece))
                target.sendall(changed)
                if len(changed) < len(piece):
                    break
        self.cut()

    def cut(self) -> None:
        """Both ends see the connection close."""
        self._is_cut = True
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends its threads."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for thread in list(self._threads):
            thread.join(PATIENCE_S)
        for end in self._ends:
            end.close()


Change = Callable[[bytearray], bytearray]


def unchanged(piece: bytearray) -> bytearray:
    return piece


class Wires:
    """All wires, and what happens on them; may be changed at any time.

    Attributes:
        change: Of every piece; see `Wire`.
        touches: Whether it is applied to the wire from one member to another.
        plugged: Otherwise nobody can dial.
    """

    def __init__(self) -> None:
        self.change: Change = unchanged
        self.touches: Callable[[int, int], bool] = lambda source, target: True
        self.plugged = True
        self._lock = threading.Lock()
        self._wires: list[Wire] = []

    def address(self, source: int, target: int, address: Address) -> Address:
        """Where to dial instead."""
        if not self.plugged:
            raise OSError("no cable")

        def change(piece: bytearray) -> bytearray:
            return self.change(piece) if self.touches(source, target) else piece

        wire = Wire(address, change)
        with self._lock:
            self._wires.append(wire)
        return wire.address

    def cut(self) -> None:
        """Pulls out the cable."""
        self.plugged = False
        for wire in list(self._wires):
            wire.cut()

    def close(self) -> None:
        for wire in self._wires:
            wire.close()


@contextmanager
def wires(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wires]:
    made, dial = Wires(), LinkTransport._dial

    def dial_the_wire(
        self: LinkTransport, address: Address, deadline: Deadline, wanted: Wanted
    ) -> Any:
        instead = made.address(self.index, wanted.member, address)
        return dial(self, instead, deadline, wanted)

    monkeypatch.setattr(LinkTransport, "_dial", dial_the_wire)
    try:
        yield made
    finally:
        made.close()


class Flips:
    """Flips a bit now and then, and tears what it passes on."""

    def __init__(self, seed: int, one_in: int, tears: bool = False) -> None:
        self._dice, self._one_in, self._tears = random.Random(seed), one_in, tears
        self._lock = threading.Lock()
        self.num = 0

    def __call__(self, piece: bytearray) -> bytearray:
        with self._lock:
            if self._dice.randrange(self._one_in):
                return piece
            self.num += 1
            if self._tears:
                return piece[: self._dice.randrange(len(piece))]
            place = self._dice.randrange(8 * len(piece))
            piece[place // 8] ^= 1 << place % 8
            return piece
