"""Messages between super-learners, each lane a TCP connection of its own.

A super-learner dials the peers that it asks, and listens for peers that ask it. A loss
concerns one lane of one peer, and the next handshake replaces that lane.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.transport.base import PeerLost, Pending, Transport, lane_of
from lightning_adpsgd.transport.links.connection import Connection
from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.handshake import (
    Malformed,
    Refused,
    greet_dialer,
    greet_listener,
)
from lightning_adpsgd.transport.links.listener import HANDSHAKE_S, Listener, Probe
from lightning_adpsgd.transport.links.peer_info import PeerInfo, Wanted
from lightning_adpsgd.transport.links.sockets import (
    Address,
    Deadline,
    connect,
    evidence_of,
    tune,
)

_REPLACED = "the peer has connected again"


class LinkTransport(Transport):
    """Messages between super-learners that may come and go.

    Peers are identified by their numbers on the member list. Numbers may be missing, so
    there is no `size`. One thread at a time uses a lane. When a lane is replaced, the
    thread that used the old one gets `PeerLost` once, and any thread may use the new
    one. `info.member` is the number of this super-learner.
    """

    _bound: Sequence[Connection | None] = ()

    def __init__(self, info: PeerInfo, credentials: Credentials) -> None:
        self.index, self._info, self._credentials = info.member, info, credentials
        self._lanes = _OpenConnections()

    def connect(self, number: int, address: Address, incarnation: str = "") -> None:
        """Dials the lane on which this super-learner asks a peer.

        Args:
            incarnation: expected incarnation; empty: any.

        Raises:
            PeerLost: Nothing answers within 5 s, or the answer is not a learner's.
            Refused: The ends do not match; the message names the difference.
            BadCredentials: The link would leave the host, and they do not protect it.
        """
        doing, lane = f"connecting to {address}", lane_of(self.index, number)
        deadline = Deadline(HANDSHAKE_S)
        wanted = Wanted(number, incarnation, str(address))
        try:
            sock, info = self._dial(address, deadline, wanted)
            if replaced := self._lanes.put(number, lane, sock, info.incarnation):
                replaced.break_off(_REPLACED)
        except (OSError, Malformed) as error:
            raise PeerLost(number, doing, str(error), evidence_of(error)) from error
        except Refused as error:
            raise Refused(f"super-learner {number} at {address}: {error}") from error

    def listen(
        self,
        address: Address,
        on_lane: Callable[[int], None],
        objection: Callable[[PeerInfo], str] = lambda dialer: "",
    ) -> Listener:
        """Lets peers connect the lanes on which they ask this end.

        A peer that connects an existing lane again ends the old connection, after
        `on_lane`. While a lane is connected, another incarnation of the peer's number
        is refused.

        Args:
            address: address of the interface for peers; port 0: any free port.
            on_lane: function called with the number of a peer whose lane is ready, in a
                thread that it must not block for long, while the connection that was
                replaced still stands. An exception from it ends the lane.
            objection: gives a reason to refuse a peer, or an empty text.

        Returns:
            The listener, already started.

        Raises:
            OSError: Listening at the address fails.
            BadCredentials: The address is no loopback, and they do not protect it.
        """

        def welcome(sock: socket.socket, deadline: Deadline) -> None:
            sock, info = self._answer(sock, deadline, str(listener.address), objection)
            number, lane = info.member, lane_of(info.member, self.index)
            # Told of late, one that was replaced would pass for the one that stands.
            with in_turn:
                replaced = self._lanes.put(number, lane, sock, info.incarnation)
                try:
                    on_lane(number)
                except BaseException:
                    self._lanes.drop(number, lane)
                    raise
                finally:
                    # Only now: `on_lane` may tell who waits on it that it is no loss.
                    if replaced is not None:
                        replaced.break_off(_REPLACED)

        in_turn = threading.Lock()
        self._credentials.check_address(address.host)
        listener = Listener(address, welcome)
        listener.start()
        return listener

    def disconnect(self, number: int, lane: int | None = None) -> None:
        """Ends a lane of a peer, or both; a thread that uses it learns of the loss.

        Messages sent before still arrive.
        """
        self._lanes.drop(number, lane)

    def rename(self, number: int, incarnation: str, origin: str = "") -> None:
        """Adopts this island's number, incarnation and origin from the membership.

        Nothing may be connected when the number changes.
        """
        self.index = number
        self._info = replace(
            self._info, member=number, incarnation=incarnation, origin=origin
        )

    def callers(self) -> list[int]:
        """The peers whose asking lanes are connected, as far as this end knows."""
        lanes = self._lanes.connected()
        return [peer for peer, lane in lanes if lane == lane_of(peer, self.index)]

    def close(self) -> None:
        """Ends all lanes for good; listeners are closed separately."""
        self._lanes.close()

    @override
    def bound(self, peer: int, lane: int) -> "LinkTransport":
        # A thread may get the processor for the first time after its lane was replaced.
        bound = copy(self)
        bound._bound = self._lanes.find(peer, lane)[:1]
        return bound

    @override
    def hang_up(self) -> None:
        for connection in filter(None, self._bound):
            connection.break_off("this end has disconnected it")

    @override
    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        return self._lanes.get(peer, lane, *self._bound).post_receive(into)

    @override
    def post_send(self, peer: int, lane: int, tensor: Tensor) -> Pending:
        return self._lanes.get(peer, lane, *self._bound).post_send(tensor)

    @override
    def post_mean(self, vector: Tensor) -> Pending:
        raise NotImplementedError("links take no mean over all super-learners")

    def _dial(
        self, address: Address, deadline: Deadline, wanted: Wanted
    ) -> tuple[socket.socket, PeerInfo]:
        sock, own = connect(address, deadline.left()), self._credentials
        try:
            own.check_address(sock.getsockname()[0])
            sock = self._prepare(sock, deadline, server_side=False)
            info = greet_listener(sock, deadline, own, self._info, wanted)
        except BaseException:
            sock.close()
            raise
        return sock, info

    def _answer(
        self,
        sock: socket.socket,
        deadline: Deadline,
        address: str,
        objection: Callable[[PeerInfo], str],
    ) -> tuple[socket.socket, PeerInfo]:
        def whole_objection(dialer: PeerInfo) -> str:
            lane = lane_of(dialer.member, self.index)
            holder = self._lanes.holder(dialer.member, lane)
            if holder in ("", dialer.incarnation):
                return objection(dialer)
            return f"number {dialer.member} belongs to another process, now connected"

        try:
            sock.settimeout(deadline.left())
            if not sock.recv(1, socket.MSG_PEEK):
                raise Probe(
                    "the other end has closed the connection without sending a byte"
                )
            sock = self._prepare(sock, deadline, server_side=True)
            mine = self._credentials, self._info
            info = greet_dialer(sock, deadline, *mine, address, whole_objection)
        except BaseException:
            sock.close()
            raise
        return sock, info

    def _prepare(
        self, sock: socket.socket, deadline: Deadline, server_side: bool
    ) -> socket.socket:
        tune(sock)
        sock.settimeout(deadline.left())
        if self._credentials.tls is None:
            return sock
        context = self._credentials.tls.context(server_side)
        wrapped = context.wrap_socket(sock, server_side, do_handshake_on_connect=False)
        try:
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return wrapped


class _OpenConnections:
    """The connections, by peer and lane, with the incarnations; `_lock` guards changes.

    When a lane is replaced, each thread that has used it gets `PeerLost` once, even if
    much later. So its pending messages never enter the new connection.
    `_used` holds the last connections of each thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[tuple[int, int], tuple[Connection, str]] = {}
        self._used = _Used()
        self._closed = False

    def find(self, peer: int, lane: int) -> "tuple[Connection | None, str]":
        return self._connections.get((peer, lane), (None, ""))

    def get(self, peer: int, lane: int, *bound: Connection | None) -> Connection:
        key, (connection, _) = (peer, lane), self.find(peer, lane)
        used = self._used.connections.pop(key, *(bound or (connection,)))
        if connection is None:
            raise PeerLost(peer, f"using lane {lane}", "it is not connected")
        if used is not connection:
            raise PeerLost(peer, f"using lane {lane}", _REPLACED)
        self._used.connections[key] = connection
        return connection

    def put(
        self, peer: int, lane: int, sock: socket.socket, whose: str
    ) -> Connection | None:
        """Returns the connection that it replaces, which the caller breaks off."""
        key = peer, lane
        with self._lock:
            if self._closed:
                sock.close()
                raise ConnectionAbortedError("this end has closed its links")
            old, _ = self._connections.get(key, (None, ""))
            connection = Connection(
                sock, peer, lambda: self._used.connections.pop(key, None)
            )
            self._connections[key] = connection, whose
        return old

    def holder(self, peer: int, lane: int) -> str:
        """The incarnation of the peer whose lane is connected; empty if none is."""
        connection, whose = self.find(peer, lane)
        is_open = connection is not None and not connection.is_broken
        return whose if is_open else ""

    def connected(self) -> list[tuple[int, int]]:
        with self._lock:
            held = self._connections.items()
            return [key for key, (one, _) in held if not one.is_broken]

    def drop(self, peer: int, lane: int | None = None) -> None:
        """Ends a lane of a peer, or both."""
        with self._lock:
            keys = [key for key in self._connections if key[0] == peer]
            keys = [key for key in keys if lane in (None, key[1])]
            dropped = [self._connections.pop(key) for key in keys]
        for connection, _ in dropped:
            connection.break_off("this end has disconnected it")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers = {peer for peer, _ in self._connections}
        for peer in peers:
            self.drop(peer)


class _Used(threading.local):
    def __init__(self) -> None:
        self.connections: dict[tuple[int, int], Connection] = {}
