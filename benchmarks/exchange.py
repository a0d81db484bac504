"""How fast two processes exchange a vector, against a plain socket on loopback.

The limit sends a vector both ways at once over one TCP connection, one thread for each
direction, with buffers that are allocated beforehand. `exchange` is the engine: ask,
cross each chunk, average it into the communication side at both ends; once over Gloo
and once over the links of islands. Checksums are timed where they are taken, in the
midst of an exchange, and stand beside a copy of the vector within memory.
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
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.results import Report, Row
from benchmarks.timing import Spread, print_row, take_turns
from lightning_adpsgd.gossip import exchange
from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.base import Transport
from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.peer_info import PeerInfo
from lightning_adpsgd.transport.links.sockets import Address
from lightning_adpsgd.transport.links.transport import LinkTransport
from lightning_adpsgd.transport.process_group import DistributedTransport

SIZES = (1_000_000, 43_154_944)
REPETITIONS, WARMUPS = 9, 2
LIMIT = "socket, both ways (the limit)"
OVER_GLOO, OVER_LINKS = "exchange", "exchange, over links"
COPY, SUMS = "copy within memory", "checksums of both messages"
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
    """Advances to the next round in which learner 0 asks, and waits for the answer."""
    before = engine.statistics().exchanges
    for round in rounds:
        engine.after_update()
        if schedule.asks(0, round):
            break
    while engine.statistics().exchanges == before:
        engine.threads.raise_if_failed()
        time.sleep(0.0002)


def time_exchanges(
    transport: Transport, vector: torch.Tensor, repetitions: int
) -> Spread:
    """Seconds of an exchange that learner 0 asks for, its merge included."""
    schedule = Schedule(find_topology("ring"), num_super_learners=2)
    members = Members.fixed(schedule, transport.index)
    engine = Gossip([vector], transport, SuperLearnerGroup(), members, GossipOptions())
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


@contextmanager
def linked(index: int, folder: Path, name: str) -> Iterator[LinkTransport]:
    """Connects the two processes as islands; uses a subfolder of that name."""
    info = PeerInfo(index, f"process {index}", "benchmark", model="")
    transport = LinkTransport(info, Credentials())
    ready = threading.Event()
    listener = transport.listen(Address("127.0.0.1", 0), lambda *_: ready.set())
    unfinished = folder / f"{name}-{index}.partial"
    unfinished.write_text(str(listener.address))
    unfinished.rename(folder / f"{name}-{index}")
    dist.barrier()
    address = (folder / f"{name}-{1 - index}").read_text()
    transport.connect(1 - index, Address.parse(address))
    assert ready.wait(TIMEOUT.total_seconds())
    yield transport
    dist.barrier()
    listener.close()
    transport.close()


class Stopwatch:
    """Processor time of the checksums that exchanges take while it runs."""

    def __init__(self) -> None:
        self.seconds, self._checksum = 0.0, exchange.checksum

    def __enter__(self) -> "Stopwatch":
        exchange.checksum = self._timed
        return self

    def __exit__(self, *_: object) -> None:
        exchange.checksum = self._checksum

    def _timed(self, payload: torch.Tensor) -> int:
        begin = time.thread_time()
        found = self._checksum(payload)
        self.seconds += time.thread_time() - begin
        return found


def measure_size(
    transport: DistributedTransport,
    wire: Wire,
    folder: Path,
    num_elements: int,
    repetitions: int,
) -> dict[str, Spread]:
    """The seconds of each way for vectors of this length; valid in learner 0 only."""
    outgoing, incoming = torch.randn(num_elements), torch.empty(num_elements)
    works = {
        LIMIT: lambda: wire.cross(outgoing, incoming),
        COPY: lambda: incoming.copy_(outgoing),
    }
    seconds = take_turns(works, repetitions, WARMUPS)
    seconds[OVER_GLOO] = time_exchanges(transport, outgoing, repetitions)
    with (
        linked(transport.index, folder, f"address-{num_elements}") as links,
        Stopwatch() as watch,
    ):
        seconds[OVER_LINKS] = time_exchanges(links, outgoing, repetitions)
    mean = watch.seconds / (repetitions + WARMUPS)
    seconds[SUMS] = Spread(mean, mean, mean)
    return seconds


def work(index: int, folder: Path, repetitions: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=index, world_size=2
    )
    group = dist.new_group([0, 1], timeout=TIMEOUT, backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    transport, wire = DistributedTransport(group), Wire(index, folder)
    found = {
        size: measure_size(transport, wire, folder, size, repetitions) for size in SIZES
    }
    if index == 0:
        (folder / "found.json").write_text(json.dumps(found))
    wire.close()
    dist.destroy_process_group()


def rows(num_elements: int, seconds: dict[str, Spread]) -> Iterator[Row]:
    for name in (LIMIT, OVER_GLOO, OVER_LINKS):
        taken = seconds[name]
        rate = taken.per(4 * num_elements / 1e9)
        ratio = seconds[LIMIT].median / taken.median
        print_row(f"{num_elements:>10,} {name}", f"{rate:.2f} GB/s", f"{ratio:.2f}")
        case = {"elements": f"{num_elements:,}", "way": name}
        yield Row(case, rate, "GB/s", ratio, details={"ms": 1e3 * taken.median})
    yield checksum_row(num_elements, seconds)


def checksum_row(num_elements: int, seconds: dict[str, Spread]) -> Row:
    """The row of checksums: two, one each way, read as many bytes as a copy moves."""
    ratio = seconds[COPY].median / seconds[SUMS].median
    share = 100 * seconds[SUMS].median / seconds[OVER_LINKS].median
    at_a_gigabit = 100 * seconds[SUMS].median / (32 * num_elements / 1e9)
    rate = seconds[SUMS].per(8 * num_elements / 1e9)
    print_row(
        f"{num_elements:>10,} {SUMS}", f"{rate:.2f} GB/s", f"{share:.1f}% of exchange"
    )
    return Row(
        {"elements": f"{num_elements:,}", "way": SUMS},
        rate,
        "GB/s",
        ratio,
        "a copy within memory",
        table="Checksums",
        details={
            "ms": 1e3 * seconds[SUMS].median,
            "% of the exchange over links": share,
            "% of an exchange at 1 Gbit/s": at_a_gigabit,
        },
    )


def measure(quick: bool = False) -> Report:
    """Measures an exchange of two processes on loopback beside a plain socket."""
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
