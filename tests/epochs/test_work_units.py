"""Epochs and work units: every position once, whatever the sizes."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from typing_extensions import override

from lightning_adpsgd.epochs.ranges import Ranges, count, numbers, take, union
from lightning_adpsgd.epochs.work_units import Epoch, WorkUnits, draw_epoch
from tests.epochs.test_ranges import disjoint_ranges


def regular(num_samples: int, batch_size: int, drop_last: bool = False) -> Epoch:
    sampler = SequentialSampler(range(num_samples))
    return draw_epoch(BatchSampler(sampler, batch_size, drop_last), 0, 0)


def every(units: WorkUnits) -> list[list[Ranges]]:
    return [units[index] for index in range(len(units))]


@settings(deadline=None)
@given(
    num_samples=st.integers(0, 200),
    batch_size=st.integers(1, 17),
    count_s=st.integers(1, 5),
    size_n=st.integers(1, 4),
    ranges=st.none() | disjoint_ranges(),
)
def test_units_hold_every_position_once_and_no_empty_batch(
    num_samples: int, batch_size: int, count_s: int, size_n: int, ranges: Ranges | None
) -> None:
    epoch = regular(num_samples, batch_size)
    left = take(epoch.everything(), 0, num_samples) if ranges is None else ranges
    left = tuple((a, min(b, num_samples)) for a, b in left if a < num_samples)
    if (left or not num_samples) and count(left) < count_s * size_n:
        with pytest.raises(ValueError, match="at least as many samples as learners"):
            WorkUnits(left, epoch, count_s, size_n)
        return
    units = WorkUnits(left, epoch, count_s, size_n)
    batches = list(chain.from_iterable(every(units)))
    assert sorted(chain.from_iterable(map(numbers, batches))) == numbers(left)
    assert all(0 < count(batch) <= batch_size + 1 for batch in batches)
    assert all(len(unit) == size_n for unit in every(units))
    assert not left or len(units) >= count_s
    for index in range(len(units) + 1):
        rest = chain.from_iterable(every(units)[index:])
        assert units.positions(((index, len(units)),)) == union(*rest)


def test_units_of_whole_epochs_are_the_users_batches() -> None:
    units = WorkUnits(((0, 20),), regular(20, 3), 2, 2)
    assert every(units)[:3] == [
        [((0, 3),), ((3, 6),)],
        [((6, 9),), ((9, 12),)],
        [((12, 15),), ((15, 18),)],
    ]
    # One batch of two samples is left for two learners.
    assert every(units)[3:] == [[((18, 19),), ((19, 20),)]]


def test_drop_last_leaves_full_batches_alone() -> None:
    epoch = regular(31, 4, drop_last=True)
    units = WorkUnits(epoch.everything(), epoch, 2, 2, drop_last=True)
    batches = list(chain.from_iterable(every(units)))
    assert [count(batch) for batch in batches] == [4] * 6
    with pytest.raises(ValueError, match=r"full batches as learners in an epoch, 8, "):
        WorkUnits(epoch.everything(), epoch, 4, 2, drop_last=True)


@pytest.mark.parametrize(
    ("drop_last", "told"),
    [(True, "full batches .* 8, got 7"), (False, "samples .* 8, got 5")],
)
def test_a_refusal_counts_what_is_too_few(drop_last: bool, told: str) -> None:
    epoch = regular(31, 4, drop_last) if drop_last else regular(5, 4)
    with pytest.raises(ValueError, match=told):
        WorkUnits(epoch.everything(), epoch, 4, 2, drop_last=drop_last)


@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_without_a_batch_is_refused_but_not_the_end_of_another(
    drop_last: bool,
) -> None:
    epoch = regular(3, 4, drop_last) if drop_last else regular(0, 4)
    with pytest.raises(ValueError, match=r"as learners in an epoch, 2, got 0; use"):
        WorkUnits(epoch.everything(), epoch, 2, 1, drop_last=drop_last)
    assert len(WorkUnits((), regular(20, 4, drop_last), 2, 1, drop_last)) == 0


class Shuffled(Sampler[int]):
    """A sampler of a user who draws by Python's generator."""

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(40), 40))

    def __len__(self) -> int:
        return 40


def user_samplers() -> dict[str, Any]:
    data = range(40)
    generator = torch.Generator().manual_seed(9)
    return {
        "random": RandomSampler(data),
        "own generator": RandomSampler(data, generator=generator),
        "replacement": RandomSampler(data, replacement=True, num_samples=50),
        "subset": SubsetRandomSampler(range(5, 25)),
        "weighted": WeightedRandomSampler([1.0, 2.0, 0.0, 4.0] * 10, 30),
        "by Python": Shuffled(),
    }


@pytest.mark.parametrize("name", list(user_samplers()))
def test_an_epoch_depends_on_seed_and_number_alone(name: str) -> None:
    def drawn(seed: int, epoch: int) -> list[int]:
        torch.manual_seed(torch.seed())
        batches = BatchSampler(user_samplers()[name], 8, False)
        order = draw_epoch(batches, seed, epoch).order
        return order[:].tolist()

    assert drawn(3, 1) == drawn(3, 1)
    assert drawn(3, 1) != drawn(3, 2)
    assert drawn(3, 1) != drawn(5, 1)
    assert len(drawn(3, 1)) == len(user_samplers()[name])


def test_drawing_an_epoch_leaves_the_common_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    draw_epoch(BatchSampler(RandomSampler(range(10)), 2, False), 1, 1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("sampler", [SequentialSampler, RandomSampler])
def test_an_epoch_is_drawn_on_the_cpu_whatever_the_default_device(sampler: Any) -> None:
    batches = BatchSampler(sampler(range(10)), 4, False)
    expected = draw_epoch(batches, 1, 1)
    with torch.device("meta"):
        found = draw_epoch(batches, 1, 1)
        units = every(WorkUnits(((0, 10),), found, 2, 1))
    assert torch.equal(found.order[:], expected.order[:])
    assert sorted(chain(*map(numbers, chain(*units)))) == list(range(10))


class Buckets(Sampler[list[int]]):
    """Batches of unequal size, in another order in every epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @override
    def __iter__(self) -> Any:
        batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
        yield from batches[self.epoch :] + batches[: self.epoch]


def test_batches_of_a_users_batch_sampler_stay_together() -> None:
    epoch = draw_epoch(Buckets(), 0, 1)
    units = WorkUnits(epoch.everything(), epoch, 2, 1)
    drawn = [epoch.samples(unit[0]) for unit in every(units)]
    assert drawn == [[3], [4, 5], [6, 7, 8, 9], [0, 1, 2]]


def test_samplers_of_other_things_than_integers_are_refused() -> None:
    class Pairs(Sampler[Any]):
        @override
        def __iter__(self) -> Any:
            yield (1, 2)

    with pytest.raises(ValueError, match=r"integers, got \(1, 2\) from Pairs"):
        draw_epoch(BatchSampler(Pairs(), 1, False), 0, 0)


@pytest.mark.parametrize("kind", [numpy.int64, torch.tensor])
def test_integers_of_other_libraries_are_integers(kind: Any) -> None:
    class Theirs(Sampler[Any]):
        @override
        def __iter__(self) -> Any:
            return map(kind, (2, 0, 1))

    epoch = draw_epoch(BatchSampler(Theirs(), 1, False), 0, 0)
    assert epoch.samples(epoch.everything()) == [2, 0, 1]


def test_fingerprints_tell_orders_and_batches_apart() -> None:
    epochs = [regular(12, 3), regular(12, 4), regular(13, 3)]
    turned = replace(epochs[0], order=epochs[0].order[:].flip(0))
    assert len({epoch.fingerprint() for epoch in [*epochs, turned]}) == 4
