"""How long training waits for a checkpoint: Lightning's way, whole files, background.

    python benchmarks/checkpoint_saving.py [--folder F] [--rounds 5]

The checkpoint is that of the acoustic model of the papers under momentum SGD: 43.2
million weights and as many numbers of optimizer state. The three ways take turns in one
run, and what is compared are their medians: the training thread's time within `save`.
Beside them, the physical limit: a copy of as many bytes in memory.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_adpsgd.checkpoint_io import WholeCheckpointIO
from lightning_adpsgd.saving import SaveThread

NUM_WEIGHTS = 43_154_944
NUM_LAYERS = 54


def checkpoint() -> dict[str, Any]:
    """Weights and momentum, in as many tensors as the model has."""

    def tensors() -> dict[str, torch.Tensor]:
        pieces = torch.randn(NUM_WEIGHTS).chunk(NUM_LAYERS)
        return {f"layer{n}": piece.clone() for n, piece in enumerate(pieces)}

    return {"state_dict": tensors(), "optimizer_states": [{"state": tensors()}]}


def seconds(action: Callable[[], Any]) -> float:
    """Of the calling thread."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def copy(value: dict[str, Any], room: list[torch.Tensor]) -> None:
    """The least that a snapshot takes."""
    states = (value["state_dict"], value["optimizer_states"][0]["state"])
    tensors = [tensor for state in states for tensor in state.values()]
    for target, tensor in zip(room, tensors, strict=True):
        target.copy_(tensor)


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Exposed seconds of each way."""
    value, thread, whole = checkpoint(), SaveThread(), WholeCheckpointIO()
    room = [torch.zeros(len(t)) for t in value["state_dict"].values()] * 2
    path = folder / "a.ckpt"
    write = partial(whole.save_checkpoint, path=path)
    ways: dict[str, Callable[[], Any]] = {
        "copy in memory": lambda: copy(value, room),
        "Lightning": lambda: TorchCheckpointIO().save_checkpoint(value, path),
        "whole file": lambda: whole.save_checkpoint(value, path),
        "in the background": lambda: thread.save(value, path, write),
    }
    taken: dict[str, list[float]] = {name: [] for name in (*ways, "behind")}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(seconds(way))
        taken["behind"].append(seconds(thread.wait))
    thread.stop()
    return taken


def main() -> None:
    """Prints the medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        taken = measure(Path(folder), arguments.rounds)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    for name, median in medians.items():
        spread = f"{min(taken[name]):.3f} to {max(taken[name]):.3f}"
        print(f"{name:18} {median:7.3f} s  ({spread})")
    ratio = medians["in the background"] / medians["whole file"]
    print(f"background / whole file: {ratio:.3f}")


if __name__ == "__main__":
    main()
