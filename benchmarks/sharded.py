"""What gossip costs learners that hold a model together, sharded by FSDP2.

Two super-learners of two learners train a transformer. Beside them: the same four whose
engines exchange nothing, so that the cores are as busy, for the duration of a step; and
two learners of one super-learner alone, which is plain FSDP2, for the memory. Memory is
the peak of a process, in shards (half of the weights in float32).
"""

import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks import learners
from benchmarks.learners import Place
from benchmarks.memory import reset_peak, resident_bytes
from benchmarks.quiet import quiet_trainer
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread
from lightning_adpsgd import HADPSGDStrategy

GOSSIP, IDLE, ALONE = "2 x 2, gossip", "2 x 2, no exchange", "2 alone, FSDP2"
WIDTH, DEPTH, LENGTH, BATCH = 384, 6, 32, 2
STEPS, WARMUPS, REPETITIONS, LIMIT_S = 30, 5, 5, 300.0
NEVER = 1 << 40


class Seen(NamedTuple):
    """What one learner saw of a training.

    Attributes:
        steps: seconds of each step.
        training: bytes at the peak of training.
        end: bytes at the peak, with the mean at the end.
        exposed: seconds for which training waited for gossip.
        sent: bytes sent to other super-learners.
        shard: bytes of this learner's shards.
    """

    steps: list[float]
    training: float
    end: float
    exposed: float
    sent: int
    shard: int


class Transformer(pl.LightningModule):
    """Layers of attention on random sequences, which it learns to repeat."""

    @override
    def configure_model(self) -> None:
        torch.manual_seed(0)
        layer = partial(nn.TransformerEncoderLayer, WIDTH, 6, 4 * WIDTH, 0.0)
        layers = [layer(batch_first=True, norm_first=True) for _ in range(DEPTH)]
        self.layers = nn.Sequential(*layers)
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch) - batch).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Watch(pl.Callback):
    """Takes the time and the peak after each step."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.peak = 0.0

    @override
    def on_train_batch_end(self, *arguments: Any, **named: Any) -> None:
        self.stamps.append(time.perf_counter())
        self.peak = resident_bytes("VmHWM")
        if len(self.stamps) == WARMUPS:
            reset_peak()  # what was taken to begin does not count


def measure(quick: bool = False) -> Report:
    """The three in turn."""
    runs: dict[str, list[Seen]] = {GOSSIP: [], IDLE: [], ALONE: []}
    for _ in range(1 if quick else REPETITIONS):
        for name, seen in runs.items():
            number = 2 if name == ALONE else 4
            seen.append(learners.run(partial(learn, name=name), number, LIMIT_S)[0])
    report = Report(
        "The cost of gossip between learners that hold a model in shards.",
        limit="the same without exchange (time), FSDP2 alone (memory)",
        notes=[
            "Copies in shards: while training; and with the mean at the end, which "
            "takes two more for a moment. Peaks of a process vary by a whole shard: "
            "tests/gossip/test_shards.py counts the engine's tensors, without noise."
        ],
    )
    report.rows += [*time_rows(runs), *memory_rows(runs)]
    first, _, copies, _ = (row.ratio for row in report.rows)
    assert first is not None
    assert copies is not None
    report.targets += [
        Target(f"{GOSSIP}: step, of {IDLE}", 1.05, first, at_least=False),
        Target(f"{GOSSIP}: shards beside FSDP2's own", 1.3, copies, at_least=False),
    ]
    return report


def learn(place: Place, name: str) -> Seen:
    """The program of a learner."""
    strategy = HADPSGDStrategy(
        "complete",
        "async",
        2,
        inside="model_parallel",
        gossip_every=NEVER if name == IDLE else 1,
    )
    watch = Watch()
    trainer = quiet_trainer(strategy, devices=place.world_size, callbacks=[watch])
    rows = torch.randn(STEPS * BATCH, LENGTH, WIDTH)
    loader: DataLoader[Tensor] = DataLoader(rows, BATCH)  # pyright: ignore
    trainer.fit(module := Transformer(), loader)
    done = strategy.gossip_statistics()
    stamps = watch.stamps[WARMUPS:]
    return Seen(
        [later - earlier for earlier, later in pairwise(stamps)],
        watch.peak,
        resident_bytes("VmHWM"),
        done.exposed_seconds if done else 0.0,
        done.bytes_sent if done else 0,
        4 * sum(weight.numel() for weight in module.parameters()) // 2,
    )


def time_rows(runs: dict[str, list[Seen]]) -> Iterator[Row]:
    """The duration of a step, with and without exchanges."""
    taken = {
        name: spread(1e3 * statistics.median(one.steps) for one in runs[name])
        for name in (GOSSIP, IDLE)
    }
    for name, value in taken.items():
        ratio = value.median / taken[IDLE].median
        seen = runs[name]
        exposed = statistics.median(one.exposed / sum(one.steps) for one in seen)
        sent = statistics.median(one.sent / STEPS / one.shard for one in seen)
        print_row(name, f"{value:.1f} ms", f"{ratio:.3f}", f"{exposed:.2%} exposed")
        details = {"exposed share": exposed, "shards sent a step": sent}
        case = {"learners": name}
        yield Row(case, value, "ms a step", ratio, details=details)


def memory_rows(runs: dict[str, list[Seen]]) -> Iterator[Row]:
    """Peaks over that of FSDP2 alone, in shards."""
    for when in ("training", "end"):
        alone = statistics.median(getattr(one, when) for one in runs[ALONE])
        copies = spread(
            (getattr(one, when) - alone) / one.shard for one in runs[GOSSIP]
        )
        print_row(f"memory, {when}", f"{copies:.2f} shards")
        case = {"learners": f"{GOSSIP}, {when}"}
        yield Row(case, copies, "shards beside FSDP2's own", copies.median)
