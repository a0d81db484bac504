"""How fast the engine's operations on a GPU are, against copies of the same bytes.

Merge and snapshot are as in `merge`, encoding and averaging those of each codec, all
over the papers' 43 million weights in chunks as the engine has them. Their limit is
`copy_` on the GPU. What crosses to the host and back does so chunk by chunk from pinned
memory; its limit is one copy of the whole vector.
"""

import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.compression import WIRES
from benchmarks.merge import SIZES, merge, read
from benchmarks.results import Row
from benchmarks.timing import print_row, take_turns
from lightning_adpsgd.gossip.codecs import Codec, make_codec
from lightning_adpsgd.gossip.engine import GossipOptions
from lightning_adpsgd.weights.replica import Replica
from lightning_adpsgd.weights.streams import to_device, to_host

HERE, ACROSS = "operations on the memory of the GPU", "between the GPU and the host"
COPY, COPY_OUT, COPY_IN = "copy_", "to the host, one copy", "to the GPU, one copy"

Works = dict[str, tuple[Callable[[], object], float, str]]
"""Of each operation: the work, the bytes that it must move, and its limit."""


def rows(device: str, repetitions: int, elements: int = SIZES[-1]) -> Iterator[Row]:
    """The rate of each operation, with its ratio to its limit."""
    works = {**_of_replica(device, elements), **_of_codecs(device, elements)}
    works |= _to_and_from_the_host(device, elements)
    timed = {name: _until_done(work, device) for name, (work, _, _) in works.items()}
    seconds = take_turns(timed, repetitions)
    rates = {name: seconds[name].per(1e-9 * works[name][1]) for name in works}
    for name, rate in rates.items():
        limit = works[name][2]
        ratio = rate.median / rates[limit].median
        print_row(name, f"{rate:.1f} GB/s", f"{ratio:.2f}")
        table, of = (HERE, COPY) if limit == COPY else (ACROSS, "one copy")
        details = {"ms": 1e3 * seconds[name].median}
        yield Row({"operation": name}, rate, "GB/s", ratio, of, table, details)


def matmul_rate(device: str, size: int = 8192, repetitions: int = 10) -> float:
    """1e12 operations a second of a product of bfloat16 matrices."""
    left, right = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    work = _until_done(lambda: left @ right, device)
    taken = take_turns({"product": work}, repetitions)["product"].median
    return 2 * size**3 / taken / 1e12


def _until_done(work: Callable[[], object], device: str) -> Callable[[], None]:
    def done() -> None:
        work()
        if device != "cpu":
            torch.accelerator.synchronize()

    return done


def _of_replica(device: str, elements: int) -> Works:
    vector = torch.randn(elements, device=device)
    replica = Replica([[vector]], GossipOptions().chunk_elements, threading.Condition())
    other, size = torch.empty_like(vector), vector.nbytes
    return {
        COPY: (lambda: other.copy_(vector), 2 * size, COPY),
        "snapshot": (lambda: read(replica, other, changed=False), 2 * size, COPY),
        "snapshot, w + d": (lambda: read(replica, other, True), 3 * size, COPY),
        "merge": (lambda: merge(replica), 3 * size, COPY),
    }


def _of_codecs(device: str, elements: int) -> Works:
    works: Works = {}
    for wire, dtype in WIRES.items():
        codec, size = make_codec(dtype, torch.float32), GossipOptions().chunk_elements
        sent = codec.dtype.itemsize * codec.length(size) / size
        coded = Coded(codec, device, elements, size)
        works[f"encode, {wire}"] = coded.encode, (4 + sent) * elements, COPY
        bytes_moved = (2 * sent + 4) * elements
        works[f"compare, {wire}"] = coded.change, bytes_moved, COPY
    return works


class Coded:
    """Chunks of a vector, and two messages about each."""

    def __init__(self, codec: Codec, device: str, elements: int, size: int) -> None:
        self._codec = codec
        self._chunks = torch.randn(elements, device=device).split(size)
        self._room = torch.empty(size, device=device)
        self._mine, self._theirs = (
            [self._message(len(chunk), device) for chunk in self._chunks]
            for _ in range(2)
        )

    def _message(self, length: int, device: str) -> Tensor:
        codec = self._codec
        return torch.empty(codec.length(length), dtype=codec.dtype, device=device)

    def encode(self) -> None:
        """Encodes all chunks."""
        for place, chunk in enumerate(self._chunks):
            self._codec.encode(chunk, self._mine[place], place)

    def change(self) -> None:
        """Compares two messages about each chunk, the second made anew by a copy.

        A comparison may overwrite it. The copy is in the time, and not in the bytes.
        """
        for place, chunk in enumerate(self._chunks):
            theirs = self._theirs[place].copy_(self._mine[place])
            into = self._room[: len(chunk)]
            self._codec.change(self._mine[place], theirs, into, place)


def _to_and_from_the_host(device: str, elements: int) -> Works:
    here = torch.randn(elements, device=device)
    host = torch.empty(elements, pin_memory=device != "cpu")
    size, chunk = here.nbytes, GossipOptions().chunk_elements
    pairs = list(zip(here.split(chunk), host.split(chunk), strict=True))

    def out() -> None:
        for a, b in pairs:
            to_host(a, b)

    def back() -> None:
        for a, b in pairs:
            to_device(b, a)

    return {
        COPY_OUT: (lambda: host.copy_(here, non_blocking=True), size, COPY_OUT),
        COPY_IN: (lambda: here.copy_(host, non_blocking=True), size, COPY_IN),
        "to the host, by chunks": (out, size, COPY_OUT),
        "to the GPU, by chunks": (back, size, COPY_IN),
    }
