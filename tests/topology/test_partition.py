"""Learners divided into super-learners, against a list of all of them."""

from typing import Any

import pytest

from lightning_adpsgd.topology.partition import Partition


@pytest.mark.parametrize("sizes", [(1,), (2, 4), (3, 1, 2), (1, 3), (2, 2, 2)])
def test_each_learner_is_in_one_super_learner_at_one_place(sizes: Any) -> None:
    partition = Partition(sizes)
    expected = [(s, n, size) for s, size in enumerate(sizes) for n in range(size)]
    ranks = range(partition.num_learners)
    assert [
        (partition.super_learner(r), partition.place(r), partition.size(r))
        for r in ranks
    ] == expected
    assert [rank for of_one in partition.all_ranks for rank in of_one] == list(ranks)


@pytest.mark.parametrize("sizes", [(2, 4), (3, 1, 2), (2, 2, 2)])
def test_weights_make_a_mean_over_learners_one_over_super_learners(sizes: Any) -> None:
    partition = Partition(sizes)
    ranks = range(partition.num_learners)
    values = [10.0 ** partition.super_learner(rank) for rank in ranks]
    weighted = [v * partition.weight(r) for v, r in zip(values, ranks, strict=True)]
    mean = sum(10.0**s for s in range(len(sizes))) / len(sizes)
    assert sum(weighted) / len(ranks) == pytest.approx(mean)
    assert not partition.is_even or set(map(partition.weight, ranks)) == {1.0}


def test_equal_sizes_are_even() -> None:
    assert Partition((2, 2)).is_even
    assert not Partition((2, 4)).is_even


def test_each_learner_reads_its_own_batches_unless_layers_are_shared() -> None:
    assert Partition((2, 4)).num_readers == 6
    assert Partition((2, 4), 2).num_readers == 3
