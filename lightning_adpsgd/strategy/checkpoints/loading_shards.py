"""Loads the shards of a model and its optimizers, from a folder or from one file."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from lightning_adpsgd.strategy.checkpoints.sharded import has_optimizer, read_shards


class Folder(NamedTuple):
    """A folder of shards, and whether to refuse what can run code in it."""

    path: Path
    weights_only: bool


Source = Folder | Mapping[str, Any]
"""A checkpoint to load from: its folder, or the contents of one file."""


def load_weights(model: nn.Module, source: Source, strict: bool) -> None:
    """Loads a learner's shards of the weights; a RuntimeError if they do not fit."""
    state = get_model_state_dict(model)
    if isinstance(source, Folder):
        read_shards({"state_dict": state}, source.path, strict, source.weights_only)
    else:
        state = _cut_like(source["state_dict"], state)
    set_model_state_dict(model, state, options=StateDictOptions(strict=strict))


def load_optimizers(
    model: nn.Module, source: Source, optimizers: Iterable[Optimizer]
) -> None:
    """Loads a learner's shards of the optimizer states; KeyError if there are none."""
    for number, optimizer in enumerate(optimizers):
        own = get_optimizer_state_dict(model, optimizer)
        if isinstance(source, Folder):
            if not has_optimizer(source.path, number):
                raise KeyError(f"{source.path} has no state of optimizer {number}")
            state = {f"optimizer_{number}": own}
            # Not strict: a scheduler may have given it options since.
            read_shards(state, source.path, False, source.weights_only)
            (own,) = state.values()
        else:
            by_name = FullyShardedDataParallel.rekey_optim_state_dict(
                source["optimizer_states"][number],
                OptimStateKeyType.PARAM_NAME,
                model,
            )
            own = _cut_like(by_name, own)
        set_optimizer_state_dict(model, optimizer, own)


def _cut_like(whole: Any, own: Any, of: str = "") -> Any:
    """A learner's shards of whole tensors, in nested dicts like its own values.

    Where its own values are not shards, the tensor stays whole.

    Raises:
        RuntimeError: A tensor `of` a name has another shape.
    """
    if isinstance(whole, Mapping) and isinstance(own, Mapping):
        names = {n: f"{of}.{n}".removeprefix(".") for n in whole}
        return {n: _cut_like(x, own.get(n), names[n]) for n, x in whole.items()}
    if not (isinstance(whole, torch.Tensor) and isinstance(own, DTensor)):
        return whole
    if whole.shape != own.shape:
        raise RuntimeError(
            f"the checkpoint does not fit the model: `{of}` has the shape "
            f"{tuple(whole.shape)} there and {tuple(own.shape)} here"
        )
    mesh, placements = own.device_mesh, own.placements
    lengths, begins = compute_local_shape_and_global_offset(own.shape, mesh, placements)
    for dimension, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        whole = whole.narrow(dimension, begin, length)
    part = whole.to(own.device, copy=True).contiguous()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=own.shape, stride=own.stride()
    )
