"""The process groups of a job: across super-learners and inside each of them."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_adpsgd.weights.streams import side_stream, wait_for_stream


class Groups(NamedTuple):
    """The groups of one learner; each is driven by one engine alone.

    Attributes:
        counterparts: learners in the same place of every super-learner, in the order of
            the super-learners.
        gradients: this super-learner, for DDP; None if it is a single learner.
        shards: this super-learner once more, for what gossip brought in.
        on_device: whether `counterparts` and `shards` carry tensors of a GPU, by NCCL;
            otherwise those of the host, by Gloo.
    """

    counterparts: dist.ProcessGroup
    gradients: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    on_device: bool


def has_nccl(device: torch.device) -> bool:
    """Whether the default process group carries tensors of this device by NCCL."""
    return device.type == "cuda" and "nccl" in dist.get_backend_config()


def make_groups(
    super_learner_size: int,
    timeout: timedelta | None,
    device: torch.device,
    on_device: bool = False,
) -> Groups:
    """Makes the groups; a collective, which all learners of the job call.

    Consecutive ranks form a super-learner, as launchers number a machine's processes.

    Args:
        super_learner_size: N.
        timeout: longest wait of an operation.
        device: device of the weights. Their gradients are reduced by what the default
            group uses for it.
        on_device: as in `Groups`; `has_nccl` must hold.
    """
    size, count = super_learner_size, dist.get_world_size() // super_learner_size
    across = [[s * size + n for s in range(count)] for n in range(size)]
    within = [[s * size + n for n in range(size)] for s in range(count)]
    backend = "nccl" if on_device else "gloo"
    counterparts = _own_group(across, timeout, backend)
    gradients = shards = None
    if size > 1:
        default = None if device.type == "cuda" else "gloo"
        gradients = _own_group(within, timeout, default)
        shards = _own_group(within, timeout, backend)
    for group in (counterparts, shards) if on_device else ():
        _connect(group, device)
    return Groups(counterparts, gradients, shards, on_device)


def make_mesh(
    device_type: str, super_learner_size: int, timeout: timedelta
) -> DeviceMesh:
    """The mesh over which this super-learner shards; a collective of all learners.

    Args:
        device_type: "cpu" or "cuda".
        super_learner_size: N.
        timeout: longest wait of an operation.

    Returns:
        Mesh of dimensions "data_parallel", of N learners, and "tensor_parallel", of 1.
    """
    size, num_learners = super_learner_size, dist.get_world_size()
    backend = "gloo" if device_type == "cpu" else None
    ranks = list(range(num_learners))
    within = [ranks[begin : begin + size] for begin in range(0, num_learners, size)]
    shards = _own_group(within, timeout, backend)
    alone = _own_group([[rank] for rank in ranks], timeout, backend)
    first = dist.get_rank() // size * size
    return DeviceMesh.from_group(
        [shards, alone],
        device_type,
        [[rank] for rank in range(first, first + size)],
        mesh_dim_names=("data_parallel", "tensor_parallel"),
    )


def wrap_in_ddp(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    device: torch.device,
    device_ids: list[int] | None,
    arguments: Mapping[str, Any],
) -> DistributedDataParallel:
    """DDP over a group, made on a stream of its own, as torch's notes on CUDA ask."""
    wait_for_stream(device)
    with side_stream(device):
        wrapped = DistributedDataParallel(
            model, device_ids=device_ids, process_group=group, **arguments
        )
        wait_for_stream(device)
    return wrapped


def _own_group(
    partition: list[list[int]], timeout: timedelta | None, backend: str | None
) -> dist.ProcessGroup:
    # Every learner makes every group, in the same order: torch requires it.
    groups = [
        dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in partition
    ]
    rank = dist.get_rank()
    group = groups[next(i for i, ranks in enumerate(partition) if rank in ranks)]
    assert isinstance(group, dist.ProcessGroup)
    return group


def _connect(group: dist.ProcessGroup | None, device: torch.device) -> None:
    # NCCL connects at the first operation, for which all must come; in a round of a
    # matching some may have nothing to do.
    if group is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
