"""How fast the engine merges and takes a snapshot, against the memory bandwidth.

A merge is ``w += d; d = 0; x = w``: two vectors are read and three are written. A
snapshot is ``x = w + d``: two read, one written. The limit is what `torch.Tensor.copy_`
moves on vectors of the same length in the same run: one read, one written. A copy also
fetches the lines that it overwrites and work in place does not, so that a ratio above 1
is possible.
"""

import torch

from benchmarks.results import Report, Row, Target
from benchmarks.timing import Spread, print_row, take_turns
from lightning_adpsgd.gossip import Gossip, GossipOptions
from lightning_adpsgd.mixing import Schedule
from lightning_adpsgd.node import Node
from lightning_adpsgd.topology import find_topology
from lightning_adpsgd.transport import ThreadTransport

SIZES = (1_000_000, 43_154_944)
REPETITIONS = 15
# Vectors that the operation must read or write at least once.
LIMIT = "copy_ (the limit)"
PASSES = {LIMIT: 2, "snapshot": 3, "merge": 5}


def engine_without_peers(vector: torch.Tensor) -> Gossip:
    """An engine whose boundary work is a merge and nothing else."""
    (transport,) = ThreadTransport.connect(1)
    schedule = Schedule(find_topology("ring"), num_super_learners=1)
    return Gossip([vector], transport, Node(), schedule, GossipOptions())


def measure_size(num_elements: int, repetitions: int) -> list[Row]:
    """Rates of the three on vectors of this length."""
    vector = torch.randn(num_elements)
    engine, other = engine_without_peers(vector), torch.empty_like(vector)
    works = {
        LIMIT: lambda: other.copy_(vector),
        "snapshot": engine.resume,
        "merge": engine.after_update,
    }
    seconds = take_turns(works, repetitions)
    gigabytes = {name: PASSES[name] * 4 * num_elements / 1e9 for name in works}
    limit = gigabytes[LIMIT] / seconds[LIMIT].median
    return [
        row(num_elements, name, taken, gigabytes[name], limit)
        for name, taken in seconds.items()
    ]


def row(
    num_elements: int, name: str, taken: Spread, gigabytes: float, limit: float
) -> Row:
    rate = taken.per(gigabytes)
    ratio = rate.median / limit
    print_row(f"{num_elements:>10,} {name}", f"{rate:.1f} GB/s", f"{ratio:.2f}")
    case = {"elements": f"{num_elements:,}", "operation": name}
    return Row(case, rate, "GB/s", ratio, details={"ms": 1e3 * taken.median})


def measure(quick: bool = False) -> Report:
    """Merge and snapshot beside a copy, at 1 million and at 43 million elements."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = Report(
        "Merge and snapshot of the engine, against a copy in memory (1 thread).",
        limit="the bandwidth of copy_",
        notes=["Bytes that an operation must read or write at least once, per second."],
    )
    for num_elements in SIZES:
        report.rows += measure_size(num_elements, 7 if quick else REPETITIONS)
    report.targets += [
        Target(
            f"{found.case['operation']}, {found.case['elements']} elements, of copy_",
            0.8,
            found.ratio,
        )
        for found in report.rows
        if found.ratio is not None and found.case["operation"] != LIMIT
    ]
    return report
