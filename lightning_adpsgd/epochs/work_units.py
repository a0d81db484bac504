"""What an epoch consists of: samples in order, batches, and portions to hand out.

Pure functions of a sampler, a seed and the number of the epoch, so that every learner
arrives at the same without a word. A *portion* is what one claim takes: a batch for
each of the N learners of a super-learner, who make their steps together.

Samples are named by their position in the epoch's order, and sets of them are ranges of
positions, so that what is left of an epoch of millions of samples is a few numbers.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from lightning_adpsgd.epochs.block_sampler import BlockOrder, BlockSampler

Ranges = tuple[tuple[int, int], ...]
"""Positions from each first up to, but not including, each second number."""


class Epoch(NamedTuple):
    """The samples of an epoch and where its batches begin and end.

    Attributes:
        order: Indices into the data set, [sample]; a tensor, or computed when asked.
        bounds: Positions in `order`, increasing from 0, [batch + 1].
    """

    order: Tensor | BlockOrder
    bounds: Tensor

    def everything(self) -> Ranges:
        """All positions that a batch covers."""
        return ((0, int(self.bounds[-1])),)

    def samples(self, ranges: Ranges) -> list[int]:
        """Indices into the data set of the samples at these positions."""
        parts = [self.order[first:last] for first, last in ranges]
        return torch.cat(parts).tolist() if parts else []

    def fingerprint(self) -> str:
        """Equal for equal epochs, and hardly ever otherwise."""
        size = f"{len(self.order)} samples, {len(self.bounds) - 1} batches"
        return f"{size}, {_checksum(self.order)}"


def draw_epoch(batches: Any, seed: int, epoch: int) -> Epoch:
    """What a batch sampler yields in an epoch, drawn from the seed and nothing else.

    Generators that its samplers were given are seeded alike.

    Args:
        batches: A loader's batch sampler: torch's own over any sampler, or one that
            yields lists of indices.
        seed: Of the whole training.
        epoch: From 0.

    Raises:
        ValueError: It yields something else than integers.
    """
    sampler = getattr(batches, "sampler", None)
    with _seeded(seed + epoch, _generators(batches, sampler)):
        for source in (batches, sampler):
            set_epoch = getattr(source, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        if type(batches) is not BatchSampler:
            return _irregular([_indices(batch) for batch in batches])
        order = _order(batches.sampler, seed + epoch)
    return _regular(order, batches.batch_size, batches.drop_last)


def count(ranges: Ranges) -> int:
    """How many positions there are."""
    return sum(last - first for first, last in ranges)


def take(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The positions from the `start`-th up to, but not including, the `stop`-th."""
    taken, offset = [], 0
    for first, last in ranges:
        begin, end = first + max(start - offset, 0), min(first + stop - offset, last)
        if begin < end:
            taken.append((begin, end))
        offset += last - first
    return tuple(taken)


def split(ranges: Ranges, num: int) -> list[Ranges]:
    """Consecutive parts whose sizes differ by one at most."""
    total = count(ranges)
    cuts = [total * place // num for place in range(num + 1)]
    return [take(ranges, start, stop) for start, stop in pairwise(cuts)]


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same positions in as few ranges as possible, in rising order."""
    pieces = torch.tensor(sorted(ranges), dtype=torch.int64).reshape(-1, 2)
    gaps = pieces[1:, 0] != pieces[:-1, 1]
    firsts = torch.cat([pieces[:1, 0], pieces[1:, 0][gaps]])
    lasts = torch.cat([pieces[:-1, 1][gaps], pieces[-1:, 1]])
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    """The positions of the first that are not in the second, both in rising order."""
    left = []
    for first, last in ranges:
        for begin, end in taken:
            if begin < last and end > first:
                left.append((first, begin))
                first = end
        left.append((first, last))
    return tuple((first, last) for first, last in left if first < last)


class Portions:
    """What is left of an epoch, cut into portions of one batch for each of N learners.

    Batches are the user's. If they do not divide by N, the samples of the last ones are
    dealt evenly among the N learners; fewer samples than N join the portion before. If
    there are fewer portions than super-learners, all samples are dealt evenly, so that
    every learner has a step to make.

    Args:
        ranges: The positions that are left.
        epoch: Where the user's batches begin and end.
        num_super_learners: S.
        super_learner_size: N.
        drop_last: Leave out the batches that do not divide by N.

    Raises:
        ValueError: There are fewer samples (with `drop_last`: batches) than learners.
    """

    def __init__(
        self,
        ranges: Ranges,
        epoch: Epoch,
        num_super_learners: int,
        super_learner_size: int,
        drop_last: bool = False,
    ) -> None:
        self._size, self._drop_last = super_learner_size, drop_last
        self._pieces = _cut(ranges, epoch.bounds)
        self._evenly: list[Ranges] = []
        self._num = self._count_portions()
        if count(ranges) > 0 and self._num < num_super_learners:
            self._deal_evenly(ranges, num_super_learners)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> list[Ranges]:
        """The positions of each learner's batch."""
        if not 0 <= index < self._num:
            raise IndexError(f"portion {index} of {self._num}")
        if self._evenly:
            return self._evenly[index * self._size : (index + 1) * self._size]
        pieces = self._pieces_from(index, index + 1)
        if len(pieces) == self._size:
            return [(piece,) for piece in pieces]
        return split(tuple(pieces), self._size)

    def left_from(self, index: int) -> Ranges:
        """The positions of this portion and all later ones."""
        return self.positions(((index, self._num),))

    def positions(self, portions: Ranges) -> Ranges:
        """The positions of these portions."""
        pieces = (self._pieces_from(start, stop) for start, stop in portions)
        return merged(chain.from_iterable(pieces))

    def _pieces_from(self, start: int, stop: int) -> list[tuple[int, int]]:
        if start >= stop:
            return []
        if self._evenly:
            dealt = self._evenly[start * self._size : stop * self._size]
            return list(chain.from_iterable(dealt))
        last = stop == self._num and not self._drop_last
        end = len(self._pieces) if last else stop * self._size
        rows = self._pieces[start * self._size : end].tolist()
        return [(begin, end) for begin, end in rows]

    def _count_portions(self) -> int:
        full, rest = divmod(len(self._pieces), self._size)
        over = int(
            sum(stop - start for start, stop in self._pieces[full * self._size :])
        )
        own = rest and not self._drop_last and over >= self._size
        return full + bool(own)

    def _deal_evenly(self, ranges: Ranges, num_super_learners: int) -> None:
        num_learners = num_super_learners * self._size
        if self._drop_last or count(ranges) < num_learners:
            what = "full batches" if self._drop_last else "samples"
            number = len(self._pieces) if self._drop_last else count(ranges)
            raise ValueError(
                f"`work_sharing` needs at least as many {what} as learners in an "
                f"epoch, {num_learners}, got {number}; use fewer learners"
            )
        self._evenly, self._num = split(ranges, num_learners), num_super_learners


def _cut(ranges: Ranges, bounds: Tensor) -> Tensor:
    """The ranges cut where batches begin and end: [piece, 2]."""
    pieces = [torch.empty(0, 2, dtype=torch.int64)]
    for first, last in ranges:
        inner = bounds[(bounds > first) & (bounds < last)]
        edges = torch.cat(
            [bounds.new_tensor([first]), inner, bounds.new_tensor([last])]
        )
        pieces.append(torch.stack([edges[:-1], edges[1:]], dim=1))
    return torch.cat(pieces)


def _checksum(order: Tensor | BlockOrder) -> str:
    if isinstance(order, BlockOrder):
        return str(order)  # its arguments
    weights = torch.arange(1, len(order) + 1)
    # Integers wrap around, alike on all machines.
    return str(int((order * weights * weights).sum()))


def _regular(order: Tensor | BlockOrder, batch_size: int, drop_last: bool) -> Epoch:
    end = len(order) - len(order) % batch_size if drop_last else len(order)
    bounds = torch.arange(0, end, batch_size)
    return Epoch(order, torch.cat([bounds, torch.tensor([end])]))


def _irregular(batches: list[Tensor]) -> Epoch:
    sizes = torch.tensor([0, *(len(batch) for batch in batches if len(batch))])
    order = torch.cat(batches) if batches else torch.empty(0, dtype=torch.int64)
    return Epoch(order, sizes.cumsum(0))


def _order(sampler: Any, seed: int) -> Tensor | BlockOrder:
    if isinstance(sampler, BlockSampler):
        return sampler.order(seed)
    if type(sampler) is SequentialSampler:
        return torch.arange(len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement:
        num_samples = len(sampler.data_source)  # pyright: ignore[reportArgumentType]
        if sampler.num_samples == num_samples:
            # As the sampler does, without a list of as many Python numbers.
            return torch.randperm(num_samples, generator=sampler.generator)
    return _indices(sampler)


def _indices(sampler: Iterable[Any]) -> Tensor:
    values = list(sampler)
    if not all(isinstance(value, int) for value in values):
        raise ValueError(
            "`work_sharing` needs samplers that yield integers, got "
            f"{next(v for v in values if not isinstance(v, int))!r} from "
            f"{type(sampler).__name__}"
        )
    return torch.tensor(values, dtype=torch.int64)


def _generators(*samplers: Any) -> list[torch.Generator]:
    found = [getattr(sampler, "generator", None) for sampler in samplers]
    return [value for value in found if isinstance(value, torch.Generator)]


@contextmanager
def _seeded(seed: int, generators: list[torch.Generator]) -> Iterator[None]:
    """Seeds what samplers draw from, and puts the common generators back."""
    python, common = random.getstate(), torch.get_rng_state()
    random.seed(seed)
    for generator in (torch.default_generator, *generators):
        generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(common)
