"""Learners of one super-learner: in threads, and over Gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_adpsgd.node import Node
from tests.helpers import PATIENCE, ThreadNode, forked, together


def test_a_node_of_one_has_its_own_part_and_flags() -> None:
    into, flags = torch.zeros(3), torch.tensor([0, 1], dtype=torch.uint8)
    Node().gather(torch.arange(3.0), [into], PATIENCE)
    Node().agree(flags, PATIENCE)
    assert into.tolist() == [0, 1, 2]
    assert flags.tolist() == [0, 1]


def cross(node: Node) -> Any:
    """What a learner has after the two collectives of a node."""
    into = [torch.zeros(2, dtype=torch.float64) for _ in range(node.size)]
    node.gather(torch.full((2,), node.index, dtype=torch.float64), into, PATIENCE)
    flags: Tensor = torch.zeros(node.size + 1, dtype=torch.uint8)
    flags[node.index] = 1
    node.agree(flags, PATIENCE)
    return [part.tolist() for part in into], flags.tolist()


def over_gloo(folder: Path) -> list[Any]:
    def learner(rank: int) -> Any:
        dist.init_process_group(
            "gloo", f"file://{folder}/store", world_size=2, rank=rank
        )
        group = dist.new_group([0, 1], backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return cross(Node(group))

    return [outcome.value for outcome in forked(2, learner)]


@pytest.mark.parametrize("where", ["threads", "gloo"])
def test_a_node_gathers_the_parts_in_order_and_agrees_on_the_largest(
    where: str, tmp_path: Path
) -> None:
    if where == "gloo":
        results = over_gloo(tmp_path)
    else:
        results = together([lambda n=n: cross(n) for n in ThreadNode.connect(2)])
    assert results == [([[0, 0], [1, 1]], [1, 1, 0])] * 2
