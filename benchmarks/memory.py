"""The memory that the engine takes beside the weights, as the system counts it.

Super-learners exchange a vector over Gloo and merge. They look ahead, as by default.
The figure is the growth of a process' peak of resident memory over what it had with the
vector alone, in units of the vector. A super-learner of two learners adds what it
gathers.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.results import Report, Row, Target
from benchmarks.timing import Spread, print_row
from lightning_adpsgd.coordination.groups import Groups, make_groups
from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.process_group import DistributedTransport

ELEMENTS = 43_154_944
WIRES = {"float32": None, "bfloat16": torch.bfloat16, "int8": torch.int8}
TIMEOUT = timedelta(minutes=1)
LIMIT_S = 120
NUM_STEPS = 12
BOUND = 3.0


def measure(quick: bool = False) -> Report:
    """Measures one learner's engine, by wire dtype, and a super-learner of two."""
    elements = ELEMENTS // 8 if quick else ELEMENTS
    report = Report(
        f"Host memory of the engine beside {elements:,} weights in float32.",
        limit="the weights",
        notes=["The peak while exchanges run and merges happen."],
    )
    for size in (1, 2):
        for wire in WIRES if size == 1 else ("float32",):
            copies = max(run(size, wire, elements)) / (4 * elements)
            print_row(f"N = {size}, {wire}", f"{copies:.2f} copies")
            case = {"learners in a super-learner": size, "wire": wire}
            value = Spread(copies, copies, copies)
            report.rows.append(Row(case, value, "copies of the weights", copies))
            claim = f"N = {size}, {wire}: copies on the host"
            report.targets.append(Target(claim, BOUND, copies, at_least=False))
    return report


def run(size: int, wire: str, elements: int) -> list[float]:
    """Bytes that the engine added in each of two super-learners of `size`."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(2 * size)]
        processes = [
            context.Process(
                target=learner, args=(rank, size, wire, elements, Path(folder), sender)
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            return [receive(receiver) for receiver, _ in pipes]
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def receive(receiver: Connection) -> float:
    if not receiver.poll(LIMIT_S):
        raise TimeoutError(f"a learner reported nothing within {LIMIT_S} s")
    return receiver.recv()


def learner(
    rank: int, size: int, wire: str, elements: int, folder: Path, sender: Connection
) -> None:
    torch.set_num_threads(1)
    world_size = 2 * size
    dist.init_process_group(
        "gloo", f"file://{folder}/store", world_size=world_size, rank=rank
    )
    # Written, because an untouched page takes no memory yet.
    vector = torch.zeros(elements // size * size).fill_(0.1)
    groups = make_groups(Partition((size, size)), TIMEOUT, vector.device)
    dist.barrier()
    reset_peak()
    before = resident_bytes("VmRSS")
    with running(vector, groups, WIRES[wire]) as engine:
        for _ in range(NUM_STEPS):
            number = engine.statistics().exchanges
            engine.before_update()
            engine.after_update()
            while size == 1 and engine.statistics().exchanges == number:
                engine.threads.raise_if_failed()
                time.sleep(0.001)  # the exchange needs the interpreter, too
    sender.send(resident_bytes("VmHWM") - before)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def running(
    vector: Tensor, groups: Groups, wire_dtype: torch.dtype | None
) -> Iterator[Gossip]:
    """A context with an engine that exchanges."""
    transport = DistributedTransport(groups.counterparts[0])
    schedule = Schedule(find_topology("ring"), num_super_learners=2)
    options = GossipOptions(wire_dtype=wire_dtype, timeout=TIMEOUT, look_ahead=True)
    members, group = (
        Members.fixed(schedule, transport.index),
        SuperLearnerGroup(groups.shards),
    )
    engine = Gossip([vector], transport, group, members, options)
    engine.start()
    yield engine
    engine.pause()
    dist.barrier()
    engine.settle()
    engine.stop()


def reset_peak() -> None:
    """Lets the system count the peak again."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(field: str) -> float:
    """`VmRSS`, resident at present, or `VmHWM`, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(f"{field}:"))
    return float(line.split()[1]) * 1024
