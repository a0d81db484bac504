"""What many virtual learners cost beside one: the same samples, the same local batch.

Sixteen super-learners of one learner on a ring take turns in one process, in each mode;
the control is one learner. All make as many steps on as many samples, so that what is
left is the work of averaging and of simulated time, and what it costs that the weights
of sixteen do not fit into a cache where those of one do.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

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
ALONE = "no averages"  # what is left is that weights are not in a cache
MODES = (ALONE, "sync", "delay_by_one", "async")
NEVER = 1 << 40  # steps
BOUND = 1.3
WIDE = (256, 1000, 1000, 10)
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


def rows(learner: int) -> Iterator[workload.Batch]:
    # Drawn once: what is measured is not how fast samples are.
    return itertools.cycle(itertools.islice(workload.batches(learner), 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "LSTM": (Frames, frames),
    "perceptron, 68,000 weights": (
        lambda: workload.make_model(widths=workload.NARROW),
        rows,
    ),
    "perceptron, 1.3 million weights": (lambda: workload.make_model(widths=WIDE), rows),
}


def measure(quick: bool = False) -> Report:
    """Sixteen virtual learners of each mode beside one, on three models."""
    torch.set_num_threads(1)
    report = Report(
        f"Time of {LEARNERS} virtual learners in one process, per step.",
        limit="one learner on as many samples, with the same local batch",
        notes=[
            "Weights, gradient and momentum of one learner stay in caches from step to "
            "step where those of sixteen do not: `no averages` shows what that costs."
        ],
    )
    for model in MODELS:
        report.rows += measure_model(model, 3 if quick else 7)
    report.targets += [
        Target(f"{row.case['model']}, {row.case['mode']}", BOUND, row.ratio, False)
        for row in report.rows
        if row.ratio is not None and row.case["mode"] in MODES[1:]
    ]
    return report


def measure_model(model: str, repetitions: int) -> list[Row]:
    """Seconds per step of one learner and of sixteen in each mode, in turn."""
    # Asynchronous, where one learner has nobody to average with: plain SGD.
    works = {"one learner": trains(model, 1, "async")}
    works |= {mode: trains(model, LEARNERS, mode) for mode in MODES}
    seconds = take_turns(works, repetitions, warmups=1)
    one = seconds["one learner"].median
    return [row(model, mode, taken, one) for mode, taken in seconds.items()]


def trains(model: str, num_learners: int, mode: Any) -> Callable[[], object]:
    """A function that makes 8 steps of each of 16 learners, or as many of one."""
    make, batches_of = MODELS[model]
    cluster = VirtualCluster(
        make(),
        num_learners,
        communication="sync" if mode == ALONE else mode,
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


def row(model: str, mode: str, taken: Spread, one: float) -> Row:
    ratio = taken.median / one
    steps = STEPS * LEARNERS
    value = Spread(*(1e3 * seconds / steps for seconds in taken))
    print_row(model, mode, f"{value:.2f} ms", f"{ratio:.2f}")
    return Row({"model": model, "mode": mode}, value, "ms per step", ratio)
