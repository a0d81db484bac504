"""How fast the engine merges, reads and looks ahead, against the memory bandwidth.

A merge is ``w += d``: two vectors are read and one is written. A snapshot is what an
exchange reads: w alone where nothing awaits its merge, else ``w + d``: one or two read,
one written. The last update, for the look ahead, takes a copy before the step and a
difference after it: three read, two written. All are of the whole vector, as if
exchanges had changed all of it; a merge without exchanges costs nothing. The limit is
what `torch.Tensor.copy_` moves on vectors of the same length in the same run: one read,
one written. A copy also fetches the cache lines that it overwrites, which work in place
does not, so a ratio above 1 is possible.
"""

import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.results import Report, Row, Target
from benchmarks.timing import Spread, print_row, take_turns
from lightning_adpsgd.gossip.engine import GossipOptions
from lightning_adpsgd.weights.look_ahead import LookAhead
from lightning_adpsgd.weights.replica import Part, Replica

SIZES = (1_000_000, 43_154_944)
REPETITIONS = 15
# Vectors that the operation must read or write at least once.
LIMIT = "copy_ (the limit)"
UPDATE = "the last update"
PASSES = {LIMIT: 2, "snapshot": 2, "snapshot, w + d": 3, "merge": 3, UPDATE: 5}


def merge(replica: Replica) -> None:
    for part in parts(replica):
        part.changed = True
    replica.merge()


def read(replica: Replica, into: Tensor, changed: bool) -> None:
    for part in parts(replica):
        part.changed = changed
    for chunk, place in zip(
        replica.chunks, into.split(GossipOptions().chunk_elements), strict=True
    ):
        chunk.read(place)


def find_update(ahead: LookAhead) -> None:
    ahead.begin_update()
    ahead.end_update()


def parts(replica: Replica) -> Iterator[Part]:
    return (part for chunk in replica.chunks for part in chunk.parts)


def measure_size(num_elements: int, repetitions: int) -> list[Row]:
    """The rates of the four on vectors of this length."""
    vector = torch.randn(num_elements)
    chunk_elements = GossipOptions().chunk_elements
    replica = Replica([[vector]], chunk_elements, threading.Condition())
    other, ahead = torch.empty_like(vector), LookAhead(replica, most_of_step=math.inf)
    works = {
        LIMIT: lambda: other.copy_(vector),
        "snapshot": lambda: read(replica, other, changed=False),
        "snapshot, w + d": lambda: read(replica, other, changed=True),
        "merge": lambda: merge(replica),
        UPDATE: lambda: find_update(ahead),
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
    """Measures them beside a copy, with 1 and 43 million elements."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = Report(
        "Merge, snapshot and last update, against a copy in memory (1 thread).",
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
