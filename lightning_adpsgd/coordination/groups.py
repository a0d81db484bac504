"""The process groups of a job: across super-learners and inside each of them."""

import socket
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_adpsgd.coordination.gather import texts_of_all
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.transport import background
from lightning_adpsgd.weights.sections import Section
from lightning_adpsgd.weights.shards import DATA_PARALLEL, TENSOR_PARALLEL
from lightning_adpsgd.weights.streams import side_stream, wait_for_stream

# Weakly: a program may end all process groups, and with them the job's store.
_RETIRED = WeakSet[dist.ProcessGroup]()


class Groups(NamedTuple):
    """The process groups of one learner, each used by only one engine.

    Attributes:
        counterparts: for each section of the weights that this learner owns, its owners
            in the order of the super-learners. With equal sizes, these are the learners
            in the same place.
        gradients: this super-learner, for DDP's gradients; None if it has one learner.
        shards: this super-learner in a second group, for changes from gossip; None if
            it has only one learner.
        on_device: whether `counterparts` and `shards` carry GPU tensors over NCCL;
            otherwise they carry host tensors over Gloo.
        partition: division of the learners into super-learners.
        sections: sections that super-learners of different sizes exchange; None if all
            have one size, so that each learner exchanges its shard.
        tensor_parallel: learners that share each layer with this one, for weights that
            all of them hold, over Gloo; None if there are no others.
        hosts: host of each learner of the job, by rank.
    """

    counterparts: tuple[dist.ProcessGroup, ...]
    gradients: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    on_device: bool
    partition: Partition
    sections: Sequence[Section] | None = None
    tensor_parallel: dist.ProcessGroup | None = None
    hosts: Sequence[str] = ()


def has_nccl(device: torch.device) -> bool:
    """Whether the default process group uses NCCL for tensors of this device."""
    return device.type == "cuda" and "nccl" in dist.get_backend_config()


def make_groups(
    partition: Partition,
    timeout: timedelta | None,
    device: torch.device,
    on_device: bool = False,
    sections: Sequence[Section] | None = None,
    in_background: bool = False,
) -> Groups:
    """Makes the groups; a collective over all learners of the job.

    Args:
        device: device of the weights. The default group's backend for it reduces their
            gradients.
        on_device: as in `Groups`; `has_nccl` must hold.
        in_background: whether the threads of `counterparts` give way to training.
    """
    within = [[*ranks] for ranks in partition.all_ranks]
    if sections is None:
        across = [[*ranks] for ranks in zip(*within, strict=True)]
    else:
        across = [
            [ranks[n] for ranks, n in zip(within, one.owners, strict=True)]
            for one in sections
        ]
    backend = "nccl" if on_device else "gloo"
    # Gloo starts threads with each group.
    with background.in_background() if in_background else nullcontext():
        counterparts = _own_groups(across, timeout, backend)
    gradients = shards = sharing = None
    if max(partition.sizes) > 1:
        default = None if device.type == "cuda" else "gloo"
        gradients, shards = (
            _own_group(within, timeout, carrier) for carrier in (default, backend)
        )
    if partition.tensor_parallel_size > 1:
        rows = [row for grid in partition.grids for row in grid]
        sharing = _own_group(rows, timeout, "gloo")
    if partition.size(dist.get_rank()) == 1:
        retire(gradients, shards)
        gradients = shards = None
    # NCCL connects at the first operation, for which all must come; in a round of a
    # matching some may have nothing to do.
    for group in (*counterparts, shards) if on_device else ():
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    _end_retired()
    further = partition, sections, sharing, texts_of_all(socket.gethostname())
    return Groups(counterparts, gradients, shards, on_device, *further)


def retire(*groups: dist.ProcessGroup | None) -> None:
    """Lets the next `make_groups` end groups that this learner no longer uses.

    All learners call that, and so have used them for the last time.
    """
    _RETIRED.update(group for group in groups if group is not None)


def retire_after(user: object, group: dist.ProcessGroup | None) -> None:
    """Does the same once the program has let go of what uses the group."""
    if group is not None:
        held = ref(group)
        finalize(user, lambda: retire(held()))


def _end_retired() -> None:
    while _RETIRED:
        group = _RETIRED.pop()
        with suppress(TypeError, ValueError):  # it has ended already
            # Some versions of NCCL wait for all learners of a group at its end.
            if dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)


def make_mesh(device_type: str, partition: Partition, timeout: timedelta) -> DeviceMesh:
    """Makes the mesh of this super-learner; a collective over all learners.

    Returns:
        The mesh with dimensions "data_parallel" (size N / T) and "tensor_parallel" (T).
    """
    backend = "gloo" if device_type == "cpu" else None
    grids = partition.grids
    columns = [[*column] for grid in grids for column in zip(*grid, strict=True)]
    rows = [row for grid in grids for row in grid]
    both = [_own_group(lines, timeout, backend) for lines in (columns, rows)]
    return DeviceMesh.from_group(
        both,
        device_type,
        grids[partition.super_learner(dist.get_rank())],
        mesh_dim_names=(DATA_PARALLEL, TENSOR_PARALLEL),
    )


def make_super_learner_group(
    device_type: str, partition: Partition, timeout: timedelta
) -> dist.ProcessGroup:
    """Makes the group of this super-learner; a collective over all learners."""
    backend = "gloo" if device_type == "cpu" else None
    return _own_group([[*ranks] for ranks in partition.all_ranks], timeout, backend)


def wrap_in_ddp(
    model: nn.Module, groups: Groups, device: torch.device, **arguments: Any
) -> DistributedDataParallel:
    """DDP over the learners of this super-learner.

    It is made on a stream of its own, as torch's notes on CUDA ask.
    """
    wait_for_stream(device)
    with side_stream(device):
        wrapped = DistributedDataParallel(
            model, process_group=groups.gradients, **arguments
        )
        wait_for_stream(device)
    return wrapped


def _own_group(
    within: list[list[int]], timeout: timedelta | None, backend: str | None
) -> dist.ProcessGroup:
    (group,) = _own_groups(within, timeout, backend)
    return group


def _own_groups(
    members: list[list[int]], timeout: timedelta | None, backend: str | None
) -> tuple[dist.ProcessGroup, ...]:
    # Lightning binds the default group to the GPU. torch 2.11 then splits the group's
    # communicator, which fails with Gloo: "no attribute 'perform_nocolor_split'".
    if dist.get_backend() == "gloo" and dist.group.WORLD is not None:
        dist.group.WORLD.bound_device_id = None
    # Every learner makes every group, in the same order: torch requires it.
    groups = [
        dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in members
    ]
    return tuple(one for one in groups if isinstance(one, dist.ProcessGroup))
