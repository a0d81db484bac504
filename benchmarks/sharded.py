"""The cost of gossip for learners that hold a model together, sharded by FSDP2.

Two super-learners of two learners train a transformer, in turn with their control. That
is two pairs under Lightning's own `ModelParallelStrategy`, each a job by itself, on the
same machine at the same time. So both have four processes on the same cores, and all
that differs is this package. Steps are compared in two forms. *Computed* ones are as
fast as the cores allow, which all four share. *Paced* ones have a nominal length, of
which the rest is slept, as if each learner had a device of its own.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks import learners
from benchmarks.learners import Place
from benchmarks.quiet import quiet_trainer, quieten
from benchmarks.racing.problems import Pace
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread
from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.dials import DEFAULT_CPU_SHARE

PAIRS, GOSSIP = "two pairs, FSDP2 alone", "2 x 2, gossip"
EVERY_STEP = "2 x 2, gossip, cpu_share=1"
CASES: Mapping[str, dict[str, Any] | None] = {
    PAIRS: None,
    GOSSIP: {},
    EVERY_STEP: {"cpu_share": 1.0},
}
"""Options of the strategy; None: Lightning's own strategy."""
WIDTH, DEPTH, LENGTH, BATCH = 256, 4, 32, 2
PACED_S = 0.4
"""The nominal length of a step: twice its processor time on two cores."""
FORMS = {"paced": PACED_S, "computed": 0.0}
STEPS, WARMUPS, REPETITIONS, LIMIT_S = 45, 5, 5, 600.0
PORTS_OF_A_JOB = 4
SHARE = f"{100 * DEFAULT_CPU_SHARE:g} %"


class Reading(NamedTuple):
    """The counters of a learner at one moment."""

    processor_s: float = 0.0
    exposed_s: float = 0.0
    sent_bytes: int = 0


class Seen(NamedTuple):
    """The measurements of one learner in a training.

    Attributes:
        stamps: seconds at the end of each step, on a clock that all learners share.
        first: counters after the steps that warm up.
        last: counters after the last step.
        tensors: bytes of all its tensors then.
        shard: bytes of its shards.
    """

    stamps: list[float]
    first: Reading
    last: Reading
    tensors: int
    shard: int


class Transformer(pl.LightningModule):
    """Layers of attention on random sequences, which it learns to repeat.

    Args:
        step_s: nominal length of a step.
    """

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._pace = Pace(step_s)

    @override
    def configure_model(self) -> None:
        torch.manual_seed(0)
        layer = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, 0.0)
        layers = [layer(batch_first=True, norm_first=True) for _ in range(DEPTH)]
        self.layers = nn.Sequential(*layers)
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._pace.begin()
        loss = (self.layers(batch) - batch).square().mean()
        self._pace.until(1 / 3)
        return loss

    @override
    def on_after_backward(self) -> None:
        self._pace.until(1.0)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Watch(pl.Callback):
    """Records the time after each step, and the strategy's counters."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.first = self.last = Reading()
        self.tensors = 0

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.stamps.append(time.monotonic())
        if len(self.stamps) == WARMUPS:
            self.first = reading_of(trainer.strategy)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.last = reading_of(trainer.strategy)
        self.tensors = bytes_of_tensors()


def reading_of(strategy: Strategy) -> Reading:
    """Reads processor seconds and the counters of this package's strategy."""
    if not isinstance(strategy, HADPSGDStrategy):
        return Reading(time.process_time())
    found = strategy.gossip_statistics()
    assert found is not None
    return Reading(time.process_time(), found.exposed_seconds, found.bytes_sent)


def bytes_of_tensors() -> int:
    """The bytes of this process's tensors; those that share memory count once."""
    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, Tensor)]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in found]
    storages = [tensor.untyped_storage() for tensor in local if not tensor.is_meta]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def measure(quick: bool = False) -> Report:
    """Measures all cases in turn, in both forms."""
    report = Report(
        "The cost of gossip between learners that hold a model in shards.",
        limit=PAIRS,
        notes=[
            "Ratios are of runs beside one another, by repetition. Four learners share "
            "the cores. Paced: a step has a nominal length of "
            f"{1e3 * PACED_S:.0f} ms, of which the rest is slept.",
            "Memory: all tensors of a learner at the end of training, beside those "
            "of FSDP2 alone, in shards (half of the weights).",
            f"Without `cpu_share=1` a learner exchanges as often as {SHARE} of its "
            "time allows.",
        ],
    )
    steps, repetitions = (WARMUPS + 5, 1) if quick else (STEPS, REPETITIONS)
    for form, step_s in FORMS.items():
        runs: dict[str, list[list[Seen]]] = {name: [] for name in CASES}
        for _ in range(repetitions):
            for name, found in runs.items():
                program = partial(learn, name=name, step_s=step_s, steps=steps)
                found.append(learners.run(program, 4, LIMIT_S))
        report.rows += [row_of(form, name, runs) for name in CASES]
        report.rows.append(memory_row(form, runs))
    report.targets += targets_of(report.rows)
    return report


def learn(place: Place, name: str, step_s: float, steps: int) -> Seen:
    """The program of a learner."""
    quieten()
    dials = CASES[name]
    place = pair_of(place) if dials is None else place
    place.set_environment()
    strategy = strategy_of(dials)
    trainer = quiet_trainer(
        strategy, devices=place.world_size, callbacks=[w := Watch()]
    )
    rows = torch.randn(steps * BATCH, LENGTH, WIDTH)
    loader: DataLoader[Tensor] = DataLoader(rows, BATCH)  # pyright: ignore
    trainer.fit(module := Transformer(step_s), loader)
    weights = sum(weight.numel() for weight in module.parameters())
    return Seen(w.stamps, w.first, w.last, w.tensors, 4 * weights // 2)


def pair_of(place: Place) -> Place:
    """The place of a learner in a job of two."""
    job, rank = divmod(place.rank, 2)
    port = place.port + PORTS_OF_A_JOB * job
    return replace(place, rank=rank, world_size=2, per_host=2, port=port)


def strategy_of(dials: dict[str, Any] | None) -> Strategy:
    """Lightning's own, or gossip between two super-learners."""
    if dials is None:
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return HADPSGDStrategy("complete", "async", 2, inside="model_parallel", **dials)


def step_s(run: Sequence[Seen]) -> float:
    """The median duration of a step, where all four learners trained."""
    begin = max(seen.stamps[WARMUPS - 1] for seen in run)
    end = min(seen.stamps[-1] for seen in run)
    return statistics.median(
        later - earlier
        for seen in run
        for earlier, later in zip(seen.stamps, seen.stamps[1:], strict=False)
        if begin <= earlier and later <= end
    )


def row_of(form: str, name: str, runs: Mapping[str, Sequence[Sequence[Seen]]]) -> Row:
    """The duration of a step, and its ratio to that of the run beside it."""
    pairs = zip(runs[name], runs[PAIRS], strict=True)
    ratio = spread(step_s(run) / step_s(control) for run, control in pairs)
    value = spread(1e3 * step_s(run) for run in runs[name])
    learners_seen = [seen for run in runs[name] for seen in run]
    exposed = statistics.fmean(map(exposed_share, learners_seen))
    sent = statistics.fmean(map(shards_a_step, learners_seen))
    busy = spread(1e3 * processor_s(run) for run in runs[name])
    details = {
        "ratio, low": ratio.low,
        "ratio, high": ratio.high,
        "processor, ms a step": busy.median,
        "exposed share": exposed,
        "shards sent a step": sent,
        "MB sent a step": sent * learners_seen[0].shard / 1e6,
    }
    print_row(
        f"{form}: {name}",
        f"{value:.1f} ms",
        f"{ratio:.3f}",
        f"{busy:.1f} ms of processors",
        f"{exposed:.2%} exposed",
        f"{sent:.2f} shards a step",
    )
    case = {"steps": form, "learners": name}
    return Row(case, value, "ms a step", ratio.median, PAIRS, "time", details)


def processor_s(run: Sequence[Seen]) -> float:
    """The processor seconds of a step, mean over all learners."""
    return statistics.fmean(
        (seen.last.processor_s - seen.first.processor_s) / (len(seen.stamps) - WARMUPS)
        for seen in run
    )


def exposed_share(seen: Seen) -> float:
    """The share of time that a learner waited for gossip, without the first steps."""
    seconds = seen.stamps[-1] - seen.stamps[WARMUPS - 1]
    return (seen.last.exposed_s - seen.first.exposed_s) / seconds


def shards_a_step(seen: Seen) -> float:
    """The data that a learner sent to other super-learners per step, in its shards."""
    steps = len(seen.stamps) - WARMUPS
    return (seen.last.sent_bytes - seen.first.sent_bytes) / seen.shard / steps


def memory_row(form: str, runs: Mapping[str, Sequence[Sequence[Seen]]]) -> Row:
    """The tensors of a learner beside those of FSDP2 alone, in shards."""
    alone = statistics.median(seen.tensors for run in runs[PAIRS] for seen in run)
    copies = spread(
        (seen.tensors - alone) / seen.shard for run in runs[GOSSIP] for seen in run
    )
    print_row(f"{form}: tensors", f"{copies:.2f} shards beside FSDP2's own")
    case = {"steps": form, "learners": GOSSIP}
    unit = "shards beside FSDP2's own"
    return Row(case, copies, unit, copies.median, "a shard", "memory")


def targets_of(rows: Sequence[Row]) -> Iterator[Target]:
    """The bounds that were set: for steps, and for memory."""
    for row in rows:
        assert row.ratio is not None
        form, name = row.case["steps"], row.case["learners"]
        if row.table == "time" and name == GOSSIP:
            claim = f"{form}: step with gossip, of {PAIRS}"
            yield Target(claim, 1.05, row.ratio, at_least=False)
        if row.table == "memory":
            claim = f"{form}: shards beside FSDP2's own"
            yield Target(claim, 1.3, row.ratio, at_least=False)
