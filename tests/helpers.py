"""What several test files of the engine share: sizes, threads, small worlds."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_adpsgd.gossip import Gossip, GossipOptions
from lightning_adpsgd.mixing import RoundMixer, Schedule
from lightning_adpsgd.topology import TOPOLOGIES, find_topology
from lightning_adpsgd.transport import Node, ThreadTransport

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
