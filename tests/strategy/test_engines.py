"""How large the messages of an engine are."""

import pytest
import torch
from torch import nn

from lightning_adpsgd.coordination.groups import Groups
from lightning_adpsgd.gossip.engine import GossipOptions
from lightning_adpsgd.strategy.engines import chunk_elements
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
    shards = LocalShards(nn.Linear(2, 2), 1)
    shards.vectors = [torch.empty(elements, device="meta")]
    assert chunk_elements(shards, ALONE) == expected


def test_messages_of_whole_weights_have_one_length() -> None:
    weights = FlatParameters(nn.Linear(2, 2))
    assert chunk_elements(weights, ALONE) == MOST
