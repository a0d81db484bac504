"""The process groups of a job: across super-learners and inside each of them."""

from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist


class Groups(NamedTuple):
    """The groups of one learner; each is driven by one engine alone.

    Attributes:
        counterparts: The learners in the same place of every super-learner, in the
            order of the super-learners.
        gradients: This super-learner, for DDP; none if it is a single learner.
        shards: This super-learner once more, for what gossip brought in.
    """

    counterparts: dist.ProcessGroup
    gradients: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None


def make_groups(super_learner_size: int, timeout: timedelta | None) -> Groups:
    """Makes them; a collective, which all learners of the job call.

    Consecutive ranks form a super-learner, as launchers number a machine's processes.
    """
    size, count = super_learner_size, dist.get_world_size() // super_learner_size
    across = [[s * size + n for s in range(count)] for n in range(size)]
    within = [[s * size + n for n in range(size)] for s in range(count)]
    counterparts = _own_group(across, timeout)
    if size == 1:
        return Groups(counterparts, None, None)
    return Groups(
        counterparts, _own_group(within, timeout), _own_group(within, timeout)
    )


def _own_group(
    partition: list[list[int]], timeout: timedelta | None
) -> dist.ProcessGroup:
    # Everybody makes every group, in the same order: torch requires it.
    groups = [
        dist.new_group(ranks, timeout=timeout, backend="gloo") for ranks in partition
    ]
    rank = dist.get_rank()
    group = groups[next(i for i, ranks in enumerate(partition) if rank in ranks)]
    assert isinstance(group, dist.ProcessGroup)
    return group
