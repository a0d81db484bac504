"""What checksums cost an exchange: two hosts alternate exchanges with and without them.

The two learners of one job, on emulated hosts, exchange weights over Gloo; at every
other exchange both ends take 0 for the checksum of whatever goes and comes. The rest is
the same code in the same processes. On a shaped link, one chunk is summed while another
crosses, so the clock shows less than the processor time. The report has both, and the
time within the checksums themselves.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import hosts, learners
from benchmarks.learners import Place
from benchmarks.overlap import RATES
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread
from lightning_adpsgd.gossip import exchange
from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.process_group import DistributedTransport

NUM_ELEMENTS = 8_556_010  # those of `workload`
TURNS, WARMUPS = 12, 2  # both even, so that neither is first more often
LIMIT_S = 170.0
TIMEOUT = timedelta(minutes=1)
BOUND = 0.02
LINKS = {"unshaped": None, **RATES}


class Taken(NamedTuple):
    """Seconds of one exchange at one end.

    Attributes:
        wall: From the question to the last word.
        processor: Processor seconds of all threads.
        sums: Part of `processor` that is spent within checksums.
    """

    wall: float
    processor: float
    sums: float


class Switch:
    """Stands in for the checksum of exchanges: counts its time, and can leave it out.

    Attributes:
        on: Whether checksums are taken.
        seconds: Processor seconds within them.
    """

    def __init__(self) -> None:
        self.on, self.seconds, self._checksum = True, 0.0, exchange.checksum

    def __call__(self, payload: Tensor) -> int:
        """The checksum, or 0."""
        if not self.on:
            return 0
        begin = time.thread_time()
        found = self._checksum(payload)
        self.seconds += time.thread_time() - begin
        return found


def program(turns: int) -> Callable[[Place], list[Taken]]:
    """Measures exchanges in pairs: one with checksums and one without."""

    def run(place: Place) -> list[Taken]:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        switch = exchange.checksum = Switch()
        schedule = Schedule(find_topology("ring"), num_super_learners=2)
        weights = torch.randn(NUM_ELEMENTS)
        engine = Gossip(
            [weights],
            DistributedTransport(group),
            SuperLearnerGroup(),
            Members.fixed(schedule, dist.get_rank()),
            GossipOptions(),
        )
        engine.start()
        rounds = itertools.count(1)
        taken = []
        for turn in range(WARMUPS + turns):
            # Connections become faster with use: each is first in every other turn.
            pair = {}
            for on in (True, False) if turn % 2 else (False, True):
                switch.on = on
                pair[on] = one_exchange(engine, schedule, rounds, switch)
            taken += [pair[True], pair[False]]
        engine.pause()
        dist.barrier()
        engine.settle()
        engine.stop()
        return taken[2 * WARMUPS :]

    return run


def one_exchange(
    engine: Gossip, schedule: Schedule, rounds: Iterator[int], switch: Switch
) -> Taken:
    """Makes an exchange that learner 0 asks for, and waits until both ends are done."""
    before, index = engine.statistics().exchanges, dist.get_rank()
    dist.barrier()
    begin = time.monotonic(), time.process_time(), switch.seconds
    while index == 0:
        engine.after_update()
        if schedule.asks(0, next(rounds)):
            break
    while engine.statistics().exchanges == before:
        engine.threads.raise_if_failed()
        # Wall time is learner 0's; processor time learner 1's, which polls seldom.
        time.sleep(0.01 if index else 0.0005)
    end = time.monotonic(), time.process_time(), switch.seconds
    dist.barrier()
    return Taken(*(e - b for b, e in zip(begin, end, strict=True)))


def rows(link: str, asking: list[Taken], answering: list[Taken]) -> Iterator[Row]:
    """A row with and one without; each exchange is compared with that beside it."""
    for first, name in enumerate(("with", "without")):
        wall = spread(1e3 * taken.wall for taken in asking[first::2])
        ends = answering[first::2]
        ratio = beside_bare([t.wall for t in asking], first)
        details = {
            "processor ms, of the end that answers": _median(t.processor for t in ends),
            "of that without": beside_bare([t.processor for t in answering], first),
            "ms within checksums": _median(t.sums for t in ends),
        }
        print_row(f"{link}, {name}", f"{wall:.1f} ms", f"{ratio:.3f}")
        case = {"link": link, "checksums": name}
        yield Row(case, wall, "ms an exchange", ratio, details=details)


def beside_bare(seconds: list[float], first: int) -> float:
    """The median ratio to the exchange without checksums of the same turn."""
    pairs = zip(seconds[first::2], seconds[1::2], strict=True)
    return spread(taken / bare for taken, bare in pairs).median


def _median(seconds: Iterable[float]) -> float:
    return spread(1e3 * s for s in seconds).median


def measure(quick: bool = False) -> Report:
    """Exchanges with and without, on an unshaped link and on both shaped ones."""
    report = Report(
        f"What checksums cost an exchange of {4e-6 * NUM_ELEMENTS:.0f} MB (float32) "
        "between two hosts.",
        limit="without",
        notes=[
            "The bound is on the time that an exchange takes; the processor time that "
            "checksums take beside the wire stands next to it."
        ],
    )
    if hosts.are_missing(report):
        return report
    torch.set_num_threads(1)
    with hosts.emulated(2) as emulated:
        for link, rate in LINKS.items():
            emulated.shape(rate)
            run = program(4 if quick else TURNS)
            report.rows += rows(link, *learners.run(run, 2, LIMIT_S, emulated))
    report.targets += targets(report.rows)
    return report


def targets(found: list[Row]) -> Iterator[Target]:
    """The bounds set beforehand, for links that weights cross in training."""
    for row in found:
        link = str(row.case["link"])
        if row.case["checksums"] == "with" and link in RATES:
            claim = f"checksums, {link}: time that they add to an exchange, of it"
            yield Target(claim, BOUND, (row.ratio or 0.0) - 1, at_least=False)
