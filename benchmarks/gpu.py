"""What the engine costs a step on a GPU, at the size of the papers' acoustic model.

Each learner trains the papers' model (43 million weights, 128 chunks of 21 frames) in
bf16-mixed. Two learners exchange by Gloo over loopback, so that no network is measured.
They have one GPU, in two ways. They share it, or the second learner only waits in each
step, so that the first has the GPU to itself, as on a cluster. The control is the same
two processes under Lightning's single-device strategy, which know nothing of each other
and load the GPU alike. `idle` has the engine's hooks and threads and no exchange. The
GPU has finished all its work at both ends of a measured window. Each learner has half
of the cores.

The engine's operations on the GPU's memory are in `gpu_operations`.
"""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks import gpu_operations, learners
from benchmarks.learners import Meetings, Place
from benchmarks.quiet import quiet_trainer, quieten
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread
from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.asr.model import AcousticModel

APART, IDLE, DDP = "single device", "adpsgd, idle", "ddp, over Gloo"
DEFAULTS = "adpsgd, defaults"
NEVER = 1 << 40
UNBOUNDED: dict[str, Any] = {"cpu_share": 1.0}
OPTIONS: dict[str, dict[str, Any]] = {
    IDLE: {"gossip_every": NEVER},
    DEFAULTS: {},
    "adpsgd, cpu_share=0.25": {"cpu_share": 0.25},
    "adpsgd, cpu_share=1, float32": UNBOUNDED,
    "adpsgd, cpu_share=1, bfloat16": {**UNBOUNDED, "wire_dtype": torch.bfloat16},
    "adpsgd, cpu_share=1, int8": {**UNBOUNDED, "wire_dtype": torch.int8},
    "adpsgd, cpu_share=1, auto": {**UNBOUNDED, "wire_dtype": "auto"},
}
"""Options of the strategy, by method."""
SHARED, ALONE = "both compute", "the other waits"
METHODS = {SHARED: (APART, IDLE, DEFAULTS, DDP), ALONE: (APART, *OPTIONS)}
# Of windows: short where each step waits, long where exchanges are rare.
LENGTHS = {DDP: 0.25, DEFAULTS: 3.0}
WARMUP, LIMIT_S, WAIT_S = 20, 120.0, 0.02
BOUND = 1.02


@dataclass(frozen=True)
class Size:
    """The size of the model and its batches; by default the papers'.

    Args:
        features: Inputs of the LSTM.
        layers: LSTM layers.
        cells: Cells of a layer in each direction.
        bottleneck: Width of the linear layer.
        states: Classes.
        batch: Chunks of a learner's step.
        frames: Frames of a chunk.
    """

    features: int = 260
    layers: int = 6
    cells: int = 512
    bottleneck: int = 256
    states: int = 32_000
    batch: int = 128
    frames: int = 21

    @property
    def operations(self) -> float:
        """Floating-point operations of a step: six for each weight and frame."""
        cells, outputs = self.cells, 2 * self.cells
        inner = 2 * 4 * cells * (cells + outputs) * (self.layers - 1)
        lstm = 2 * 4 * cells * (cells + self.features) + inner
        top = self.bottleneck * (outputs + self.states)
        return 6.0 * (lstm + top) * self.batch * self.frames

    def make_model(self) -> AcousticModel:
        """Makes the model, with the same weights at every call."""
        torch.manual_seed(0)
        return AcousticModel(
            self.states,
            input_size=self.features,
            num_layers=self.layers,
            hidden_size=self.cells,
            bottleneck_size=self.bottleneck,
        )

    def make_batch(self) -> tuple[Tensor, Tensor]:
        """One batch, which every step takes again: loading is not the question."""
        inputs = torch.randn(self.batch, self.frames, self.features)
        return inputs, torch.randint(self.states, (self.batch, self.frames))


class Window(NamedTuple):
    """The measurements of one learner in a window.

    Attributes:
        step_ms: Duration of a step.
        exchanges: Exchanges in a step.
        exposed: Share of the window for which the training thread waited for them.
        sent: Bytes that were sent in a second.
        core_ms: Processor time of a step, of all the learner's threads.
        peak_bytes: Most memory of the GPU that its tensors took; 0 on a CPU.
        weight_bytes: Bytes of the model's weights.
    """

    step_ms: float
    exchanges: float
    exposed: float
    sent: float
    core_ms: float
    peak_bytes: int
    weight_bytes: int


Windows = Mapping[str, list[Window]]
"""The windows of learner 0, by method."""


def measure(quick: bool = False) -> Report:
    """Measures all methods in turn, and the operations on the GPU's memory."""
    report = Report(
        "What gossip adds to a step on a GPU at the papers' size (43 million weights, "
        "batch 128, 21 frames, bf16-mixed); two learners, one GPU.",
        limit=APART,
        notes=[
            "copies: peak of GPU memory beyond the control's, in units of w.",
            "chunks/s: of one learner, each chunk 21 frames of speech.",
            "ms of cores: processor time of a step, of all threads of a learner.",
        ],
    )
    # Not `is_available`, which would make CUDA unusable in forked learners.
    if not torch.cuda.device_count():
        report.skipped["everything"] = "there is no NVIDIA GPU"
        return report
    steps, turns = (100, 1) if quick else (200, 2)
    for layout in METHODS:
        windows = take_turns(Size(), layout, "cuda", "bf16-mixed", steps, turns)
        report.rows += rows_of(windows, Size(), layout)
    report.targets += [
        Target(f"{row.table}, {row.case['method']}: a step", BOUND, row.ratio, False)
        for row in report.rows
        if row.case["method"] == DEFAULTS and row.ratio is not None
    ]
    # Last, because it makes CUDA unusable in learners that are forked afterwards.
    report.rows += gpu_operations.rows("cuda", 7 if quick else 15)
    report.notes.append(_compute_limit(report.rows[0], Size()))
    return report


def _compute_limit(control: Row, size: Size) -> str:
    """The control's rate of computing beside that of a large product of matrices."""
    rate = size.operations / (1e-3 * control.value.median) / 1e12
    limit = gpu_operations.matmul_rate("cuda")
    return (
        f"A step has {size.operations / 1e12:.2f}e12 operations. Two learners that "
        f"share the GPU each make {rate:.0f}e12 a second; one product of large "
        f"matrices in bfloat16 makes {limit:.0f}e12."
    )


def take_turns(
    size: Size, layout: str, accelerator: str, precision: str, steps: int, turns: int
) -> Windows:
    """The windows of all methods of a layout."""
    windows: dict[str, list[Window]] = {name: [] for name in METHODS[layout]}
    for _ in range(turns):
        for name, found in windows.items():
            program = partial(
                learn,
                name=name,
                layout=layout,
                size=size,
                accelerator=accelerator,
                precision=precision,
                steps=round(LENGTHS.get(name, 1.0) * steps),
            )
            found.append(learners.run(program, 2, LIMIT_S, per_host=1)[0])
    return windows


def rows_of(windows: Windows, size: Size, layout: str) -> Iterator[Row]:
    """One row for each method, with its ratio to the control."""
    steps = {name: spread(w.step_ms for w in found) for name, found in windows.items()}
    for name, found in windows.items():
        ratio = steps[name].median / steps[APART].median
        print_row(f"{layout}: {name}", f"{steps[name]:.2f} ms", f"{ratio:.3f}")
        beyond = found[0].peak_bytes - windows[APART][0].peak_bytes
        details = {
            "chunks/s": size.batch / (1e-3 * steps[name].median),
            "exchanges a step": median(w.exchanges for w in found),
            "exposed": median(w.exposed for w in found),
            "MB/s sent": 1e-6 * median(w.sent for w in found),
            "ms of cores": median(w.core_ms for w in found),
            "peak GB": 1e-9 * found[0].peak_bytes,
            "copies": beyond / found[0].weight_bytes,
        }
        case = {"method": name}
        yield Row(case, steps[name], "ms a step", ratio, table=layout, details=details)


class Waiting(AcousticModel):
    """The same weights; a step of it waits and computes nothing."""

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        time.sleep(WAIT_S)
        return 0.0 * next(self.parameters()).flatten()[0]


def learn(
    place: Place,
    name: str,
    layout: str,
    size: Size,
    accelerator: str,
    precision: str,
    steps: int,
) -> Window:
    """The program of a learner; each has a host of its own, and GPU 0."""
    quieten()
    _stay_on_own_cores(place)
    meetings, apart = Meetings(place), name == APART
    if apart:
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            del os.environ[variable]
    # A learner that waits goes on until the measured one is done.
    waits = layout == ALONE and place.rank == 1
    clock = Clock(steps, meetings.store, follows=waits)
    trainer = quiet_trainer(
        strategy_of(name),
        accelerator=accelerator,
        devices=1,
        num_nodes=1 if apart else place.world_size,
        plugins=[LightningEnvironment()] if apart else [],
        precision=precision,
        callbacks=[clock],
    )
    model, batch = size.make_model(), size.make_batch()
    if waits:
        model.__class__ = Waiting
    batches: Any = [batch] * (1_000_000 if waits else WARMUP + steps)
    trainer.fit(model, DataLoader(batches, batch_size=None))
    meetings.leave()
    return clock.window(sum(p.nbytes for p in model.parameters()))


def _stay_on_own_cores(place: Place) -> None:
    """Each learner has an equal share of the cores, as on a host of its own."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // place.world_size
    if share:
        os.sched_setaffinity(0, cores[place.rank * share : (place.rank + 1) * share])


def strategy_of(name: str) -> Any:
    """The Trainer's strategy, over Gloo: NCCL refuses two learners on one GPU."""
    if name == APART:
        return "auto"
    if name == DDP:
        return DDPStrategy(process_group_backend="gloo")
    return HADPSGDStrategy(
        *("ring", "async"),
        super_learner_size=1,
        process_group_backend="gloo",
        **OPTIONS[name],
    )


class Reading(NamedTuple):
    """The time, and the counters, once the GPU is done."""

    seconds: float
    core_seconds: float
    exchanges: int = 0
    exposed_seconds: float = 0.0
    bytes_sent: int = 0


class Clock(L.Callback):
    """Measures the steps after the warm-up.

    Args:
        steps: Steps in the window.
        store: Store in which the measured learner says that it is done.
        follows: Whether this learner ends when the measured one does.
    """

    def __init__(self, steps: int, store: TCPStore, follows: bool) -> None:
        self._steps, self._store, self._follows = steps, store, follows
        self._readings: list[Reading] = []
        self._peak_bytes = 0

    def window(self, weight_bytes: int) -> Window:
        """What was measured; a learner that follows has measured nothing."""
        if self._follows:
            return Window(0.0, 0.0, 0.0, 0.0, 0.0, 0, weight_bytes)
        begin, end = self._readings
        seconds = end.seconds - begin.seconds
        return Window(
            1e3 * seconds / self._steps,
            (end.exchanges - begin.exchanges) / self._steps,
            (end.exposed_seconds - begin.exposed_seconds) / seconds,
            (end.bytes_sent - begin.bytes_sent) / seconds,
            1e3 * (end.core_seconds - begin.core_seconds) / self._steps,
            self._peak_bytes,
            weight_bytes,
        )

    @override
    def on_train_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == WARMUP and not self._follows:
            self._readings.append(self._read(trainer))

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._follows:
            trainer.should_stop = self._store.check(["done"])
        elif trainer.global_step == WARMUP + self._steps:
            self._readings.append(self._read(trainer))
            self._store.set("done", "")
            if pl_module.device.type == "cuda":
                self._peak_bytes = torch.cuda.max_memory_allocated(pl_module.device)

    def _read(self, trainer: L.Trainer) -> Reading:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic(), time.process_time()
        strategy = trainer.strategy
        if not isinstance(strategy, HADPSGDStrategy):
            return Reading(*now)
        if (found := strategy.gossip_statistics()) is None:
            return Reading(*now)
        counters = found.exchanges, found.exposed_seconds, found.bytes_sent
        return Reading(*now, *counters)
