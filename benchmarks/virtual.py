"""The cost of many virtual learners beside one: same samples, same local batch.

Sixteen super-learners of one learner on a ring take turns in one process, in each mode;
the control is one learner. All make equally many steps on equally many samples. The
difference is the work of averaging and of simulated time, and the cost of sixteen sets
of weights that do not fit into a cache, where one does.

The limit of averaging is the memory. It is what a mode must read and write of weights,
at the speed at which a vector as long as all the weights is copied.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks import workload
from benchmarks.results import Report, Row, Target
from benchmarks.timing import Spread, print_row, take_turns
from lightning_adpsgd.virtual.clock import Compute, Link
from lightning_adpsgd.virtual.cluster import VirtualCluster

LEARNERS, STEPS = 16, 8
LEARNING_RATE = 0.01
ALONE = "no averages"  # the rest is the cost of weights outside of a cache
MODES = (ALONE, "sync", "delay_by_one", "async")
NEVER = 1 << 40  # steps
BOUND = 1.3
# Times that averaging reads or writes all weights of a learner in a step, at least:
# a round reads and writes them; a change that is kept is written and read too; an
# exchange reads two learners and writes two changes, and two merges read all four and
# write weights.
PASSES = {"sync": 2, "delay_by_one": 5, "async": 10}
SMALL, WIDE = (256, 32, 10), (256, 1000, 1000, 10)
FRAMES, FEATURES, CLASSES, UTTERANCES = 50, 40, 40, 16


class Frames(nn.Module):
    """An LSTM over frames, [batch, frame, 40], and a class for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(FEATURES, 210, batch_first=True)
        self.output = nn.Linear(210, CLASSES)

    @override
    def forward(self, features: Tensor) -> Tensor:
        return self.output(self.lstm(features)[0]).flatten(0, 1)


def frames(learner: int) -> Iterator[workload.Batch]:
    generator = torch.Generator().manual_seed(learner)
    shape = (UTTERANCES, FRAMES)
    made = [
        workload.Batch(
            torch.randn(*shape, FEATURES, generator=generator),
            torch.randint(CLASSES, shape, generator=generator).flatten(),
        )
        for _ in range(4)
    ]
    return itertools.cycle(made)


def rows(size: int = workload.BATCH) -> Callable[[int], Iterator[workload.Batch]]:
    # Drawn once, because the speed of samples is not measured.
    return lambda learner: itertools.cycle(
        itertools.islice(workload.batches(learner, size), 4)
    )


class Model(NamedTuple):
    """The model that is trained.

    Attributes:
        make: function that gives the same weights at each call.
        batches_of: function that gives a learner's batches.
    """

    make: Callable[[], nn.Module]
    batches_of: Callable[[int], Any]


def _perceptron(widths: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: workload.make_model(widths=widths)


MODELS = {
    "LSTM": Model(Frames, frames),
    "perceptron, 9,000 weights": Model(_perceptron(SMALL), rows()),
    "perceptron, 68,000 weights": Model(_perceptron(workload.NARROW), rows()),
    "perceptron, 1.3 million weights": Model(_perceptron(WIDE), rows()),
    "the same, local batch 256": Model(_perceptron(WIDE), rows(256)),
}


def measure(quick: bool = False) -> Report:
    """Measures sixteen virtual learners in each mode beside one."""
    torch.set_num_threads(1)
    report = Report(
        f"Time of {LEARNERS} virtual learners in one process, per step.",
        limit="one learner on as many samples, with the same local batch",
        notes=[
            "Weights, gradient and momentum of one learner stay in caches from step to "
            "step where those of sixteen do not: `no averages` shows what that costs.",
            "memory: the time in which what averaging must read and write crosses the "
            "memory, at the speed of a copy of all weights of sixteen learners.",
        ],
    )
    for model in MODELS:
        report.rows += measure_model(model, 3 if quick else 5)
    report.targets += [
        Target(f"{row.case['model']}, {row.case['mode']}", BOUND, row.ratio, False)
        for row in report.rows
        if row.ratio is not None and row.case["mode"] in PASSES
    ]
    return report


def measure_model(model: str, repetitions: int) -> list[Row]:
    """Measures seconds per step of one learner and of sixteen in each mode, in turn."""
    # Asynchronous: one learner alone has no peer to average with, so this is plain SGD.
    works = {"one learner": trains(model, 1, "async")}
    works |= {mode: trains(model, LEARNERS, mode) for mode in MODES}
    seconds = take_turns(works, repetitions, warmups=1)
    one, a_pass = seconds["one learner"].median, pass_seconds(model)
    return [row(model, mode, taken, one, a_pass) for mode, taken in seconds.items()]


def pass_seconds(model: str) -> float:
    """The seconds to read or write one learner's weights among those of sixteen."""
    num_bytes = workload.weights_of(MODELS[model].make()).nbytes
    source = torch.zeros(LEARNERS * num_bytes // 4)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begin)
    return min(seconds) / (2 * LEARNERS)


def trains(model: str, num_learners: int, mode: str) -> Callable[[], object]:
    """A function that makes 8 steps of each of 16 learners, or as many of one."""
    make, batches_of = MODELS[model]
    communication: Any = "sync" if mode == ALONE else mode
    cluster = VirtualCluster(
        make(),
        num_learners,
        communication=communication,
        loss=workload.loss,
        optimizer=lambda p: torch.optim.SGD(p, LEARNING_RATE, momentum=0.9),
        compute=Compute(1.0, spread=0.2),
        link=Link(bandwidth=1e9, latency=1e-3),
        samples_in=lambda batch: len(batch.inputs),
        gossip_every=NEVER if mode == ALONE else 1,
    )
    per_step = len(next(batches_of(0)).inputs)

    def train() -> object:
        samples = cluster.samples + STEPS * LEARNERS * per_step
        return cluster.fit(batches_of, samples, every_samples=2 * samples)

    return train


def row(model: str, mode: str, taken: Spread, one: float, a_pass: float) -> Row:
    """The row: milliseconds of a step, and the memory's part of it for averages."""
    ratio = taken.median / one
    steps = STEPS * LEARNERS
    value = Spread(*(1e3 * seconds / steps for seconds in taken))
    print_row(f"{model}, {mode}", f"{value:.2f} ms", f"{ratio:.2f}")
    details = {"memory, ms": round(1e3 * PASSES.get(mode, 0) * a_pass, 3)}
    return Row(
        {"model": model, "mode": mode}, value, "ms per step", ratio, details=details
    )
