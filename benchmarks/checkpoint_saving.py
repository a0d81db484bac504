"""How long training waits for a checkpoint: Lightning's way, whole files, background.

The checkpoint is that of the acoustic model of the papers under momentum SGD: 43.2
million weights and as many numbers of optimizer state. The figure is the training
thread's time within a save. The wait for the background thread, while it writes, is
measured separately. The limit is a copy of as many bytes in memory.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, take_turns
from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO
from lightning_adpsgd.strategy.checkpoints.saving import BackgroundCheckpointIO

NUM_WEIGHTS = 43_154_944
NUM_LAYERS = 54
REPETITIONS = 7
COPY, LIGHTNING = "copy in memory (the limit)", "Lightning's, without fsync"
WHOLE, SNAPSHOT = "whole file", "in the background: the snapshot"
BEHIND = "in the background: the rest, which nobody waits for"


def checkpoint() -> dict[str, Any]:
    """Weights and momentum, in as many tensors as the model has."""

    def tensors() -> dict[str, torch.Tensor]:
        pieces = torch.randn(NUM_WEIGHTS).chunk(NUM_LAYERS)
        return {f"layer{n}": piece.clone() for n, piece in enumerate(pieces)}

    return {"state_dict": tensors(), "optimizer_states": [{"state": tensors()}]}


def copy(value: dict[str, Any], room: list[torch.Tensor]) -> None:
    """Copies all tensors: the least time that a snapshot takes."""
    states = (value["state_dict"], value["optimizer_states"][0]["state"])
    tensors = [tensor for state in states for tensor in state.values()]
    for target, tensor in zip(room, tensors, strict=True):
        target.copy_(tensor)


def ways(folder: Path, beside: BackgroundCheckpointIO) -> dict[str, Callable[[], Any]]:
    """The work of the training thread, for one way of saving after another."""
    value, whole, path = checkpoint(), WholeCheckpointIO(), folder / "a.ckpt"
    room = [torch.zeros(len(t)) for t in value["state_dict"].values()] * 2
    return {
        COPY: lambda: copy(value, room),
        LIGHTNING: lambda: TorchCheckpointIO().save_checkpoint(value, path),
        WHOLE: lambda: whole.save_checkpoint(value, path),
        SNAPSHOT: lambda: beside.save_in_background(value, path),
        BEHIND: beside.wait,
    }


def measure(quick: bool = False) -> Report:
    """Measures the five in turn; the target is for the snapshot over the whole file."""
    torch.set_num_threads(1)
    beside = BackgroundCheckpointIO(WholeCheckpointIO())
    with tempfile.TemporaryDirectory() as folder:
        works = ways(Path(folder), beside)
        seconds = take_turns(works, 3 if quick else REPETITIONS, warmups=1)
        beside.teardown()
    report = Report(
        "What training waits for while a checkpoint of 345 MB is saved (1 thread).",
        limit=WHOLE,
    )
    for name, taken in seconds.items():
        ratio = taken.median / seconds[WHOLE].median
        print_row(name, f"{taken:.3f} s", f"{ratio:.2f}")
        report.rows.append(Row({"way": name}, taken, "s", ratio))
    ratio = seconds[SNAPSHOT].median / seconds[WHOLE].median
    claim = "the snapshot, of the whole file's time"
    report.targets.append(Target(claim, 0.5, ratio, at_least=False))
    return report
