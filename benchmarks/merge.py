"""How fast the engine merges and takes a snapshot, against the memory bandwidth.

A merge is ``w += d; d = 0; x = w``: two vectors are read and three are written. A
snapshot is ``x = w + d``: two read, one written. The limit is what `torch.Tensor.copy_`
moves on vectors of the same length in the same run: one read, one written. A copy also
fetches the lines that it overwrites and work in place does not, so that a ratio above 1
is possible.
"""

import torch

from benchmarks.timing import print_row, take_turns
from lightning_adpsgd.gossip import Gossip, GossipOptions
from lightning_adpsgd.mixing import Schedule
from lightning_adpsgd.node import Node
from lightning_adpsgd.topology import find_topology
from lightning_adpsgd.transport import ThreadTransport

SIZES = (1_000_000, 43_154_944)
REPETITIONS = 15
# Vectors that the operation must read or write at least once.
PASSES = {"copy_ (the limit)": 2, "snapshot": 3, "merge": 5}


def engine_without_peers(vector: torch.Tensor) -> Gossip:
    """An engine whose boundary work is a merge and nothing else."""
    (transport,) = ThreadTransport.connect(1)
    schedule = Schedule(find_topology("ring"), num_super_learners=1)
    return Gossip([vector], transport, Node(), schedule, GossipOptions())


def measure(num_elements: int) -> None:
    vector = torch.randn(num_elements)
    engine, other = engine_without_peers(vector), torch.empty_like(vector)
    works = {
        "copy_ (the limit)": lambda: other.copy_(vector),
        "snapshot": engine.resume,
        "merge": engine.after_update,
    }
    seconds = take_turns(works, REPETITIONS)
    num_bytes = vector.numel() * vector.element_size()
    limit = PASSES["copy_ (the limit)"] * num_bytes
    limit_rate = seconds["copy_ (the limit)"].per(limit / 1e9).median
    for name, taken in seconds.items():
        rate = taken.per(PASSES[name] * num_bytes / 1e9)
        milliseconds = type(taken)(*(1e3 * value for value in taken))
        print_row(
            f"{num_elements:>10,} {name}",
            f"{milliseconds:.2f}",
            f"{rate:.1f}",
            f"{rate.median / limit_rate:.2f}",
        )


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"float32, 1 thread, {REPETITIONS} repetitions: median [quartiles]")
    print_row("elements", "ms", "GB/s", "of the limit")
    for num_elements in SIZES:
        measure(num_elements)


if __name__ == "__main__":
    main()
