"""The contents of an epoch: samples in order, batches, and work units.

All are pure functions of a sampler, a seed and the number of the epoch, so every
learner computes the same ones without communication. A *work unit* is the subject of
one claim: a batch for each of the N learners of a super-learner, which step together.

A sample is identified by its position in the epoch's order, and a set of samples is a
set of ranges of positions (`ranges`).
"""

import operator
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from lightning_adpsgd.epochs.ranges import Ranges, count, from_rows, split, union


class Order(Protocol):
    """Indices into a data set, computed on demand; `str` tells it from others."""

    def __len__(self) -> int: ...
    def __getitem__(self, places: slice, /) -> Tensor: ...


@runtime_checkable
class WholeOrder(Protocol):
    """A sampler that computes the order of all samples, whoever reads them."""

    def whole_order(self, seed: int) -> Order:
        """The order of all samples, the same for equal seeds on all machines."""
        ...


@dataclass(frozen=True, eq=False)
class Epoch:
    """The samples of an epoch and the boundaries of its batches.

    Attributes:
        order: indices into the data set, [sample]; a tensor, or computed on demand.
        bounds: positions in `order`, increasing from 0, [batch + 1].
    """

    order: Tensor | Order
    bounds: Tensor

    def everything(self) -> Ranges:
        """The positions that batches cover."""
        end = int(self.bounds[-1])
        return ((0, end),) if end else ()

    def samples(self, ranges: Ranges) -> list[int]:
        """The data set indices of the samples at these positions."""
        parts = [self.order[first:last] for first, last in ranges]
        return torch.cat(parts).tolist() if parts else []

    def fingerprint(self) -> str:
        """A text, equal for equal epochs and almost never otherwise."""
        size = f"{len(self.order)} samples, {len(self.bounds) - 1} batches"
        return f"{size}, {self.checksum}"

    @cached_property
    def checksum(self) -> str:
        """A checksum of the order."""
        if not isinstance(self.order, Tensor):
            return str(self.order)
        weights = torch.arange(1, len(self.order) + 1, device="cpu")
        # Integers wrap around, alike on all machines.
        return str(int((self.order * weights * weights).sum()))


def draw_epoch(batches: Any, seed: int, epoch: int) -> Epoch:
    """Draws the batches of an epoch from a batch sampler, dependent only on the seed.

    The samplers' own generators are seeded too.

    Args:
        batches: batch sampler of a loader: torch's own over any sampler, or one that
            yields lists of indices.
        seed: seed of the whole training.
    """
    sampler = getattr(batches, "sampler", None)
    with _seeded(seed + epoch, generators_of(batches, sampler)):
        for source in (batches, sampler):
            set_epoch = getattr(source, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        if type(batches) is not BatchSampler:
            return _irregular([_indices(batch) for batch in batches])
        order = _order(batches.sampler, seed + epoch)
    return _regular(order, batches.batch_size, batches.drop_last)


_MOST_SEEDS = 1 << 62


class Terms(NamedTuple):
    """The terms that give a work unit's number the same meaning in all learners.

    Work units are cut from the positions `base` of the epoch's order.
    """

    seed: int
    base: Ranges
    fingerprint: str

    @classmethod
    def from_row(cls, row: Iterable[Any]) -> "Terms":
        """Reads terms from a JSON row; a ValueError if the seed is out of bounds."""
        seed, base, fingerprint = row
        if not 0 <= int(seed) < _MOST_SEEDS:
            raise ValueError(f"`seed` must be from 0 to 2^62, got {seed!r}")
        return cls(int(seed), from_rows(base), str(fingerprint))


class EpochState(NamedTuple):
    """The state of an unfinished epoch in a checkpoint.

    Attributes:
        seed: seed of the order of samples, in all epochs.
        remaining: positions that no learner has trained on.
        checksum: checksum of the order; empty in files of earlier versions.
    """

    epoch: int
    seed: int
    num_samples: int
    remaining: Ranges
    checksum: str = ""


def remaining_of(epoch: Epoch, number: int, state: EpochState | None) -> Ranges:
    """What another job left of an epoch; a ValueError if its samples are others."""
    if state is None or state.epoch != number:
        return epoch.everything()
    if not state.remaining:  # as at its end, whatever the data are now
        return ()
    if state.num_samples != len(epoch.order):
        raise ValueError(
            f"the checkpoint was written in an epoch of {state.num_samples} "
            f"samples and this one has {len(epoch.order)}: resume with the same "
            "data, or from a checkpoint at the end of an epoch"
        )
    if state.checksum not in ("", epoch.checksum):
        raise ValueError(
            "the checkpoint was written in an epoch with another order of its "
            f"{state.num_samples} samples: resume with the same sampler and `shuffle`, "
            "or from a checkpoint at the end of an epoch"
        )
    return state.remaining


class WorkUnits:
    """The rest of an epoch, cut into units of one batch for each of N learners.

    The batches are the user's. If their number is not divisible by N, the samples of
    the last ones are dealt evenly among the N learners; fewer than N samples join the
    previous unit. If there are fewer units than super-learners, all samples are dealt
    evenly, so that every learner makes a step.

    Args:
        ranges: remaining positions.
        drop_last: whether to drop the batches that do not fill a unit of N.
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
        self._num = self._count_units()
        # The rest of an epoch may be empty, but not a whole epoch.
        is_over = not ranges and bool(epoch.everything())
        if self._num < num_super_learners and not is_over:
            self._deal_evenly(ranges, num_super_learners)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> list[Ranges]:
        """The positions of each learner's batch."""
        if self._evenly:
            return self._evenly[index * self._size : (index + 1) * self._size]
        pieces = self._pieces_from(index, index + 1)
        if len(pieces) == self._size:
            return [(piece,) for piece in pieces]
        return split(tuple(pieces), self._size)

    def positions(self, units: Ranges) -> Ranges:
        """The positions of these work units."""
        return union(*(self._pieces_from(start, stop) for start, stop in units))

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

    def _count_units(self) -> int:
        full, rest = divmod(len(self._pieces), self._size)
        starts, stops = self._pieces[full * self._size :].T
        num_over = int((stops - starts).sum())
        own = rest and not self._drop_last and num_over >= self._size
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
    """The ranges, cut at the boundaries of batches: [piece, 2]."""
    pieces = [torch.empty(0, 2, dtype=torch.int64, device="cpu")]
    for first, last in ranges:
        inner = bounds[(bounds > first) & (bounds < last)]
        begin, end = bounds.new_tensor([[first], [last]])
        edges = torch.cat([begin, inner, end])
        pieces.append(torch.stack([edges[:-1], edges[1:]], dim=1))
    return torch.cat(pieces)


def _regular(order: Tensor | Order, batch_size: int, drop_last: bool) -> Epoch:
    end = len(order) - len(order) % batch_size if drop_last else len(order)
    bounds = torch.arange(0, end, batch_size, device="cpu")
    return Epoch(order, torch.cat([bounds, torch.tensor([end], device="cpu")]))


def _irregular(batches: list[Tensor]) -> Epoch:
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    sizes = [0, *(len(batch) for batch in batches if len(batch))]
    return Epoch(torch.cat([none, *batches]), none.new_tensor(sizes).cumsum(0))


def _order(sampler: Any, seed: int) -> Tensor | Order:
    if isinstance(sampler, WholeOrder):
        return sampler.whole_order(seed)
    if type(sampler) is SequentialSampler:
        return torch.arange(len(sampler), device="cpu")
    if type(sampler) is RandomSampler and not sampler.replacement:
        num_samples = len(sampler.data_source)  # pyright: ignore[reportArgumentType]
        if sampler.num_samples == num_samples:
            # As the sampler does, but without a list of Python's integers.
            generator = sampler.generator
            device = "cpu" if generator is None else generator.device
            return torch.randperm(num_samples, generator=generator, device=device).cpu()
    return _indices(sampler)


def _indices(sampler: Iterable[Any]) -> Tensor:
    values = [_index(value, sampler) for value in sampler]
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _index(value: Any, sampler: Iterable[Any]) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(
            "`work_sharing` needs samplers that yield integers, got "
            f"{value!r} from {type(sampler).__name__}"
        ) from None


def generators_of(*samplers: Any) -> list[torch.Generator]:
    """The random generators that samplers have of their own."""
    found = [getattr(sampler, "generator", None) for sampler in samplers]
    return [value for value in found if isinstance(value, torch.Generator)]


@contextmanager
def _seeded(seed: int, generators: list[torch.Generator]) -> Iterator[None]:
    python, common = random.getstate(), torch.get_rng_state()
    random.seed(seed)
    for generator in (torch.default_generator, *generators):
        generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(common)
