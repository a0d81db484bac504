"""What the engine costs a step on a GPU, at the size of the papers' acoustic model.

Two learners share one GPU, so that no network is measured: their messages cross from
process to process by Gloo over loopback, as they would over Ethernet. Each trains the
papers' model (43 million weights, 128 chunks of 21 frames) in bf16-mixed. The control
is the same two processes under Lightning's single-device strategy, which know nothing
of each other and load the GPU alike. `idle` has the engine's hooks and threads and no
exchange. The GPU has finished all its work at both ends of a measured window.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks import learners
from benchmarks.learners import Place
from benchmarks.quiet import quiet_trainer, quieten
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread
from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.asr.model import AcousticModel

APART, IDLE, DDP = "apart", "adpsgd, idle", "ddp, over Gloo"
WIRES: dict[str, torch.dtype | None] = {
    "adpsgd, float32": None,
    "adpsgd, bfloat16": torch.bfloat16,
    "adpsgd, int8": torch.int8,
}
METHODS = (APART, IDLE, *WIRES, DDP)
NEVER = 1 << 40
WARMUP, LIMIT_S = 20, 180.0
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
        peak_bytes: Most memory of the GPU that its tensors took; 0 on a CPU.
        weight_bytes: Bytes of the model's weights.
    """

    step_ms: float
    exchanges: float
    peak_bytes: int
    weight_bytes: int


def measure(quick: bool = False) -> Report:
    """Measures all methods in turn."""
    report = Report(
        "What gossip adds to a step on a GPU at the papers' size (43 million weights, "
        "batch 128, 21 frames, bf16-mixed); two learners on one GPU.",
        limit=APART,
        notes=["copies: peak of GPU memory beyond the control's, in units of w."],
    )
    # Not `is_available`, which would make CUDA unusable in forked learners.
    if not torch.cuda.device_count():
        report.skipped["everything"] = "there is no NVIDIA GPU"
        return report
    steps, turns = (60, 2) if quick else (200, 5)
    windows = take_turns(Size(), "cuda", "bf16-mixed", steps, turns)
    report.rows += rows_of(windows)
    report.targets += [
        Target(f"{row.case['method']}: a step, of {APART}", BOUND, row.ratio, False)
        for row in report.rows
        if row.case["method"] in WIRES and row.ratio is not None
    ]
    return report


def take_turns(
    size: Size, accelerator: str, precision: str, steps: int, turns: int
) -> dict[str, list[Window]]:
    """The windows of learner 0, by method."""
    windows: dict[str, list[Window]] = {name: [] for name in METHODS}
    for _ in range(turns):
        for name, found in windows.items():
            program = partial(
                learn,
                name=name,
                size=size,
                accelerator=accelerator,
                precision=precision,
                steps=steps,
            )
            found.append(learners.run(program, 2, LIMIT_S, per_host=1)[0])
    return windows


def rows_of(windows: dict[str, list[Window]]) -> Iterator[Row]:
    """One row for each method, with its ratio to the control."""
    steps = {name: spread(w.step_ms for w in found) for name, found in windows.items()}
    for name, found in windows.items():
        ratio = steps[name].median / steps[APART].median
        print_row(name, f"{steps[name]:.2f} ms", f"{ratio:.3f}")
        beyond = found[0].peak_bytes - windows[APART][0].peak_bytes
        details = {
            "exchanges a step": found[0].exchanges,
            "copies": beyond / found[0].weight_bytes,
        }
        yield Row({"method": name}, steps[name], "ms a step", ratio, details=details)


def learn(
    place: Place, name: str, size: Size, accelerator: str, precision: str, steps: int
) -> Window:
    """The program of a learner; each has a host of its own, and GPU 0."""
    quieten()
    apart = name == APART
    if apart:
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            del os.environ[variable]
    clock = Clock(steps)
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
    batches: Any = [batch] * (WARMUP + steps)
    trainer.fit(model, DataLoader(batches, batch_size=None))
    weight_bytes = sum(p.nbytes for p in model.parameters())
    return Window(clock.step_ms, clock.exchanges, clock.peak_bytes, weight_bytes)


def strategy_of(name: str) -> Any:
    """The Trainer's strategy, over Gloo: NCCL refuses two learners on one GPU."""
    if name == APART:
        return "auto"
    if name == DDP:
        return DDPStrategy(process_group_backend="gloo")
    return HADPSGDStrategy(
        "ring",
        "async",
        super_learner_size=1,
        gossip_every=NEVER if name == IDLE else 1,
        wire_dtype=WIRES.get(name),
        process_group_backend="gloo",
    )


class Clock(L.Callback):
    """Times the steps after the warm-up.

    Args:
        steps: Steps in the window.

    Attributes:
        step_ms: Duration of a step.
        exchanges: In a step.
        peak_bytes: As in `Window`.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.step_ms, self.exchanges, self.peak_bytes = 0.0, 0.0, 0

    @override
    def on_train_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == WARMUP:
            self._begin = self._look(trainer)

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == WARMUP + self._steps:
            begin, end = self._begin, self._look(trainer)
            self.step_ms = 1e3 * (end[0] - begin[0]) / self._steps
            self.exchanges = (end[1] - begin[1]) / self._steps
            if pl_module.device.type == "cuda":
                self.peak_bytes = torch.cuda.max_memory_allocated(pl_module.device)

    def _look(self, trainer: L.Trainer) -> tuple[float, int]:
        """The time, once the GPU is done, and the number of exchanges so far."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        statistics = (
            trainer.strategy.gossip_statistics()
            if isinstance(trainer.strategy, HADPSGDStrategy)
            else None
        )
        return time.monotonic(), statistics.exchanges if statistics else 0
