"""What batches each virtual learner gets."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from typing_extensions import override

from lightning_adpsgd.virtual.learner_data import BatchesOf, Source, shares_of

DATA = TensorDataset(torch.arange(24))


def epoch(shares: BatchesOf, learner: int) -> list[int]:
    return [value for (batch,) in shares(learner) for value in batch.tolist()]


@pytest.mark.parametrize("num_learners", [4, 5])
@pytest.mark.parametrize("ahead", [0, 3])
def test_shares_are_those_of_the_distributed_sampler(
    num_learners: int, ahead: int
) -> None:
    """Also of a learner that is some epochs ahead of the others."""
    shares = shares_of(DATA, 3, num_learners, seed=5)

    def expected(learner: int, number: int) -> list[int]:
        sampler = DistributedSampler(DATA, num_learners, learner, seed=5)
        sampler.set_epoch(number)
        return list(sampler)

    found = [epoch(shares, 1) for _ in range(ahead)]
    assert found == [expected(1, number) for number in range(ahead)]
    for number in range(3):
        for learner in range(num_learners):
            of_its_own = number + ahead * (learner == 1)
            assert epoch(shares, learner) == expected(learner, of_its_own)


def test_each_sample_is_in_one_share_and_the_order_changes() -> None:
    shares = shares_of(DATA, 3, num_learners=4, seed=0)
    first, second = ([x for i in range(4) for x in epoch(shares, i)] for _ in "ab")
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_a_loader_gives_its_data_set_its_batch_size_and_its_collation() -> None:
    loader = DataLoader(DATA, 5, collate_fn=len, drop_last=True)
    shares = shares_of(loader, None, num_learners=2, seed=0)
    assert list(shares(0)) == [5, 5]
    assert list(shares_of(loader, 3, 2, 0)(1)) == [3, 3, 3, 3]


ORDERS = {
    "a subset": {"sampler": SubsetRandomSampler(range(16))},
    "weighted": {"sampler": WeightedRandomSampler([1.0] + 23 * [0.0], 24)},
    "a range": {"sampler": SequentialSampler(range(16))},
    "some more often": {"sampler": RandomSampler(DATA, replacement=True)},
    "batches": {"batch_sampler": BatchSampler(SequentialSampler(DATA), 4, False)},
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_sampler_whose_choice_would_be_lost_is_refused(order: str) -> None:
    loader = DataLoader(DATA, **ORDERS[order])
    name = type(next(iter(ORDERS[order].values()))).__name__
    for batch_size in (None, 2):
        with pytest.raises(ValueError, match=rf"with a {name}, .* give `Subset\("):
            shares_of(loader, batch_size, num_learners=2, seed=0)


def test_a_loader_that_shuffles_or_makes_no_batches_is_dealt_as_its_data_set() -> None:
    expected = epoch(shares_of(DATA, 3, num_learners=2, seed=0), 0)
    whole = DataLoader(DATA, None, collate_fn=default_collate)
    for loader in (DataLoader(DATA, 8, shuffle=True), whole):
        assert epoch(shares_of(loader, 3, num_learners=2, seed=0), 0) == expected


def test_a_source_counts_the_epochs_that_have_ended() -> None:
    source = Source(lambda learner: [10 * learner, 10 * learner + 1], 3)
    assert [source.next() for _ in range(4)] == [30, 31, 30, 31]
    assert source.epochs == 1
    assert source.next() == 30
    assert source.epochs == 2


class Endless(IterableDataset[int]):
    @override
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_data_that_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(ValueError, match="must have a length to be dealt, got a Endl"):
        shares_of(Endless(), 1, num_learners=2, seed=0)
    with pytest.raises(ValueError, match="a sample for each of 25 learners, got 24"):
        shares_of(DATA, 1, num_learners=25, seed=0)
    with pytest.raises(ValueError, match="`local_batch_size` is needed"):
        shares_of(DATA, None, num_learners=2, seed=0)
    for data in (DATA, DataLoader(DATA, 5)):
        with pytest.raises(ValueError, match="`local_batch_size` must be at least 1"):
            shares_of(data, 0, num_learners=2, seed=0)
    with pytest.raises(ValueError, match="learner 2 got no batches"):
        Source(lambda learner: [], 2).next()
