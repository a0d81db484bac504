"""What an exchange costs the processors of its two ends, by what carries it.

Four learners on emulated hosts train at 200 Mbit/s and exchange as often as the link
allows (`cpu_share=1`), on cores that all of them share. Linux counts the processor time
of each thread (`schedstat`). That of the engine's own threads and that of Gloo's, which
Python does not know, is divided by the ends of exchanges. The kernel's work on packets
outside of any thread (softirq) is counted by the tick, for the whole machine.
"""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from typing_extensions import override

from benchmarks import hosts, learners
from benchmarks.feed import Task
from benchmarks.hosts import Hosts
from benchmarks.learners import Place
from benchmarks.lightning_programs import train
from benchmarks.overlap import LIMIT_S
from benchmarks.results import Report, Row
from benchmarks.timing import print_row, spread
from lightning_adpsgd import HADPSGDStrategy

NUM_HOSTS, RATE, TURNS = 4, "200mbit", 3
TASK = Task(seconds=10.0)
WAYS: dict[str, dict[str, Any]] = {
    "gloo": {},
    "gloo, bfloat16": {"wire_dtype": torch.bfloat16},
}
_NAME, _TICK_S = "adpsgd-", 1 / os.sysconf("SC_CLK_TCK")


class Taken(NamedTuple):
    """Processor seconds, and the number of ends of exchanges.

    Attributes:
        own: Seconds of the engine's threads.
        network: Seconds of threads unknown to Python, which are Gloo's.
        softirq: Seconds of the machine's packet processing.
        ends: Exchanges of this learner.
    """

    own: float
    network: float
    softirq: float
    ends: int

    def since(self, before: "Taken") -> "Taken":
        """The difference from an earlier reading."""
        return Taken(
            self.own - before.own,
            self.network - before.network,
            self.softirq - before.softirq,
            self.ends - before.ends,
        )


class Cost(NamedTuple):
    """Milliseconds per end of an exchange, in the fields of `Taken`."""

    own: float
    network: float
    softirq: float


@dataclass
class Watch(L.Callback):
    """Reads the clocks of this process's threads from the first step to the last."""

    first: Taken | None = None
    last: Taken | None = None

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.first = self.first or take(trainer.strategy)

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.last = take(trainer.strategy)


def take(strategy: HADPSGDStrategy) -> Taken:
    """Reads the clocks."""
    known = {str(thread.native_id): thread for thread in threading.enumerate()}
    seconds = {"own": 0.0, "network": 0.0}
    for task in Path("/proc/self/task").iterdir():
        if task.name not in known:
            # Backward passes on a CPU run in the thread that asks for them.
            seconds["network"] += processor_s(task)
        elif known[task.name].name.startswith(_NAME):
            seconds["own"] += processor_s(task)
    statistics = strategy.gossip_statistics()
    assert statistics is not None
    return Taken(**seconds, softirq=softirq_s(), ends=statistics.exchanges)


def processor_s(task: Path) -> float:
    """The processor seconds of one thread; 0 if it has just ended."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def softirq_s() -> float:
    """The softirq seconds of all cores since they were started."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(words[7]) * _TICK_S


def program(place: Place, task: Task, dials: dict[str, Any]) -> Taken:
    """The program of one learner; returns what it has taken."""
    strategy = HADPSGDStrategy("ring", "async", 1, cpu_share=1.0, **dials)
    watch = Watch()
    train(place, task, strategy, 1, place.world_size, [watch])
    assert watch.first is not None
    assert watch.last is not None
    return watch.last.since(watch.first)


def cost(emulated: Hosts, task: Task, dials: dict[str, Any]) -> Cost:
    """The cost of one end of an exchange, over all learners of a run."""
    runs = learners.run(
        lambda place: program(place, task, dials), NUM_HOSTS, LIMIT_S, emulated
    )
    ms_per_end = 1e3 / sum(run.ends for run in runs)
    return Cost(
        ms_per_end * sum(run.own for run in runs),
        ms_per_end * sum(run.network for run in runs),
        # Each learner has seen the whole machine's.
        ms_per_end * max(run.softirq for run in runs),
    )


def measure(quick: bool = False) -> Report:
    """Measures all ways in turn."""
    report = Report(
        "Processor time of one end of an exchange of 34 MB, at 200 Mbit/s, while four "
        "learners train on shared cores.",
        limit="gloo",
        notes=["softirq is sampled by the tick, and of the whole machine."],
    )
    if hosts.are_missing(report):
        return report
    torch.set_num_threads(1)
    costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
    with hosts.emulated(NUM_HOSTS, RATE) as emulated:
        for _ in range(1 if quick else TURNS):
            for way, dials in WAYS.items():
                costs[way].append(cost(emulated, TASK, dials))
    report.rows += [row(way, costs) for way in WAYS]
    return report


def row(way: str, costs: dict[str, list[Cost]]) -> Row:
    """The row of one way: the total cost of an end, and its parts."""
    total = {name: spread(map(sum, found)) for name, found in costs.items()}
    ratio = total[way].median / total["gloo"].median
    names = {"own": "engine", "network": "Gloo", "softirq": "softirq"}
    details = {
        f"ms, {shown}": spread(getattr(one, name) for one in costs[way]).median
        for name, shown in names.items()
    }
    print_row(way, f"{total[way]:.1f} ms", f"{ratio:.3f} of gloo")
    return Row({"carried by": way}, total[way], "ms", ratio, details=details)
