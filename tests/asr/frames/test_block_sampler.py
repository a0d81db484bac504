"""Orders that are computed: every sample once, mixed, the same for all learners."""

from itertools import chain
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from lightning_adpsgd.asr.frames.block_sampler import (
    BlockOrder,
    BlockSampler,
    _permutation,
)
from lightning_adpsgd.epochs.work_units import draw_epoch


@pytest.mark.parametrize("size", [1, 2, 100, 65_536, 262_145])
def test_a_permutation_has_every_number_once(size: int) -> None:
    numbers = torch.arange(size)
    assert torch.equal(_permutation(size, "key").sort().values, numbers)


def test_every_number_comes_to_every_place_about_as_often() -> None:
    size = 50_000
    places = torch.arange(0, size, size // 10)
    found = torch.stack([_permutation(size, f"key {k}")[places] for k in range(500)])
    for place in range(10):
        counts = torch.bincount(found[:, place] * 10 // size, minlength=10).double()
        statistic = ((counts - 50) ** 2 / 50).sum()
        # Chi-squared with 9 degrees of freedom is beyond this once in 200,000.
        assert statistic < 42


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 20), st.integers(0, 9))
def test_an_order_has_every_sample_once(
    num_samples: int, block: int, blocks: int, seed: int
) -> None:
    order = BlockOrder(num_samples, seed, block, block * blocks)
    assert sorted(order[:].tolist()) == list(range(num_samples))


def test_a_part_of_an_order_is_that_of_the_whole() -> None:
    order = BlockOrder(80_000, 1, 16, 1024)
    whole = order[:]
    places = ((0, 0), (5, 9), (32_760, 32_770), (100, 79_999), (79_990, 81_000))
    for first, last in places:
        assert torch.equal(order[first:last], whole[first:last])
    assert torch.equal(order[10:20:3], whole[10:20:3])


def test_a_window_holds_whole_blocks_of_everywhere() -> None:
    order = BlockOrder(100_000, 0, block=10, window=1000)
    start = order[99_990:]  # not one block: orders begin anywhere
    assert len(start) == 10
    window = order[:1000]
    shifted = (window[None] - torch.arange(10)[:, None]) % 100_000 // 10
    whole = [torch.bincount(row, minlength=10_000) for row in shifted]
    assert any(int((counts == 10).sum()) == 100 for counts in whole)
    assert window.double().mean() == pytest.approx(50_000, rel=0.1)
    assert window.max() - window.min() > 90_000


def test_a_batch_has_samples_of_as_many_blocks_as_it_can() -> None:
    batch = BlockOrder(33_900_000, 0)[:256]
    assert len((batch // 64).unique()) > 200


def test_neighbours_in_an_order_have_nothing_in_common() -> None:
    order = BlockOrder(20_000, 0)[:].double()
    pairs = torch.stack([order[:-1], order[1:]])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.03  # 4 standard errors


def test_orders_of_other_epochs_are_others() -> None:
    sampler = BlockSampler(range(1000))
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(BlockSampler(range(1000), seed=1)) == list(sampler)


@pytest.mark.parametrize("num_learners", [1, 2, 3, 7])
@pytest.mark.parametrize("num_samples", [1, 5, 21, 70_000])
def test_shares_are_equal_and_have_every_sample(
    num_samples: int, num_learners: int
) -> None:
    data = range(num_samples)
    shares = [
        list(BlockSampler(data, num_learners, rank)) for rank in range(num_learners)
    ]
    assert {len(share) for share in shares} == {-(-num_samples // num_learners)}
    assert set(chain(*shares)) == set(data)


def test_an_epoch_that_is_shared_has_the_order_of_all_samples() -> None:
    sampler = BlockSampler(range(1000), num_replicas=4, rank=1)
    epoch = draw_epoch(BatchSampler(sampler, 32, False), seed=3, epoch=2)
    assert epoch.samples(epoch.everything()) == BlockOrder(1000, 5)[:].tolist()
    assert epoch.bounds.tolist() == [*range(0, 1000, 32), 1000]


def test_equal_epochs_and_no_others_have_equal_fingerprints() -> None:
    def fingerprint(num_samples: int, seed: int, rank: int) -> str:
        sampler = BlockSampler(range(num_samples), 2, rank)
        return draw_epoch(BatchSampler(sampler, 8, False), seed, 0).fingerprint()

    assert fingerprint(100, 0, 0) == fingerprint(100, 0, 1)
    assert len({fingerprint(n, s, 0) for n in (100, 99) for s in (0, 1)}) == 4


def test_the_blocks_of_a_very_large_order_are_drawn_once() -> None:
    _permutation.cache_clear()
    order = BlockOrder(33_900_000, 0)
    for first in range(0, 10 * 65_536, 65_536):
        assert len(order[first : first + 100].unique()) == 100
    assert _permutation.cache_info().misses == 11  # ten windows, and all blocks


def test_a_sampler_of_nothing_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="`num_samples` must be at least 1, got 0"):
        BlockSampler(range(0))


def test_lightning_leaves_the_sampler_as_it_is() -> None:
    sampler = BlockSampler(range(10), 2, 1)
    fabric = L.Fabric(accelerator="cpu", devices=1)
    data: Any = DataLoader(range(10), sampler=sampler)  # pyright: ignore
    loader: Any = fabric.setup_dataloaders(data)
    assert loader.sampler is sampler
