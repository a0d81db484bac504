"""Gradients on several meshes, which tensor parallelism leaves, and their clipping.

FSDP2 keeps layers that a plan cuts on a mesh of two dimensions, and all others on one
of its dimensions. torch computes the norm of gradients on one mesh only. Here it is the
norm of the super-learner's whole gradient, in which each weight counts once.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_adpsgd.strategy.overrides import Overrides
from lightning_adpsgd.weights.shards import local_part

_Groups = list[list[Tensor]]


def clip_on_all_meshes(precision: Precision, overrides: Overrides) -> None:
    """Replaces the gradient clipping of the precision plugin by one for all meshes."""
    norm, value = (partial(_clip, precision, clip) for clip in (_by_norm, _by_value))
    overrides.wrap(precision, "clip_grad_by_norm", norm)
    overrides.wrap(precision, "clip_grad_by_value", value)


@torch.no_grad()
def _clip(
    precision: Precision,
    clip: Callable[[_Groups, float], None],
    lightnings: Callable[[Optimizer, float], None],
    optimizer: Optimizer,
    clip_val: float,
) -> None:
    groups = _by_mesh(precision, optimizer)
    if len(groups) < 2:
        lightnings(optimizer, clip_val)
    else:
        clip(groups, clip_val)


def _by_norm(groups: _Groups, most: float) -> None:
    found = [get_total_norm(gradients) for gradients in groups]
    norms = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
    total = torch.linalg.vector_norm(torch.stack(norms))
    # No `if`, as in torch: the host would have to wait for the GPU.
    factor = (most / (total + 1e-6)).clamp(max=1.0)
    for gradient in chain.from_iterable(groups):
        local_part(gradient).mul_(factor)


def _by_value(groups: _Groups, most: float) -> None:
    for gradient in chain.from_iterable(groups):
        local_part(gradient).clamp_(-most, most)


def _by_mesh(precision: Precision, optimizer: Optimizer) -> _Groups:
    found: dict[DeviceMesh | None, list[Tensor]] = {}
    for weight in precision.main_params(optimizer):
        if (gradient := weight.grad) is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            found.setdefault(mesh, []).append(gradient)
    return [*found.values()]


def reduce_gradients(weights: Iterable[Tensor]) -> None:
    """Gives each gradient the placement of its weight.

    Without FSDP2, the gradient of a replicated weight may still be a pending sum over
    learners. An optimizer would keep state of that kind, which no checkpoint can hold.
    """
    for weight in weights:
        gradient: Any = weight.grad
        if gradient is None or not isinstance(weight, DTensor):
            continue
        if gradient.placements != weight.placements:
            weight.grad = gradient.redistribute(placements=weight.placements)
