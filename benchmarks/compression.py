"""The effect of the wire on convergence: the same training with each `wire_dtype`.

Four learners on a ring train in one process, deterministically. Each takes a step on a
batch of its own, then pairs average through the codec of the wire, alternately to the
left and to the right. Only what travels differs. The control sends float32 to the same
learners on the same batches. The loss is that of the mean model on held-out samples.
"""

import math

import torch
from torch import Tensor

from benchmarks import workload
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread
from lightning_adpsgd.gossip.codecs import INT4, make_codec
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.weights.flat import FlatParameters

WIRES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int4": INT4,
}
LEARNERS, STEPS, SEEDS = 4, 300, 5
WIDTHS = (256, 300, 300, 10)
LR, MOMENTUM = 0.05, 0.9
BOUND = 1.01


def measure(quick: bool = False) -> Report:
    """Measures loss and disagreement with each wire, over seeds."""
    torch.set_num_threads(1)
    report = Report(
        f"Convergence over each wire: {LEARNERS} learners, {STEPS} steps each.",
        limit="the loss over float32 with the same seed",
    )
    seeds = range(2 if quick else SEEDS)
    found = {wire: [train(wire, seed) for seed in seeds] for wire in WIRES}
    control = [loss for loss, _, _ in found["float32"]]
    for wire, runs in found.items():
        ratios = [loss / c for (loss, _, _), c in zip(runs, control, strict=True)]
        report.rows.append(row(wire, runs, spread(ratios).median))
        claim = f"{wire}: loss, of that over float32"
        report.targets.append(Target(claim, BOUND, spread(ratios).median, False))
    return report


def row(wire: str, runs: list[tuple[float, float, float]], ratio: float) -> Row:
    losses, distances, sizes = zip(*runs, strict=True)
    value = spread(losses)
    print_row(wire, f"{value:.4f}", f"{ratio:.4f}", f"{sizes[0]:.2f} bytes")
    details = {
        "bytes per weight": sizes[0],
        "relative consensus distance": spread(distances).median,
    }
    return Row({"wire": wire}, value, "nats", ratio, details=details)


def train(wire: str, seed: int) -> tuple[float, float, float]:
    """Trains; returns loss of the mean, relative distance and bytes per weight."""
    learners = [Learner(1000 + LEARNERS * seed + n) for n in range(LEARNERS)]
    edges: dict[tuple[int, int], Edge] = {}
    for step in range(STEPS):
        for learner in learners:
            learner.step()
        for i, j in pairs(step):
            edge = edges.setdefault((i, j), Edge(WIRES[wire]))
            edge.average(learners[i].weights, learners[j].weights)
    rows = torch.stack([learner.weights for learner in learners])
    mean = rows.mean(0)
    distance = ((rows - mean).norm() / LEARNERS**0.5 / mean.norm()).item()
    learners[0].weights.copy_(mean)
    codec = make_codec(WIRES[wire], torch.float32)
    size = codec.dtype.itemsize * codec.length(len(mean)) / len(mean)
    return learners[0].held_out_loss(), distance, size


def pairs(step: int) -> list[tuple[int, int]]:
    """The pairs that average after a step."""
    mixing = find_topology("alternating_pairs").matrix(LEARNERS, step, 0)
    return [(i, j) for i, j in mixing.triu(1).nonzero().tolist()]


class Learner:
    """A model, its optimizer and its batches."""

    def __init__(self, seed: int) -> None:
        self._model = workload.make_model(widths=WIDTHS)
        (self.weights,) = FlatParameters(self._model).vectors
        parameters = self._model.parameters()
        self._optimizer = torch.optim.SGD(parameters, LR, MOMENTUM)
        self._batches = workload.batches(seed)

    def step(self) -> None:
        """One step of SGD on the next batch."""
        self._optimizer.zero_grad()
        workload.loss(self._model, next(self._batches)).backward()
        self._optimizer.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The loss on samples that no learner trains on."""
        held_out = next(workload.batches(seed=99, size=workload.HELD_OUT))
        return workload.loss(self._model, held_out).item()


class Edge:
    """Both ends of an exchange, in one thread."""

    def __init__(self, wire_dtype: torch.dtype) -> None:
        self._codecs = [make_codec(wire_dtype, torch.float32) for _ in range(2)]

    @torch.no_grad()
    def average(self, first: Tensor, second: Tensor) -> None:
        """Moves both to their mean, as exactly as the wire allows."""
        messages = []
        for codec, weights in zip(self._codecs, (first, second), strict=True):
            codec.begin(2)  # each edge of the ring has every second step
            message = torch.empty(codec.length(len(weights)), dtype=codec.dtype)
            codec.encode(weights.clone(), message, place=0)
            messages.append(message)
        for end, weights in enumerate((first, second)):
            mine, theirs = messages[end].clone(), messages[1 - end].clone()
            change = torch.empty_like(weights)
            square = self._codecs[end].change(mine, theirs, change, place=0)
            if math.isfinite(square):
                weights.add_(change, alpha=0.5)
