"""Messages between super-learners, each lane a TCP connection of its own.

A super-learner dials the peers that it asks and listens for those that ask it. What is
lost is lost on one lane of one peer, and the next handshake makes the lane anew.
"""

import functools
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.transport.base import PeerLost, Pending, Transport, lane_of
from lightning_adpsgd.transport.links.connection import Connection
from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.facts import Facts
from lightning_adpsgd.transport.links.handshake import (
    Malformed,
    Refused,
    greet_dialer,
    greet_listener,
)
from lightning_adpsgd.transport.links.listener import BOUNDS, Bounds, Knock, Listener
from lightning_adpsgd.transport.links.sockets import (
    Address,
    Deadline,
    connect,
    evidence_of,
    tune,
)


class LinkTransport(Transport):
    """Messages between super-learners that may come and go.

    Peers are called by the numbers of the membership, of which some may be absent. Each
    lane is used by one thread at a time. A lane that is made anew is for who uses it
    from then on: a thread that used it before is told that it is lost.

    Args:
        facts: Of this learner; `facts.member` is its super-learner's number.
        credentials: What it shows and demands.
        size: Number of super-learners, as far as it is known.
        notices_cuts: Whether a peer behind a cut link is lost within seconds, for the
            others to close the ring around it; otherwise it is when a wait for it
            times out, and a cut that heals before has cost time and nothing else.
        whom: What messages call the learner of a peer at the other end.

    Attributes:
        size: May be changed by whoever knows the members.
    """

    # Who waits moves the bytes as well. By what training lost at 200 Mbit/s two runs
    # gave 1.7 and 2.7.
    overhead = 2.5

    def __init__(
        self,
        facts: Facts,
        credentials: Credentials,
        size: int = 1,
        notices_cuts: bool = True,
        whom: Callable[[int], str] = lambda peer: "it",
    ) -> None:
        self.index, self.size = facts.member, size
        self.facts, self._credentials = facts, credentials
        self._notices_cuts = notices_cuts
        self._lanes = _Lanes(notices_cuts, whom)

    def connect(
        self, number: int, address: Address, timeout: timedelta = timedelta(seconds=5)
    ) -> Facts:
        """Dials the lane on which this super-learner asks; returns who is there.

        Raises:
            PeerLost: Nobody answers within the timeout, or it is no learner.
            Refused: The ends do not fit together; with the facts of both.
            BadCredentials: The link would leave the host, and there is no token.
        """
        doing, lane = f"connecting to {address}", lane_of(self.index, number)
        deadline = Deadline(timeout.total_seconds())
        try:
            sock, facts = self._dial(number, address, deadline)
            self._lanes.put(number, lane, sock)
        except (OSError, Malformed) as error:
            raise PeerLost(number, doing, str(error), evidence_of(error)) from error
        except Refused as error:
            raise Refused(f"super-learner {number} at {address}: {error}") from error
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
            lane = lane_of(facts.member, self.index)
            try:
                on_lane(facts.member, lane, facts)
            except BaseException:
                self._lanes.drop(facts.member, lane)
                raise

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
        """Breaks off all lanes, for good; listeners are closed by themselves."""
        self._lanes.close()

    @override
    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        return self._lanes.get(peer, lane).post_receive(into)

    @override
    def post_send(self, peer: int, lane: int, tensor: Tensor) -> Pending:
        return self._lanes.get(peer, lane).post_send(tensor)

    @override
    def post_mean(self, vector: Tensor) -> Pending:
        raise RuntimeError(
            "links lead to peers, and there is no mean over all that each would wait "
            "for: `communication` must be 'async' over links"
        )

    def _dial(
        self, number: int, address: Address, deadline: Deadline
    ) -> tuple[socket.socket, Facts]:
        sock = connect(address, deadline.left())
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
            _await_word(sock, deadline)
            sock = self._prepare(sock, deadline, server_side=True)
            credentials = self._credentials
            facts = greet_dialer(sock, deadline, credentials, self.facts, admit)
        except BaseException:
            sock.close()
            raise
        self._lanes.put(facts.member, lane_of(facts.member, self.index), sock)
        return facts

    def _prepare(
        self, sock: socket.socket, deadline: Deadline, server_side: bool
    ) -> socket.socket:
        tune(sock, self._notices_cuts)
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


def _await_word(sock: socket.socket, deadline: Deadline) -> None:
    sock.settimeout(deadline.left())
    if not sock.recv(1, socket.MSG_PEEK):
        raise Knock("the other end has gone without a word")


class _Lanes:
    """The connections, by peer and lane; `_lock` guards the dictionary.

    A thread that has used a lane is told once when the lane has been made anew, even if
    it looked away meanwhile: what it has still to say never gets into the connection
    that followed. `_used` holds for each thread what it used last.
    """

    def __init__(self, notices_cuts: bool, whom: Callable[[int], str]) -> None:
        self._notices_cuts, self._whom = notices_cuts, whom
        self._lock = threading.Lock()
        self._connections: dict[tuple[int, int], Connection] = {}
        self._used = _Used()
        self._closed = False

    def get(self, peer: int, lane: int) -> Connection:
        key = peer, lane
        with self._lock:
            connection = self._connections.get(key)
        used = self._used.connections.pop(key, connection)
        if connection is None:
            raise PeerLost(peer, f"using lane {lane}", "it is not connected")
        if used is not connection:
            raise PeerLost(peer, f"using lane {lane}", "it was connected anew")
        self._used.connections[key] = connection
        return connection

    def put(self, peer: int, lane: int, sock: socket.socket) -> None:
        """Makes a lane of a connected socket, in the place of an old one."""
        key = peer, lane
        with self._lock:
            if self._closed:
                sock.close()
                raise ConnectionAbortedError("this end has closed its links")
            old = self._connections.get(key)
            tell = functools.partial(self._was_told, key)
            self._connections[key] = Connection(
                sock, peer, tell, self._notices_cuts, self._whom(peer)
            )
        if old is not None:
            old.break_off("it was connected anew")

    def drop(self, peer: int, lane: int | None = None) -> None:
        with self._lock:
            keys = [
                key
                for key in self._connections
                if key[0] == peer and lane in (None, key[1])
            ]
            dropped = [self._connections.pop(key) for key in keys]
        for connection in dropped:
            connection.break_off("this end has let go of it")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers = {peer for peer, _ in self._connections}
        for peer in peers:
            self.drop(peer)

    def _was_told(self, key: tuple[int, int]) -> None:
        self._used.connections.pop(key, None)


class _Used(threading.local):
    def __init__(self) -> None:
        self.connections: dict[tuple[int, int], Connection] = {}
