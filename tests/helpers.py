"""What several test files of the engine share: sizes, threads, small worlds."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.gossip import Gossip, GossipOptions
from lightning_adpsgd.mixing import RoundMixer, Schedule
from lightning_adpsgd.topology import TOPOLOGIES, find_topology
from lightning_adpsgd.transport import (
    Gathering,
    Node,
    Pending,
    ThreadTransport,
    Transport,
)

ALL_TOPOLOGIES = list(TOPOLOGIES)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17)
PATIENCE = timedelta(seconds=20)

T = TypeVar("T")


def together(actions: Sequence[Callable[[], T]]) -> list[T]:
    """Runs every action in a thread of its own; raises the first exception."""
    with ThreadPoolExecutor(max(1, len(actions))) as pool:
        futures = [pool.submit(action) for action in actions]
        return [future.result(timeout=60) for future in futures]


def mixing_rounds(name: str, size: int, num_rounds: int = 6) -> list[Tensor]:
    """The first matrices of a topology."""
    return [find_topology(name).matrix(size, r, 0) for r in range(num_rounds)]


def random_rows(size: int, length: int = 7, seed: int = 0) -> Tensor:
    """One random float64 weight vector per super-learner: [size, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, length, dtype=torch.float64, generator=generator)


def round_mixers(
    rows: Tensor, topology: str, gain: float = 1.0
) -> tuple[list[Tensor], list[RoundMixer]]:
    """One vector and one mixer over it for each row."""
    vectors = [row.clone() for row in rows]
    schedule = Schedule(find_topology(topology), len(rows), gain)
    mixers = [
        RoundMixer([vector], transport, Node(), schedule, PATIENCE)
        for vector, transport in zip(
            vectors, ThreadTransport.connect(len(rows)), strict=True
        )
    ]
    return vectors, mixers


def engines(
    rows: Tensor, topology: str, gain: float = 1.0, **options: Any
) -> tuple[list[Tensor], list[Gossip]]:
    """One vector and one asynchronous engine (not started) for each row."""
    vectors = [row.clone() for row in rows]
    schedule = Schedule(find_topology(topology), len(rows), gain)
    dials = GossipOptions(**{"timeout": PATIENCE, **options})
    gossips = [
        Gossip([vector], transport, Node(), schedule, dials)
        for vector, transport in zip(
            vectors, ThreadTransport.connect(len(rows)), strict=True
        )
    ]
    return vectors, gossips


@contextmanager
def running(gossips: Sequence[Gossip]) -> Iterator[None]:
    """Starts engines, settles and stops them together; aborts them on an error."""
    for gossip in gossips:
        gossip.start()
    try:
        yield
        settle(gossips)
        together([gossip.stop for gossip in gossips])
    finally:
        for gossip in gossips:
            gossip.abort()


def settle(gossips: Sequence[Gossip]) -> None:
    """What the learners of a job do before they take their mean."""
    together([gossip.pause for gossip in gossips])
    together([gossip.settle for gossip in gossips])


def engine_threads() -> list[str]:
    """Names of the engine's threads that are alive in this process."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("adpsgd")]


class ThreadNode(Node):
    """The learners of one super-learner as threads of this process."""

    def __init__(self, index: int, boxes: "Boxes") -> None:
        super().__init__()
        self.index, self.size = index, len(boxes)
        self._boxes = boxes

    @classmethod
    def connect(cls, size: int) -> "list[ThreadNode]":
        """The nodes' learners, from the first to the last shard."""
        boxes: Boxes = [[queue.SimpleQueue() for _ in range(size)] for _ in range(size)]
        return [cls(index, boxes) for index in range(size)]

    @override
    def start_gather(
        self, shards: Sequence[Tensor], vectors: Sequence[Tensor]
    ) -> Gathering:
        for box in self._boxes[self.index]:
            box.put([part.clone() for part in shards])
        sources = [self._boxes[source][self.index] for source in range(self.size)]
        return _ThreadGathering(sources, vectors)


Boxes = list[list["queue.SimpleQueue[list[Tensor]]"]]


class _ThreadGathering(Gathering):
    def __init__(
        self,
        sources: "list[queue.SimpleQueue[list[Tensor]]]",
        vectors: Sequence[Tensor],
    ) -> None:
        super().__init__([])
        self._sources, self._vectors = sources, vectors

    @override
    def wait(self, timeout: timedelta) -> float:
        all_parts = [box.get(timeout=timeout.total_seconds()) for box in self._sources]
        for place, vector in enumerate(self._vectors):
            vector.copy_(torch.cat([parts[place] for parts in all_parts]))
        return 0.0


class HeldTransport(Transport):
    """Payloads wait at a gate, words pass: an exchange can be held under way."""

    def __init__(self, inner: Transport) -> None:
        self.index, self.size = inner.index, inner.size
        self.gate, self.arrived = threading.Event(), threading.Event()
        self._inner = inner

    @override
    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        pending = self._inner.post_receive(peer, lane, into)
        return _Held(pending, self) if into.is_floating_point() else pending

    @override
    def post_send(self, peer: int, lane: int, tensor: Tensor) -> Pending:
        return self._inner.post_send(peer, lane, tensor)

    @override
    def average(self, vector: Tensor, timeout: timedelta) -> None:
        self._inner.average(vector, timeout)


class _Held:
    def __init__(self, inner: Pending, transport: HeldTransport) -> None:
        self._inner, self._transport = inner, transport

    def wait(self, timeout: timedelta) -> None:
        self._transport.arrived.set()
        assert self._transport.gate.wait(timeout.total_seconds())
        self._inner.wait(timeout)


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for what other threads bring about; fails after the tests' patience."""
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.001)
