"""The communication side of a learner, without any peer."""

import threading

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.replica import PART_ELEMENTS, Replica, to_averaging_dtype


def replica_of(weights: Tensor, chunk_elements: int = 4) -> Replica:
    replica = Replica([weights], chunk_elements, threading.Condition())
    replica.merge(step=0)
    return replica


def change_everything(replica: Replica, by: Tensor) -> None:
    begin = 0
    for chunk in replica.chunks:
        for part in chunk.parts:
            part.add(by[begin : begin + len(part)])
            begin += len(part)


def snapshot(replica: Replica) -> Tensor:
    return torch.cat([p.snapshot for chunk in replica.chunks for p in chunk.parts])


def test_a_merge_adds_what_exchanges_changed_and_takes_a_snapshot() -> None:
    weights = torch.arange(10.0)
    replica = replica_of(weights)
    change_everything(replica, torch.ones(10))
    assert torch.equal(weights, torch.arange(10.0))
    replica.merge(step=3)
    assert torch.equal(weights, torch.arange(10.0) + 1)
    assert torch.equal(snapshot(replica), weights)
    replica.merge(step=4)
    assert torch.equal(weights, torch.arange(10.0) + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ten_thousand_merges_lose_nothing_to_rounding(dtype: torch.dtype) -> None:
    """The changes are far below the resolution of the weights: one by one none counts.

    Their sum is exact to the last bit of the weights, whereas without what is kept the
    half precisions would not move at all.
    """
    weights = torch.full((6,), 100.0, dtype=dtype)
    replica = replica_of(weights)
    small = torch.tensor([1e-3, -1e-3, 2e-3, 3e-4, -2e-3, 1e-5])
    exact = weights.double() + 10_000 * small.double()
    for step in range(10_000):
        change_everything(replica, small)
        replica.merge(step)
    resolution = torch.finfo(dtype).eps * 128
    assert (weights.double() - exact).abs().max() <= resolution / 2 + 1e-4


def test_only_chunks_that_were_exchanged_or_are_wanted_cost_a_boundary() -> None:
    weights = torch.zeros(12)
    replica = replica_of(weights)
    weights.fill_(7.0)  # an optimizer step
    replica.chunks[0].parts[0].add(torch.ones(4))
    replica.expect_reading(2)
    replica.expect_reading(3)  # there is none: the end of an exchange
    replica.merge(step=5)
    assert snapshot(replica).tolist() == [8.0] * 4 + [0.0] * 4 + [7.0] * 4
    assert [chunk.parts[0].step for chunk in replica.chunks] == [5, 0, 5]
    replica.expect_reading_all()
    replica.merge(step=6)
    assert snapshot(replica).tolist() == [8.0] * 4 + [7.0] * 8


def test_what_is_taken_is_no_longer_merged_here() -> None:
    weights = torch.zeros(8)
    replica = replica_of(weights)
    replica.chunks[1].parts[0].add(torch.ones(4))
    into = [torch.full((4,), -1.0), torch.full((4,), -1.0)]
    assert replica.take(1, into) == [1]
    assert into[1].tolist() == [1.0] * 4
    assert snapshot(replica).tolist() == [0.0] * 4 + [1.0] * 4
    replica.merge(step=2)
    assert not weights.any()


def test_a_refresh_shows_peers_what_is_not_merged_yet() -> None:
    weights = torch.zeros(4)
    replica = replica_of(weights)
    change_everything(replica, torch.ones(4))
    weights.fill_(3.0)
    replica.refresh(step=1)
    assert snapshot(replica).tolist() == [4.0] * 4
    replica.merge(step=2)
    assert weights.tolist() == [4.0] * 4


def test_complex_weights_are_twice_as_many_real_ones() -> None:
    weights = torch.zeros(3, dtype=torch.complex64)
    replica = replica_of(weights)
    change_everything(replica, torch.arange(6.0))
    replica.merge(step=1)
    assert weights.tolist() == [0 + 1j, 2 + 3j, 4 + 5j]


def test_parts_are_numbered_through_and_cover_everything() -> None:
    lengths = (PART_ELEMENTS + 5, 3)
    shards = [torch.zeros(lengths[0]), torch.zeros(lengths[1], dtype=torch.float64)]
    replica = Replica(shards, 2 * PART_ELEMENTS, threading.Condition())
    places = [part.place for chunk in replica.chunks for part in chunk.parts]
    assert places == [0, 1, 2]
    assert [len(chunk) for chunk in replica.chunks] == list(lengths)
    assert [chunk.dtype for chunk in replica.chunks] == [torch.float32, torch.float64]


def test_half_precision_is_averaged_in_single() -> None:
    half = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)
    assert to_averaging_dtype(half).dtype == torch.float32
    assert to_averaging_dtype(half.double()).dtype == torch.float64
    copy = to_averaging_dtype(single := torch.ones(2))
    copy.zero_()
    assert single.tolist() == [1, 1]
