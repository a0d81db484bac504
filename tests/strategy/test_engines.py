"""How large the messages of an engine are, and what weights it refuses."""

from dataclasses import replace
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.coordination.groups import Groups
from lightning_adpsgd.dials import Dials
from lightning_adpsgd.gossip.engine import GossipOptions
from lightning_adpsgd.islands.island import Island
from lightning_adpsgd.strategy import engines
from lightning_adpsgd.strategy.engines import (
    chunk_elements,
    make_engine,
    part_elements,
    weights_of,
)
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.weights.flat import FlatParameters
from lightning_adpsgd.weights.shards import LocalShards

MOST = GossipOptions.chunk_elements
ALONE = Groups((), None, None, False, Partition((1,)))


@pytest.mark.parametrize(
    ("elements", "expected"), [(9, 1 << 15), (96 << 16, 1 << 16), (1 << 40, MOST)]
)
def test_messages_of_shards_take_an_eighth_of_them(
    elements: int, expected: int
) -> None:
    shards = LocalShards(nn.Linear(2, 2))
    shards.vectors = [torch.empty(elements, device="meta")]
    assert chunk_elements(shards, ALONE) == expected


def test_messages_of_whole_weights_have_one_length() -> None:
    weights = FlatParameters(nn.Linear(2, 2))
    assert chunk_elements(weights, ALONE) == MOST


@pytest.mark.parametrize(
    ("elements", "expected"),
    [(9, 1 << 15), (8 * 40_000, 40 << 10), (1 << 30, GossipOptions.part_elements)],
)
def test_a_small_model_has_eight_parts_of_whole_blocks(
    elements: int, expected: int
) -> None:
    weights = FlatParameters(nn.Linear(2, 2))
    weights.vectors = [torch.empty(elements, device="meta")]
    assert part_elements(weights, ALONE) == expected
    several = ALONE._replace(partition=Partition((2, 2)))
    weights.vectors = [torch.empty(2 * elements, device="meta")]
    assert part_elements(weights, several) == expected


def dials_of(size: int) -> Dials:
    return Dials(find_topology("ring"), "async", size)


@pytest.mark.parametrize("work_sharing", [None, True])
def test_islands_know_whether_they_share_their_epochs(
    monkeypatch: pytest.MonkeyPatch, work_sharing: bool | None
) -> None:
    made = create_autospec(Island)
    made.return_value.engine = None
    monkeypatch.setattr(engines, "Island", made)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    url = "tcp://127.0.0.1:1"
    dials = replace(dials_of(1), islands=url, work_sharing=work_sharing)
    flat = FlatParameters(nn.Linear(2, 2))
    make_engine(dials, flat, ALONE, HashStore(), lambda reason: None)
    assert made.call_args.kwargs["shares_epochs"] is bool(work_sharing)


def with_complex(dtype: torch.dtype) -> nn.Module:
    module = nn.Linear(2, 2)
    module.waves = nn.Parameter(torch.zeros(3, dtype=dtype))
    return module


def test_complex_weights_beside_real_ones_of_their_precision_are_refused() -> None:
    """The learners of a super-learner would gather them in different orders."""
    module = with_complex(torch.complex64)
    with pytest.raises(ValueError, match=r"above 1, torch.complex64 .* torch.float32"):
        weights_of(module, dials_of(2), Partition((2, 2)))


def test_complex_weights_are_taken_alone_in_their_precision_or_by_one_learner() -> None:
    both = Partition((2, 2)), Partition((1, 1))
    for dtype, partition in zip((torch.complex128, torch.complex64), both, strict=True):
        module, dials = (
            with_complex(dtype),
            dials_of(partition.sizes[0]),
        )
        assert len(weights_of(module, dials, partition).vectors) == 2
