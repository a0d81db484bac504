"""The communication side of a learner, without any peer."""

import threading

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.weights.replica import (
    PART_ELEMENTS,
    Replica,
    as_real,
    averaging_dtype,
)

pytestmark = pytest.mark.usefixtures("engine_device")


def replica_of(weights: Tensor, chunk_elements: int = 4) -> Replica:
    return Replica([[as_real(weights)]], chunk_elements, threading.Condition())


def change_everything(replica: Replica, by: Tensor) -> None:
    begin = 0
    for chunk in replica.chunks:
        for part in chunk.parts:
            part.add(by[begin : begin + len(part)], 1.0)
            begin += len(part)


def read(replica: Replica) -> Tensor:
    """x, as an exchange reads it."""
    found = []
    for chunk in replica.chunks:
        for part in chunk.parts:
            into = torch.empty(len(part), dtype=part.dtype)
            part.read(into)
            found.append(into)
    return torch.cat(found)


def test_what_exchanges_changed_is_read_at_once_and_merged_at_a_boundary() -> None:
    weights = torch.arange(10.0)
    replica = replica_of(weights)
    change_everything(replica, torch.ones(10))
    assert torch.equal(weights, torch.arange(10.0))
    assert torch.equal(read(replica), torch.arange(10.0) + 1)
    for _ in range(2):  # the second has nothing to merge
        replica.merge()
        assert torch.equal(weights, torch.arange(10.0) + 1)
        assert torch.equal(read(replica), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_that_an_exchange_may_read_is_named_while_no_change_waits(
    dtype: torch.dtype,
) -> None:
    weights = torch.arange(3, dtype=dtype)
    replica = replica_of(weights)
    ((part,),) = (chunk.parts for chunk in replica.chunks)
    assert part.plain is not None
    assert torch.equal(part.plain, weights)
    change_everything(replica, torch.ones(3, dtype=dtype))
    assert part.plain is None
    replica.merge()
    assert torch.equal(part.plain, weights)  # pyright: ignore


def test_half_precision_has_no_memory_that_an_exchange_may_read() -> None:
    replica = replica_of(torch.arange(3.0).bfloat16())
    ((part,),) = (chunk.parts for chunk in replica.chunks)
    assert part.plain is None


def test_an_exchange_reads_the_newest_weights() -> None:
    weights = torch.zeros(6)
    replica = replica_of(weights)
    weights.fill_(7.0)  # an optimizer step
    assert read(replica).tolist() == [7.0] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ten_thousand_merges_lose_nothing_to_rounding(dtype: torch.dtype) -> None:
    """The changes are far below the resolution of the weights: one by one none counts.

    Their sum is exact to the last bit of half-precision weights, which without what is
    kept would not move at all.
    """
    weights = torch.full((6,), 100.0, dtype=dtype)
    replica = replica_of(weights)
    small = torch.tensor([1e-3, -1e-3, 2e-3, 3e-4, -2e-3, 1e-5])
    exact = weights.double() + 10_000 * small.double()
    for _ in range(10_000):
        change_everything(replica, small)
        replica.merge()
    resolution = torch.finfo(dtype).eps * 128
    # Each of the merges of single precision rounds by itself, as an optimizer's does.
    rounding = 10_000 * resolution / 2 if dtype == torch.float32 else resolution / 2
    assert (weights.double() - exact).abs().max() <= rounding + 1e-4
    if dtype != torch.float32:
        # Peers see what the weights cannot hold.
        assert (read(replica).double() - exact).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_taken_is_read_until_it_is_merged(dtype: torch.dtype) -> None:
    weights = torch.zeros(8, dtype=dtype)
    replica = replica_of(weights)
    replica.chunks[1].parts[0].add(torch.ones(4), 1.0)
    into = [torch.zeros(4), torch.zeros(4)]
    assert replica.take(into) == [1]
    assert into[1].tolist() == [1.0] * 4
    assert read(replica).tolist() == [0.0] * 4 + [1.0] * 4
    replica.chunks[1].parts[0].add_awaiting(copied := torch.zeros(2), 2)
    assert copied.tolist() == [1.0] * 2
    replica.merge()
    assert not weights.any()
    replica.merge_taken(1, into[1])
    assert weights.tolist() == [0.0] * 4 + [1.0] * 4
    assert read(replica).tolist() == [0.0] * 4 + [1.0] * 4


def test_what_is_taken_is_lost_with_the_weights_that_others_replace() -> None:
    replica = replica_of(torch.zeros(4))
    change_everything(replica, torch.ones(4))
    replica.take([torch.zeros(4)])
    replica.put([torch.full((4,), 5.0)])
    assert read(replica).tolist() == [5.0] * 4


def test_complex_weights_are_twice_as_many_real_ones() -> None:
    weights = torch.zeros(3, dtype=torch.complex64)
    replica = replica_of(weights)
    change_everything(replica, torch.arange(6.0))
    replica.merge()
    assert weights.tolist() == [0 + 1j, 2 + 3j, 4 + 5j]


def test_parts_are_numbered_through_and_cover_everything() -> None:
    lengths = (PART_ELEMENTS + 5, 3)
    shards = [torch.zeros(lengths[0]), torch.zeros(lengths[1], dtype=torch.float64)]
    replica = Replica([shards], 2 * PART_ELEMENTS, threading.Condition())
    places = [part.place for chunk in replica.chunks for part in chunk.parts]
    assert places == ([0, 1, 2] if replica.device.type == "cpu" else [0, 1])
    assert [len(chunk) for chunk in replica.chunks] == list(lengths)
    assert [chunk.dtype for chunk in replica.chunks] == [torch.float32, torch.float64]


def test_half_precision_is_averaged_in_single() -> None:
    assert averaging_dtype(torch.bfloat16) == torch.float32
    assert averaging_dtype(torch.float64) == torch.float64


def test_tensors_of_one_dtype_fill_chunks_together() -> None:
    """As shards lie: many tensors, of which few fill a chunk."""
    lengths = (3, 0, 5, 1, 2)
    tensors = [torch.zeros(n) for n in lengths] + [torch.zeros(3, dtype=torch.float64)]
    replica = Replica([tensors], 4, threading.Condition())
    assert [len(chunk) for chunk in replica.chunks] == [4, 4, 3, 3]
    by_chunk = [[len(part) for part in chunk.parts] for chunk in replica.chunks]
    assert by_chunk == [[3, 1], [4], [1, 2], [3]]
    places = [part.place for chunk in replica.chunks for part in chunk.parts]
    assert places == list(range(6))


def test_what_is_read_put_and_merged_stays_in_its_tensor() -> None:
    ramp = torch.arange(11.0)
    tensors = [piece.clone() for piece in ramp.split([3, 5, 1, 2])]
    replica = Replica([tensors], 4, threading.Condition())
    assert torch.equal(torch.cat(replica.snapshot()), ramp.cpu())
    change_everything(replica, 10 * ramp)
    replica.merge_all()
    assert torch.equal(torch.cat(tensors), 11 * ramp)
    replica.put([chunk / 11 for chunk in replica.snapshot()])
    assert torch.equal(torch.cat(tensors), ramp)
    aside = [tensor + 1 for tensor in tensors]
    replica.show([aside])
    assert torch.equal(torch.cat(replica.snapshot()), ramp.cpu() + 1)
    replica.spread([torch.zeros(len(chunk)) for chunk in replica.chunks], [tensors])
    assert not torch.cat(tensors).any()


def test_a_chunk_is_read_and_changed_through_its_parts() -> None:
    """As an exchange does whose messages are as long as a chunk."""
    tensors = [torch.ones(3), torch.ones(1)]
    replica = Replica([tensors], 4, threading.Condition())
    (chunk,) = replica.chunks
    chunk.add(torch.arange(4.0), 0.5)
    chunk.read(found := torch.empty(4))
    assert found.tolist() == [1.0, 1.5, 2.0, 2.5]
    replica.merge_all()
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.5, 2.0], [2.5]]
