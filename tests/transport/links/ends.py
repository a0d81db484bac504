"""Two ends of a link in one process, over TCP on loopback."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.facts import Facts
from lightning_adpsgd.transport.links.sockets import Address
from lightning_adpsgd.transport.links.transport import LinkTransport
from tests.helpers import until

LOOPBACK = Address("127.0.0.1", 0)
TOKEN = Credentials(b"0123456789abcdef")


def facts(member: int = 0, **others: Any) -> Facts:
    return Facts(
        **{
            "member": member,
            "incarnation": f"start {member}",
            "job": "a job",
            "model": "weight:(2, 3):torch.float32",
            **others,
        }
    )


@contextmanager
def tcp_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    with first, second:
        yield first, second


@contextmanager
def linked(
    size: int, credentials: Sequence[Credentials] = (TOKEN,)
) -> Iterator[list[LinkTransport]]:
    """Super-learners, each of which asks every other."""
    with ExitStack() as stack:
        transports, addresses, ready = [], [], set()
        for index in range(size):
            own = credentials[index % len(credentials)]
            transport = LinkTransport(facts(index), own, size)
            stack.callback(transport.close)

            def on_lane(peer: int, lane: int, theirs: Facts, here: int = index) -> None:
                ready.add((peer, here))

            listener = transport.listen(LOOPBACK, on_lane)
            stack.callback(listener.close)
            transports.append(transport)
            addresses.append(listener.address)
        for transport in transports:
            for peer in range(size):
                if peer != transport.index:
                    transport.connect(peer, addresses[peer])
        until(lambda: len(ready) == size * (size - 1), "all lanes")
        yield transports
