"""Makes the job of a module, in all learners together."""

from collections.abc import Callable, Collection
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.utils import _sync_module_states

from lightning_adpsgd.coordination.gather import texts_of_all
from lightning_adpsgd.coordination.groups import Groups, make_groups
from lightning_adpsgd.coordination.startup.checks import check_same_layout
from lightning_adpsgd.dials import Dials
from lightning_adpsgd.mixing.super_learner import gather_shards
from lightning_adpsgd.strategy.engines import (
    mixes_on_device,
    sections_between,
    super_learner_of,
    weights_of,
)
from lightning_adpsgd.strategy.job import NAMESPACE, Job
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.weights.flat import Weights, averaged_buffers, ignored_by_ddp
from lightning_adpsgd.weights.shards import LocalShards, local_part

_BROADCAST_BYTES = 250 * 1024 * 1024
_MOST_NAMES = 3


def set_up_job(
    module: nn.Module,
    dials: Dials,
    partition: Partition,
    on_reload: Callable[[], None] = lambda: None,
    kept_out: Collection[str] = (),
) -> Job:
    """Makes the job of a module; a collective over the default process group.

    Afterwards all learners have the weights of learner 0, as under DDP. The weights are
    views of one vector per dtype, unless they are shards. The module must already have
    its final device and dtype. Names in `kept_out` had no mean when the resumed run
    began; they are not averaged now either.

    Raises:
        ValueError: The topology does not exist for this number of super-learners, or
            the model cannot be flattened.
        StartUpError: The models of the learners differ.
    """
    dials.topology.check_size(partition.num_super_learners)
    flat = weights_of(module, dials, partition, kept_out)
    rank, num_learners = dist.get_rank(), dist.get_world_size()
    store = _own_store()
    check_same_layout(store, rank, num_learners, flat.layout(), dials.start_patience)
    on_device = mixes_on_device(dials, partition, flat.device)
    sections = sections_between(flat, partition)
    in_background = dials.communication == "async"
    groups = make_groups(
        partition, dials.timeout, flat.device, on_device, sections, in_background
    )
    _take_first_weights(module, flat, groups, dials.timeout)
    _tell_of_buffers(module, flat.without_mean)
    if flat.without_mean:
        rank_zero_info(
            f"{', '.join(flat.without_mean)}: values that are infinite, NaN or close "
            "to the largest number have no mean. Each learner keeps its own, and a "
            "checkpoint has those of learner 0"
        )
    job = Job(dials, flat, groups, store, on_reload)
    job.coordinator.start()
    return job


def _tell_of_buffers(module: nn.Module, without_mean: list[str]) -> None:
    names = [n for n in averaged_buffers(module) if n not in without_mean]
    if names:
        shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES])
        more = len(names) - _MOST_NAMES
        rank_zero_info(
            f"{shown}{f' and {more} more' if more > 0 else ''}: buffers that are "
            "averaged with the weights. One that holds samples, such as a queue of "
            "keys, has no mean: register it with `persistent=False`"
        )


@torch.no_grad()
def _take_first_weights(
    module: nn.Module, weights: Weights, groups: Groups, timeout: timedelta
) -> None:
    if not isinstance(weights, LocalShards):
        world = dist.distributed_c10d._get_default_group()
        ignored = ignored_by_ddp(module)
        _sync_module_states(module, world, _BROADCAST_BYTES, 0, ignored)
        return
    group = super_learner_of(weights, groups)
    sections = group.own(weights.vectors)
    for shards, owners in zip(sections, groups.counterparts, strict=True):
        for shard in shards:
            dist.broadcast(shard, group=owners, group_src=0)
    gather_shards(weights.vectors, group, timeout)
    for buffer in module.buffers():
        dist.broadcast(local_part(buffer), 0)


def _own_store() -> Store:
    root = dist.distributed_c10d._get_default_store()
    # A process group may have several jobs, each with keys of its own. The gather
    # notices a learner that has failed; the checks that follow would wait for it.
    count = PrefixStore(NAMESPACE, root)
    run = count.add("runs", 1) if dist.get_rank() == 0 else 0
    return PrefixStore(f"{NAMESPACE}/{texts_of_all(str(run))[0]}", root)
