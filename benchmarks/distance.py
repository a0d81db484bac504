"""How long an epoch takes where two hosts are far apart.

The ideal is the waits alone. A step is a timed wait of 50 ms, so that the cores do not
matter, and the learners share the batches of an epoch. Rates have no limit: what counts
is how often somebody waits for a round trip. An epoch is over when the last learner has
made its last step.
"""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch.utils.data import DataLoader

from benchmarks import hosts
from benchmarks.hosts import Hosts
from benchmarks.quiet import quiet_trainer, quieten
from benchmarks.results import ROOT, Report, Row
from benchmarks.timing import print_row, spread
from benchmarks.work_sharing import STEP_S, Learner

NUM_HOSTS, NUM_BATCHES, NUM_EPOCHS = 2, 240, 3
ROUND_TRIPS = {"none": 0.0, "50 ms": 0.05, "200 ms": 0.2}
METHODS = {1: ("adpsgd", "ddp"), 2: ("hadpsgd", "ddp")}
LIMIT_S = 240.0
# Beyond it an epoch of ddp takes minutes.
LONGEST_OF_DDP_S = 0.05


class Case(NamedTuple):
    """A fit: the strategy, and the number of learners of a host."""

    method: str
    per_host: int

    @property
    def ideal_s(self) -> float:
        """The seconds of an epoch, if only the waits took time."""
        return NUM_BATCHES * STEP_S / (NUM_HOSTS * self.per_host)


def learn(method: str, per_host: int, folder: Path) -> None:
    """Trains as the learners of one host, and leaves their figures in the folder."""
    torch.set_num_threads(1)
    quieten()
    warnings.simplefilter("ignore")
    trainer = quiet_trainer(
        method,
        devices=per_host,
        num_nodes=NUM_HOSTS,
        max_epochs=NUM_EPOCHS,
        use_distributed_sampler=True,
    )
    loader = DataLoader(RandomDataset(32, NUM_BATCHES), shuffle=True)
    trainer.fit(Learner(folder, STEP_S), loader)


def seconds_of(case: Case, emulated: Hosts) -> list[float]:
    """The seconds of each epoch, until the last learner was done.

    Raises:
        RuntimeError: A host has failed, or took too long.
    """
    with tempfile.TemporaryDirectory() as name:
        words = [sys.executable, __file__, case.method, str(case.per_host), name]

        def command(host: int) -> list[str]:
            place = [f"NODE_RANK={host}", f"PYTHONPATH={ROOT}"]
            return ["env", "-u", "GROUP_RANK", *place, *words]

        hosts.check_ended_well(emulated.run(command, LIMIT_S))
        ranks = range(NUM_HOSTS * case.per_host)
        figures = [json.loads((Path(name) / f"{r}.json").read_text()) for r in ranks]
    return [max(one[0] for one in epoch) for epoch in zip(*figures, strict=True)]


def rows_at(round_trip: str) -> Iterator[Row]:
    """The rows of one distance."""
    delay_s = ROUND_TRIPS[round_trip] / 2
    with hosts.emulated(NUM_HOSTS, delay_s=delay_s) as emulated:
        for per_host, methods in METHODS.items():
            for case in (Case(method, per_host) for method in methods):
                if case.method == "ddp" and 2 * delay_s > LONGEST_OF_DDP_S:
                    continue
                where = {
                    "hosts": f"{NUM_HOSTS} x {per_host}",
                    "round trip": round_trip,
                    "method": case.method,
                }
                value = spread(seconds_of(case, emulated))
                yield Row(where, value, "s", value.median / case.ideal_s)


def measure(quick: bool = False) -> Report:
    """Measures the time of epochs by the distance of the hosts."""
    report = Report(
        f"The time of an epoch of {NUM_BATCHES} batches of {1e3 * STEP_S:.0f} ms, "
        f"shared by learners on {NUM_HOSTS} hosts, by the round trip between these.",
        limit="the waits alone",
        notes=["adpsgd and hadpsgd share epochs by default, ddp has equal shares."],
    )
    if hosts.are_missing(report):
        return report
    for round_trip in ["50 ms"] if quick else ROUND_TRIPS:
        for row in rows_at(round_trip):
            what = " ".join(map(str, row.case.values()))
            print_row(what, f"{row.value.median:.2f} s", f"{row.ratio:.2f}")
            report.rows.append(row)
    report.skipped["ddp, 200 ms"] = "not run: it takes minutes for an epoch"
    return report


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    learn(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
