"""Messages between super-learners that come and go, each lane a TCP connection.

A super-learner dials the peers that it asks and listens for those that ask it. What is
lost is lost on one lane of one peer, and the next handshake makes the lane anew.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.links.connection import Connection
from lightning_adpsgd.links.credentials import Credentials
from lightning_adpsgd.links.facts import Facts
from lightning_adpsgd.links.handshake import (
    Malformed,
    Refused,
    greet_dialer,
    greet_listener,
)
from lightning_adpsgd.links.listener import BOUNDS, Bounds, Listener
from lightning_adpsgd.links.sockets import Address, Deadline, tune
from lightning_adpsgd.transport import PeerLost, Pending, Transport, lane_of


class LinkTransport(Transport):
    """Messages between super-learners that come and go.

    Peers are called by the numbers of the membership, of which some may be absent. Each
    lane is used by one thread at a time; who was told that it is lost does not use it
    again until it is there anew.

    Args:
        facts: Of this learner; `facts.member` is its super-learner's number.
        credentials: What it shows and demands.
        size: Number of super-learners, as far as it is known.

    Attributes:
        size: May be changed by whoever knows the members.
    """

    def __init__(self, facts: Facts, credentials: Credentials, size: int = 1) -> None:
        self.index, self.size = facts.member, size
        self.facts, self._credentials = facts, credentials
        self._lanes = _Lanes()

    def connect(
        self, number: int, address: Address, timeout: timedelta = timedelta(seconds=5)
    ) -> Facts:
        """Dials the lane on which this super-learner asks; returns who is there.

        Raises:
            PeerLost: Nobody answers within the timeout, or it is no learner.
            Refused: The ends do not fit together; with the facts of both.
            BadCredentials: The link would leave the host, and there is no token.
        """
        doing = f"connecting to {address}"
        deadline = Deadline(timeout.total_seconds())
        try:
            sock, facts = self._dial(number, address, deadline)
        except (OSError, Malformed) as error:
            raise PeerLost(number, doing, str(error)) from error
        except Refused as error:
            raise Refused(f"super-learner {number} at {address}: {error}") from error
        if not self._lanes.put(number, lane_of(self.index, number), sock, deadline):
            raise PeerLost(number, doing, "what used the lane has not let go of it")
        return facts

    def listen(
        self,
        address: Address,
        on_lane: Callable[[int, int, Facts], None],
        admit: Callable[[Facts], str] = lambda facts: "",
        bounds: Bounds = BOUNDS,
    ) -> Listener:
        """Lets peers connect the lanes on which they ask.

        A peer that connects a lane which it has already breaks off the old one.

        Args:
            address: Of the interface by which peers come; port 0: any that is free.
            on_lane: Called with a peer's number, the lane and the peer's facts when a
                lane is ready, in a thread that it may not hold for long.
            admit: Why a peer that fits is not let in; empty if it is.
            bounds: On those who are not let in yet.

        Returns:
            The listener, already started.

        Raises:
            OSError: The address cannot be listened at.
            BadCredentials: It is not a loopback address, and there is no token.
        """

        def welcome(sock: socket.socket, deadline: Deadline) -> None:
            facts = self._answer(sock, deadline, admit)
            on_lane(facts.member, lane_of(facts.member, self.index), facts)

        check = self._credentials.check_place
        listener = Listener(address, check, welcome, bounds)
        listener.start()
        return listener

    def disconnect(self, number: int, lane: int | None = None) -> None:
        """Breaks off a lane of a peer; who uses it is told that it is lost.

        What was sent before still arrives. It is also what ends a lane on which the
        asking end has said that it leaves.

        Args:
            number: Of the peer.
            lane: None: both.
        """
        self._lanes.drop(number, lane)

    def rename(self, number: int) -> None:
        """Takes another number, where the membership has given the old one again.

        Nothing may be connected.
        """
        self.index = number
        self.facts = replace(self.facts, member=number)

    def close(self) -> None:
        """Breaks off all lanes."""
        for number in self._lanes.peers():
            self._lanes.drop(number)

    @override
    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        return self._lanes.get(peer, lane).post_receive(into)

    @override
    def post_send(self, peer: int, lane: int, tensor: Tensor) -> Pending:
        return self._lanes.get(peer, lane).post_send(tensor)

    @override
    def post_mean(self, vector: Tensor) -> Pending:
        raise RuntimeError(
            "members that come and go have no mean over all of them that each would "
            "wait for: `communication` must be 'async' between islands"
        )

    def _dial(
        self, number: int, address: Address, deadline: Deadline
    ) -> tuple[socket.socket, Facts]:
        sock = socket.create_connection(address, timeout=deadline.left())
        try:
            self._credentials.check_place(sock)
            sock = self._prepare(sock, deadline, server_side=False)
            credentials = self._credentials
            facts = greet_listener(sock, deadline, credentials, self.facts, number)
        except BaseException:
            sock.close()
            raise
        return sock, facts

    def _answer(
        self, sock: socket.socket, deadline: Deadline, admit: Callable[[Facts], str]
    ) -> Facts:
        try:
            sock = self._prepare(sock, deadline, server_side=True)
            credentials = self._credentials
            facts = greet_dialer(sock, deadline, credentials, self.facts, admit)
        except BaseException:
            sock.close()
            raise
        lane = lane_of(facts.member, self.index)
        if not self._lanes.put(facts.member, lane, sock, deadline):
            raise Refused(f"{facts}: what used its lane has not let go of it")
        return facts

    def _prepare(
        self, sock: socket.socket, deadline: Deadline, server_side: bool
    ) -> socket.socket:
        tune(sock)
        sock.settimeout(deadline.left())
        if self._credentials.tls is None:
            return sock
        wrapped = self._credentials.tls.wrap(sock, server_side)
        try:
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return wrapped


class _Lanes:
    """The connections, by peer and lane; `_changed` guards the dictionary.

    A lane that is lost stays until its user has been told, so that what this one has
    still to say never gets into the connection that follows.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._connections: dict[tuple[int, int], Connection] = {}

    def get(self, peer: int, lane: int) -> Connection:
        with self._changed:
            connection = self._connections.get((peer, lane))
        if connection is None:
            raise PeerLost(peer, f"using lane {lane}", "it is not connected")
        return connection

    def put(
        self, peer: int, lane: int, sock: socket.socket, deadline: Deadline
    ) -> bool:
        """Breaks off the old connection of a lane, and waits until it is let go of."""
        key = peer, lane
        old = self._connections.get(key)
        if old is not None:
            old.break_off("it has connected anew")
        with self._changed, suppress(TimeoutError):
            free = self._changed.wait_for(
                lambda: key not in self._connections, deadline.left()
            )
            if free:
                self._connections[key] = Connection(sock, peer, self._let_go)
                return True
        sock.close()
        return False

    def drop(self, peer: int, lane: int | None = None) -> None:
        with self._changed:
            keys = [
                key
                for key in self._connections
                if key[0] == peer and lane in (None, key[1])
            ]
            dropped = [self._connections.pop(key) for key in keys]
            self._changed.notify_all()
        for connection in dropped:
            connection.break_off("this end has let go of it")

    def peers(self) -> set[int]:
        with self._changed:
            return {peer for peer, _ in self._connections}

    def _let_go(self, connection: Connection) -> None:
        with self._changed:
            for key, held in list(self._connections.items()):
                if held is connection:
                    del self._connections[key]
            self._changed.notify_all()
