"""The process groups of a job, over a default group that is bound to a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from lightning_adpsgd.coordination import groups
from lightning_adpsgd.coordination.groups import make_groups, retire
from lightning_adpsgd.topology.partition import Partition
from tests.helpers import PATIENCE, forked


def test_gloo_makes_groups_though_lightning_binds_it_to_a_gpu(tmp_path: Path) -> None:
    def learner(rank: int) -> list[list[int]]:
        address = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", address, rank=rank, world_size=4)
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = torch.device("cuda:0")
        made = make_groups(Partition((2, 2)), PATIENCE, torch.device("cpu"))
        own = *made.counterparts, made.gradients, made.shards
        return [dist.get_process_group_ranks(group) for group in own]

    outcomes = forked(4, learner)
    assert [outcome.error for outcome in outcomes] == [""] * 4
    assert [outcome.value for outcome in outcomes] == [
        [[0, 2], [0, 1], [0, 1]],
        [[1, 3], [0, 1], [0, 1]],
        [[0, 2], [2, 3], [2, 3]],
        [[1, 3], [2, 3], [2, 3]],
    ]


def test_groups_that_are_used_no_more_end_with_the_next_ones(tmp_path: Path) -> None:
    """Each has threads and sockets of Gloo; a process may have many jobs."""

    def learner(rank: int) -> list[bool]:
        address = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", address, rank=rank, world_size=2)
        pair, cpu = Partition((2,)), torch.device("cpu")
        first, kept = (make_groups(pair, PATIENCE, cpu) for _ in range(2))
        retire(*first.counterparts, first.gradients, first.shards, None)
        for _ in range(2):  # those that have ended are no error
            make_groups(pair, PATIENCE, cpu)
            retire(first.gradients)
        known = dist.distributed_c10d._world.pg_map
        groups = (*first.counterparts, first.gradients, first.shards, kept.gradients)
        return [group in known for group in groups]

    outcomes = forked(2, learner)
    assert [outcome.error for outcome in outcomes] == [""] * 2
    assert [outcome.value for outcome in outcomes] == [[False] * 3 + [True]] * 2


def test_ddp_is_made_on_a_stream_of_its_own_between_two_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, gpu, model = list[object](), torch.device("cuda"), torch.nn.Linear(1, 1)

    @contextmanager
    def side_stream(device: torch.device) -> Iterator[None]:
        done.append("enters")
        yield
        done.append("leaves")

    def wrapped(module: object, **options: object) -> str:
        done.append((module, options))
        return "wrapped"

    monkeypatch.setattr(groups, "side_stream", side_stream)
    monkeypatch.setattr(groups, "wait_for_stream", done.append)
    monkeypatch.setattr(groups, "DistributedDataParallel", wrapped)
    made: Any = groups.wrap_in_ddp(model, Mock(gradients="g"), gpu, static_graph=True)
    assert made == "wrapped"
    options = {"process_group": "g", "static_graph": True}
    assert done == [gpu, "enters", (model, options), gpu, "leaves"]
