"""How fast two processes exchange a vector, against a plain socket on loopback.

The limit sends a vector both ways at once over one TCP connection, one thread for each
direction, with buffers that are allocated beforehand. `exchange` is the engine: ask,
cross each chunk, average it into the communication side at both ends.
"""

import itertools
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.results import Report, Row
from benchmarks.timing import Spread, print_row, take_turns
from lightning_adpsgd.gossip import Gossip, GossipOptions
from lightning_adpsgd.mixing import Schedule
from lightning_adpsgd.node import Node
from lightning_adpsgd.topology import find_topology
from lightning_adpsgd.transport import DistributedTransport

SIZES = (1_000_000, 43_154_944)
REPETITIONS, WARMUPS = 9, 2
LIMIT = "socket, both ways (the limit)"
TIMEOUT = timedelta(minutes=1)


class Wire:
    """One TCP connection between the two processes, used both ways at once."""

    def __init__(self, index: int, folder: Path) -> None:
        self._socket = listen(folder) if index == 0 else connect(folder)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def cross(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        """Sends one tensor while it receives another of the same size."""
        sent = outgoing.numpy().data.cast("B")
        sender = threading.Thread(target=self._socket.sendall, args=(sent,))
        sender.start()
        room = incoming.numpy().data.cast("B")
        while len(room):
            room = room[self._socket.recv_into(room) :]
        sender.join()

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


def listen(folder: Path) -> socket.socket:
    with socket.create_server(("localhost", 0)) as server:
        unfinished = folder / "port.partial"
        unfinished.write_text(str(server.getsockname()[1]))
        unfinished.rename(folder / "port")
        return server.accept()[0]


def connect(folder: Path) -> socket.socket:
    while not (folder / "port").exists():
        time.sleep(0.01)
    return socket.create_connection(("localhost", int((folder / "port").read_text())))


def exchange_once(engine: Gossip, schedule: Schedule, rounds: Iterator[int]) -> None:
    """Steps on to the next round in which learner 0 asks, and waits for the answer."""
    before = engine.statistics().exchanges
    for round in rounds:
        engine.after_update()
        if schedule.asks(0, round):
            break
    while engine.statistics().exchanges == before:
        engine.raise_if_failed()
        time.sleep(0.0002)


def time_exchanges(
    transport: DistributedTransport, vector: torch.Tensor, repetitions: int
) -> Spread:
    """Seconds of an exchange that learner 0 asks for, its merge included."""
    schedule = Schedule(find_topology("ring"), num_super_learners=2)
    engine = Gossip([vector], transport, Node(), schedule, GossipOptions())
    engine.start()
    dist.barrier()
    seconds = Spread(0.0, 0.0, 0.0)
    if transport.index == 0:
        rounds = itertools.count(1)
        works = {"exchange": lambda: exchange_once(engine, schedule, rounds)}
        seconds = take_turns(works, repetitions, WARMUPS)["exchange"]
    engine.pause()
    dist.barrier()
    engine.settle()
    engine.stop()
    return seconds


def measure_size(
    transport: DistributedTransport, wire: Wire, num_elements: int, repetitions: int
) -> dict[str, Spread]:
    """Seconds of each way on vectors of this length; of use in learner 0 alone."""
    outgoing, incoming = torch.randn(num_elements), torch.empty(num_elements)
    works = {
        LIMIT: lambda: wire.cross(outgoing, incoming),
    }
    seconds = take_turns(works, repetitions, WARMUPS)
    seconds["exchange"] = time_exchanges(transport, outgoing, repetitions)
    return seconds


def work(index: int, folder: Path, repetitions: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=index, world_size=2
    )
    group = dist.new_group([0, 1], timeout=TIMEOUT, backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    transport, wire = DistributedTransport(group), Wire(index, folder)
    found = {size: measure_size(transport, wire, size, repetitions) for size in SIZES}
    if index == 0:
        (folder / "found.json").write_text(json.dumps(found))
    wire.close()
    dist.destroy_process_group()


def rows(num_elements: int, seconds: dict[str, Spread]) -> Iterator[Row]:
    for name, taken in seconds.items():
        rate = taken.per(4 * num_elements / 1e9)
        ratio = seconds[LIMIT].median / taken.median
        print_row(f"{num_elements:>10,} {name}", f"{rate:.2f} GB/s", f"{ratio:.2f}")
        case = {"elements": f"{num_elements:,}", "way": name}
        yield Row(case, rate, "GB/s", ratio, details={"ms": 1e3 * taken.median})


def measure(quick: bool = False) -> Report:
    """An exchange of two processes on loopback beside a socket of their own."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    report = Report(
        "An exchange of weights between two processes on loopback (float32), against "
        "a plain socket that carries as much both ways.",
        limit="the socket",
        notes=["GB/s are of one direction while both run."],
    )
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, args=(Path(folder), 5 if quick else REPETITIONS), nprocs=2)
        found = json.loads((Path(folder) / "found.json").read_text())
    for size, seconds in found.items():
        spreads = {name: Spread(*taken) for name, taken in seconds.items()}
        report.rows += rows(int(size), spreads)
    return report
