"""How long the mean of all takes, in float32 and in few bits, over shaped links.

One learner on each of four hosts; their weights differ as those of learners do. The
limit is the link: what an all-reduce must send and receive, at its rate. Both ways take
turns. All learners wait for this mean at a validation, at a checkpoint and at the end.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import hosts
from benchmarks.hosts import Hosts
from benchmarks.results import ROOT, Report, Row
from benchmarks.timing import print_row, spread
from lightning_adpsgd.mixing.mean_of_all import average_whole
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.weights.flat import Span

NUM_HOSTS, NUM_WEIGHTS = 4, 8_500_000
RELATIVE_DISTANCE = 0.01
LINKS = {
    "1 Gbit/s": (1e9, 0.0),
    "200 Mbit/s": (2e8, 0.0),
    "200 Mbit/s, round trips of 100 ms": (2e8, 0.1),
}
BYTES = {"float32": 4, "few bits": 1}
REPEATS, LIMIT_S = 7, 300.0


def learn(repeats: int, folder: Path) -> None:
    """Takes the mean as the learner of one host, and leaves its figures in a folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, seconds = dist.get_rank(), {form: list[float]() for form in BYTES}
    weights = weights_of(rank)
    for form in list(BYTES) * repeats:
        seconds[form].append(seconds_of_mean(weights.clone(), form == "few bits"))
    (folder / f"{rank}.json").write_text(json.dumps(seconds))


def weights_of(rank: int) -> Tensor:
    """Weights near those of the others."""
    draw = torch.Generator().manual_seed(0)
    everyones = torch.randn(NUM_WEIGHTS, generator=draw)
    own = torch.randn(NUM_WEIGHTS, generator=draw.manual_seed(1 + rank))
    return everyones.add_(own, alpha=RELATIVE_DISTANCE)


def seconds_of_mean(weights: Tensor, is_slow: bool) -> float:
    """The seconds from when all are ready until this learner has the mean."""
    partition, spans = Partition((1,) * NUM_HOSTS), [Span(NUM_WEIGHTS, True)]
    trained, link = [weights.clone()], (lambda: is_slow, lambda: [spans])
    dist.barrier()
    begin = time.perf_counter()
    average_whole([weights], trained, partition, *link)
    return time.perf_counter() - begin


def seconds_on(emulated: Hosts, repeats: int) -> dict[str, list[float]]:
    """The seconds of each mean, until the last learner had it, by form.

    Raises:
        RuntimeError: A host has failed, or took too long.
    """
    with tempfile.TemporaryDirectory() as name:
        words = [sys.executable, __file__, str(repeats), name]
        place = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": str(NUM_HOSTS)}
        command = lambda host: ["env", f"RANK={host}", *words]  # noqa: E731
        hosts.check_ended_well(emulated.run(command, LIMIT_S, place))
        files = [Path(name) / f"{rank}.json" for rank in range(NUM_HOSTS)]
        of_ranks = [json.loads(file.read_text()) for file in files]
    return {
        form: [max(of_all) for of_all in zip(*(r[form] for r in of_ranks), strict=True)]
        for form in BYTES
    }


def rows_over(link: str, repeats: int) -> Iterator[Row]:
    """The rows of one kind of link."""
    rate, round_trip = LINKS[link]
    shape = f"{rate / 1e6:.0f}mbit"
    with hosts.emulated(NUM_HOSTS, shape, delay_s=round_trip / 2) as emulated:
        found = seconds_on(emulated, repeats)
    for form, seconds in found.items():
        sent = 2 * (NUM_HOSTS - 1) / NUM_HOSTS * BYTES[form] * NUM_WEIGHTS
        # The first one also opens connections.
        value = spread(seconds[1:])
        case = {"link": link, "weights travel as": form}
        yield Row(case, value, "s", value.median / (8 * sent / rate))


def measure(quick: bool = False) -> Report:
    """Measures the mean of all over each link."""
    report = Report(
        f"The seconds of the mean of all: {NUM_HOSTS} learners on a host each, "
        f"{NUM_WEIGHTS / 1e6:g} million weights.",
        limit="what an all-reduce of as many bytes must send, at the link's rate",
    )
    if hosts.are_missing(report):
        return report
    for link in LINKS:
        for row in rows_over(link, 3 if quick else REPEATS):
            what = " ".join(map(str, row.case.values()))
            print_row(what, f"{row.value.median:.2f} s", f"{row.ratio:.2f}")
            report.rows.append(row)
    return report


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    learn(int(sys.argv[1]), Path(sys.argv[2]))
