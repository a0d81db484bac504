"""Measures a machine and its link for `prediction.model`.

The measurements run the engine's own functions: its arithmetic alone, and with one peer
the speed of the link and what a round costs beyond it. A JSON file keeps the numbers.
"""

import json
import math
import os
import socket
import statistics
import threading
import time
import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing import SimpleQueue, get_context
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from lightning_adpsgd.dials import check_count, check_positive
from lightning_adpsgd.files import write_json
from lightning_adpsgd.gossip.codecs import Codec, make_codec
from lightning_adpsgd.gossip.engine import GossipOptions
from lightning_adpsgd.mixing.rounds import RoundMixer
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.prediction.model import Costs
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.base import SYNCHRONOUS_LANE, one_behind
from lightning_adpsgd.transport.process_group import DistributedTransport
from lightning_adpsgd.virtual.clock import BUCKET_BYTES, Link
from lightning_adpsgd.weights.replica import Replica

_START, _PATIENCE = timedelta(minutes=5), timedelta(minutes=2)
_REPETITIONS, _QUESTIONS = 5, 200
_CHUNK_ELEMENTS = GossipOptions.chunk_elements
# The processor time of an exchange in float32 as a multiple of its arithmetic. It
# includes network threads, the kernel, merges, and the caches that training loses.
# Measured over Gloo with 34 MB of weights at 1 Gbit/s and 200 Mbit/s, on one machine.
_ALL_WORK = 3.5


@dataclass(frozen=True)
class Calibration:
    """The speed of a machine and its link.

    Args:
        bandwidth: bytes per second of the link in each direction, while both ends send.
        latency: seconds that a message takes from one end of the link to the other.
        copy: seconds per byte of a copy in memory.
        exchange: seconds per byte of the arithmetic of an exchange.
        lattice: seconds per byte of the same, if 8 or 4 bits of a weight are sent.
        merge: seconds per byte of the merge of an exchange.
        round: seconds per byte of a round of two, in addition to its link.
        gradient: seconds per byte of an all-reduce of two, in addition to its link.
        cores: number of cores of this machine, which its learners share.
        step_seconds: seconds of a learner's step; None if it was not measured.
        step_processor_seconds: processor seconds of that step, in all threads together.

    Raises:
        TypeError: A value is no number.
        ValueError: A number is negative, zero where it must be positive, or non-finite.
    """

    bandwidth: float
    latency: float
    copy: float
    exchange: float
    lattice: float
    merge: float
    round: float
    gradient: float
    cores: int
    step_seconds: float | None = None
    step_processor_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None or name != "step_seconds":
                _check(name, value)

    @property
    def link(self) -> Link:
        """The measured link."""
        return Link(self.bandwidth, self.latency)

    def with_step(self, seconds: float) -> "Calibration":
        """The same, but a step takes these seconds; it keeps as many cores busy."""
        processor = self.step_processor_seconds * seconds
        processor /= self.step_seconds or seconds
        return replace(self, step_seconds=seconds, step_processor_seconds=processor)

    def costs(self, learners_per_machine: int = 1) -> Costs:
        """The processor work of communication if learners share a machine.

        Learners that wait for one another also need their cores at the same moment: to
        copy weights before a round and to merge after it, or to copy gradients into
        buckets and back. The rest of a round, apart from its link, is waiting.
        Exchanges use the cores that a step leaves free. If its processor seconds were
        not measured, that is all of them.

        Raises:
            TypeError: `learners_per_machine` is not whole.
            ValueError: `learners_per_machine` is below 1.
        """
        check_count("learners_per_machine", learners_per_machine)
        crowd = max(1.0, learners_per_machine / self.cores) - 1
        return Costs(
            round=self.round + crowd * min(self.round, self.copy + self.merge),
            gradient=self.gradient + crowd * min(self.gradient, 2 * self.copy),
            exchange=self.exchange,
            lattice=self.lattice,
            merge=self.merge,
            step=crowd * self.step_processor_seconds,
            work=_ALL_WORK * self.exchange,
            cores=self.cores / learners_per_machine,
            busy=self.step_processor_seconds / (self.step_seconds or math.inf),
            machine_cores=self.cores,
        )

    def write(self, path: str | Path) -> Path:
        """Writes the file, whole or not at all, and returns its path."""
        write_json(Path(path), asdict(self))
        return Path(path)


def read(path: str | Path) -> Calibration:
    """Reads a file that `Calibration.write` wrote.

    Raises:
        ValueError: The file is not a calibration; the message says why.
        OSError: The file cannot be read.
    """
    try:
        return Calibration(**json.loads(Path(path).read_text("utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a calibration: {error}; write it again with `python -m "
            "lightning_adpsgd calibrate`"
        ) from error


def _check(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        least = "positive" if name in _POSITIVE else "at least 0"
        found = f"{value!r} of type {type(value).__name__}"
        raise TypeError(f"`{name}` must be a number, {least}, got {found}")
    check_positive(name, value, or_zero=name not in _POSITIVE)


_POSITIVE = {"bandwidth", "cores", "step_seconds"}


# --- alone


def num_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_arithmetic(num_bytes: int) -> dict[str, float]:
    """Measures memory and arithmetic on float32 weights larger than the caches.

    Returns:
        `copy`, `exchange`, `lattice` and `merge` of `Calibration`, in one thread.
    """
    weights, other = (torch.randn(num_bytes // 4) for _ in range(2))
    replica = Replica([[weights]], _CHUNK_ELEMENTS, threading.Condition())
    full = make_codec(None, torch.float32)
    copy = _seconds(lambda: other.copy_(weights))
    both = _seconds(lambda: (_exchange(replica, full, other), replica.merge_all()))
    exchange = _seconds(lambda: _exchange(replica, full, other))
    seconds = {"copy": copy, "exchange": exchange, "merge": max(0.0, both - exchange)}
    # 4 bits take as long, to a few per cent.
    lattice = make_codec(torch.int8, torch.float32)
    seconds["lattice"] = _seconds(lambda: _exchange(replica, lattice, other))
    return {name: value / num_bytes for name, value in seconds.items()}


@torch.no_grad()
def _exchange(replica: Replica, codec: Codec, theirs: Tensor) -> None:
    stretches = theirs.split([len(chunk) for chunk in replica.chunks])
    for chunk, stretch in zip(replica.chunks, stretches, strict=True):
        mine = torch.empty_like(stretch)
        chunk.read(mine)
        pieces = zip(chunk.parts, chunk.split(mine), chunk.split(stretch), strict=True)
        for part, own, other in pieces:
            change = torch.empty_like(own)
            if codec.dtype != part.dtype:
                message = torch.empty(codec.length(len(own)), dtype=codec.dtype)
                codec.encode(own, message, part.place)
                # The peer is taken to have the same weights, which changes no duration.
                own, other = message, message.clone()
            codec.change(own, other, change, part.place)
            part.add(change, 0.5)


# --- with a peer


def measure_loopback(num_bytes: int) -> dict[str, float]:
    """Measures this machine's loopback between two processes, as `measure_wire` does.

    Raises:
        ProcessException: A process has died, or an error has ended it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    measured: SimpleQueue[dict[str, float]] = get_context("spawn").SimpleQueue()
    # It ends both if one dies; torch would wait minutes for a peer that has died.
    # As daemons they end with this process, which an interrupt may reach alone.
    spawn(_measure_end, (master, num_bytes, measured), nprocs=2, daemon=True)
    return measured.get()


def _measure_end(
    rank: int, master: str, num_bytes: int, measured: "SimpleQueue[dict[str, float]]"
) -> None:
    wire = measure_link(master, rank, num_bytes)
    if rank == 0:
        measured.put(wire)


def measure_link(master: str, rank: int, num_bytes: int) -> dict[str, float]:
    """Meets the other of two processes at `master`, and measures with it."""
    dist.init_process_group(
        "gloo", f"tcp://{master}", timeout=_START, rank=rank, world_size=2
    )
    try:
        return measure_wire(num_bytes)
    finally:
        dist.destroy_process_group()


def measure_wire(num_bytes: int) -> dict[str, float]:
    """Measures the link between two processes, the default group, which both call it.

    Returns:
        `bandwidth`, `latency`, `round` and `gradient` of `Calibration`.
    """
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    transport = DistributedTransport(group)
    weights = torch.randn(num_bytes // 4)
    latency = _ping(transport)
    crossing = _seconds(lambda: _swap(transport, weights), dist.barrier)
    # The exact mean would be computed by an all-reduce.
    thirds = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64) / 3
    schedule = Schedule(find_topology(thirds), 2)
    mixer = RoundMixer([weights], transport, SuperLearnerGroup(), schedule, _PATIENCE)
    round = _seconds(lambda: _mix(mixer), dist.barrier)
    gradient = _seconds(lambda: _reduce(weights), dist.barrier)
    link = Link(num_bytes / max(crossing - latency, 1e-9), latency)
    beyond = round - link.seconds(num_bytes)
    beside = gradient - link.allreduce_seconds(num_bytes, 2)
    return {
        "bandwidth": link.bandwidth,
        "latency": latency,
        "round": max(0.0, beyond) / num_bytes,
        "gradient": max(0.0, beside) / num_bytes,
    }


def _ping(transport: DistributedTransport) -> float:
    peer, word = 1 - transport.index, torch.zeros(1, dtype=torch.int64)
    seconds = []
    for _ in range(_QUESTIONS):
        begin = time.perf_counter()
        for turn in range(2):
            sends = turn == transport.index
            post = transport.post_send if sends else transport.post_receive
            post(peer, SYNCHRONOUS_LANE, word).wait(_PATIENCE)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) / 2


def _swap(transport: DistributedTransport, weights: Tensor) -> None:
    """Swaps weights chunk by chunk; posts a chunk before the last one has arrived."""
    peer = 1 - transport.index
    into = torch.empty_like(weights)
    pairs = zip(*(v.split(_CHUNK_ELEMENTS) for v in (into, weights)), strict=True)
    posted = (
        transport.post_all(SYNCHRONOUS_LANE, {peer: coming}, {peer: going})
        for coming, going in pairs
    )
    for pending in one_behind(posted):
        for half in pending:
            half.wait(_PATIENCE)


@torch.no_grad()
def _mix(mixer: RoundMixer) -> None:
    mixer.take_snapshot()
    mixer.mix()
    mixer.finish()


def _reduce(weights: Tensor) -> None:
    """Averages as DDP does: copies to buckets, reduces all at once, copies back."""
    parts = weights.split(BUCKET_BYTES // 4)
    buckets = [part.clone() for part in parts]
    works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
    for work, bucket, part in zip(works, buckets, parts, strict=True):
        assert work is not None
        work.wait()
        part.copy_(bucket.div_(2))


def _seconds(
    work: Callable[[], object], before: Callable[[], object] = lambda: None
) -> float:
    seconds = timeit.repeat(work, before, number=1, repeat=_REPETITIONS + 1)
    return statistics.median(seconds[1:])  # the first one allocates memory
