"""What a job does when its engine, here a double, has taken a peer's weights."""

from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.dials import Dials
from lightning_adpsgd.gossip.engine import Gossip
from lightning_adpsgd.strategy import job as job_module
from lightning_adpsgd.strategy.optimizer_reset import InitialState
from lightning_adpsgd.strategy.set_up import set_up_job
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.partition import Partition
from tests.helpers import forked
from tests.learners import values

ALONE = Partition((1,))


def reload_during(call: str) -> dict[str, Any]:
    """A step with a reload in one call of the engine, and the optimizer after it."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    module, resets = nn.Linear(2, 1, bias=False), list[int]()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    initial = InitialState(optimizer)

    def on_reload() -> None:
        resets.append(len(optimizer.state))
        initial.restore()

    gossip = create_autospec(Gossip, instance=True, num_reloads=0)
    job = set_up_job(
        module, Dials(find_topology("complete"), "async", 1), ALONE, on_reload
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_module, "make_engine", lambda *_: (gossip, None))
        job.start()

    def closure() -> None:
        optimizer.zero_grad()
        module(torch.ones(1, 2)).sum().backward()

    def reload() -> None:
        gossip.num_reloads = 1
        nn.init.constant_(module.weight, 5.0)

    def update() -> None:
        job.update(optimizer.step, closure)

    update()
    assert (len(optimizer.state), resets) == (1, [])
    getattr(gossip, call).side_effect = reload
    update()
    getattr(gossip, call).side_effect = None
    found = {
        "weights": module.weight.tolist(),
        "momentum": [s["momentum_buffer"].tolist() for s in optimizer.state.values()],
    }
    update()
    job.close()
    dist.destroy_process_group()
    return {**found, "resets": resets}


@pytest.mark.parametrize(
    ("call", "momentum"), [("before_update", [[[0.0, 0.0]]]), ("after_update", [])]
)
def test_a_reload_resets_the_optimizer_once_and_drops_the_gradient(
    call: str, momentum: list[Any]
) -> None:
    """A gradient that is ready when the weights change was taken at those before."""
    (found,) = values(forked(1, lambda rank: reload_during(call)))
    assert found == {"weights": [[5.0, 5.0]], "momentum": momentum, "resets": [1]}
