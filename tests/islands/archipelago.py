"""Islands in the threads of one process, over real connections, and their rendezvous.

Their pace is faster than the default, so that a test that waits for a silence is short.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_adpsgd.gossip import GossipOptions
from lightning_adpsgd.islands import Island, Patience
from lightning_adpsgd.links import Credentials
from lightning_adpsgd.membership import Pace
from lightning_adpsgd.mixing import Schedule
from lightning_adpsgd.rendezvous import Place, serve
from lightning_adpsgd.topology import find_topology

PACE = Pace(beat_s=0.05, silence_s=0.6)
PATIENCE = Patience(
    timedelta(seconds=20), timedelta(seconds=5), timedelta(seconds=10), PACE
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A rendezvous that can be stopped and started again at the same port."""

    def __init__(self) -> None:
        self.place = Place("127.0.0.1", free_port(), "job")
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop = threading.Event()
        arguments = (self.place.host, self.place.port, self._stop)
        self._thread = threading.Thread(target=serve, args=arguments, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            self._thread.join(20)


@contextmanager
def rendezvous() -> Iterator[Server]:
    server = Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Trained:
    """An island over one vector, and its steps."""

    def __init__(
        self, server: Server, weights: Tensor, topology: str = "ring", **options: Any
    ) -> None:
        self.vector = weights.clone()
        self.island = Island(
            [self.vector],
            server.place,
            Schedule(find_topology(topology), 1),
            GossipOptions(**{"timeout": timedelta(seconds=20), **options}),
            f"weight:({len(weights)},):{weights.dtype}",
            Credentials(),
            PATIENCE,
        )

    def step(self, update: float = 0.0) -> None:
        self.island.before_update()
        self.vector.add_(update)
        self.island.after_update()

    @property
    def members(self) -> int:
        return self.island.statistics().members

    @property
    def exchanges(self) -> int:
        return self.island.statistics().exchanges

    def die(self) -> None:
        """Ends without a word, as a process that is killed: its connections close."""
        island = self.island
        island.membership._was_in = False  # so that it does not strike itself off
        assert island._transport is not None
        island._transport.close()
        island.abort()


@contextmanager
def archipelago(
    server: Server, rows: Tensor, topology: str = "ring", **options: Any
) -> Iterator[list[Trained]]:
    """As many islands as rows, one started after the other; ended in the end."""
    trained = [Trained(server, row, topology, **options) for row in rows]
    with ExitStack() as stack:
        for one in trained:
            one.island.start()
            stack.callback(one.island.abort)
        yield trained


def steps_of(trained: list[Trained], num: int = 1, update: float = 0.0) -> None:
    for _ in range(num):
        for one in trained:
            one.step(update)


def total(trained: list[Trained]) -> Tensor:
    """The sum of all islands' weights, with what is not merged yet."""
    return torch.stack(
        [torch.cat(one.island._engine.snapshot()) for one in trained]
    ).sum(0)
