"""Random orders of very large data sets, computed piece by piece on demand.

torch's samplers list the whole epoch. For 34 million chunks of speech that is a
gigabyte of Python's integers in every learner. Here an epoch is a function from place
to sample:

    place  ->  a permutation within its window  ->  a permutation of blocks  ->  sample

Blocks of neighbouring samples are drawn from the whole data set, and all samples of a
window of such blocks are mixed. A disk reads a block at once, the memory of a machine
holds a window, and a batch has samples of as many blocks as there are. A data set that
fits into one window is mixed entirely. Of a larger one the order of its blocks is held,
one byte for each 8 samples.
"""

import random
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler
from typing_extensions import override

_RUN = 32_768  # samples that a sampler computes at once


@dataclass(frozen=True)
class BlockOrder:
    """The numbers from 0 to `num_samples` - 1 in a random order from a seed.

    Args:
        num_samples: number of samples, at least 1.
        seed: seed of the order; equal arguments give equal orders on all machines.
        block: number of neighbouring samples that stay in one window.
        window: approximate number of samples that are mixed with each other.

    Raises:
        ValueError: `num_samples` is below 1.
    """

    num_samples: int
    seed: int
    block: int = 64
    window: int = 65_536

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(
                f"`num_samples` must be at least 1, got {self.num_samples}"
            )

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, places: slice) -> Tensor:
        """The samples at consecutive places of the order, int64."""
        first, last, step = places.indices(self.num_samples)
        mixed = [torch.empty(0, dtype=torch.int64, device="cpu")]
        # Places p with k n // m <= p < (k + 1) n // m are in window k of m.
        begin, end = (
            ((place + 1) * self._num_windows - 1) // self.num_samples
            for place in (first, last - 1)
        )
        for window in range(begin, end + 1):
            low, high = self._edge(window), self._edge(window + 1)
            within = torch.arange(max(first, low), min(last, high), device="cpu") - low
            key = f"{self.seed} window {window}"
            mixed.append(low + _permutation(high - low, key)[within])
        return self._samples(torch.cat(mixed))[::step]

    @property
    def _num_windows(self) -> int:
        return -(-self.num_samples // self.window)

    def _edge(self, window: int) -> int:
        return window * self.num_samples // self._num_windows

    def _samples(self, mixed: Tensor) -> Tensor:
        number, within = mixed // self.block, mixed % self.block
        # The incomplete last block stays at the end of the epoch. Blocks begin
        # elsewhere in each order, so that it holds other samples each time.
        num_blocks = self.num_samples // self.block
        whole = number < num_blocks
        number[whole] = _permutation(num_blocks, f"{self.seed} blocks")[number[whole]]
        start = random.Random(f"{self.seed} start").randrange(self.num_samples)
        return (number * self.block + within + start) % self.num_samples


@lru_cache(maxsize=4)
def _permutation(size: int, key: str) -> Tensor:
    """The numbers from 0 to `size` - 1 in a random order, drawn from `key`."""
    # Batches alternate between a window and all blocks, which are drawn once.
    generator = torch.Generator().manual_seed(random.Random(key).getrandbits(62))
    return torch.randperm(size, generator=generator, device="cpu")


class BlockSampler(DistributedSampler[int]):
    """A learner's share of a `BlockOrder`, for any amount of data without a list.

    Lightning keeps a `DistributedSampler` unchanged. With `work_sharing` the shares are
    ignored, because learners claim places of the whole order (`WholeOrder`).

    The share is one stretch of the order, so that a machine reads one part of the data.
    Shares have equal sizes: the last one wraps around to the first samples.

    Args:
        dataset: data set with a length.
        num_replicas: number of learners.
        rank: number of this learner.
        seed: seed of the orders; epoch e uses `seed` + e.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, seed=seed)  # pyright: ignore[reportArgumentType]
        self._num_samples = len(dataset)
        self.whole_order(seed)  # refuses an empty data set now, not in a worker

    def whole_order(self, seed: int) -> BlockOrder:
        """The order of all samples."""
        return BlockOrder(self._num_samples, seed)

    @override
    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._runs())

    def _runs(self) -> Iterator[list[int]]:
        order = self.whole_order(self.seed + self.epoch)
        place = self.rank * self.num_samples % len(order)
        left = self.num_samples
        while left:
            samples = order[place : place + min(left, _RUN)].tolist()
            yield samples
            left -= len(samples)
            place = (place + len(samples)) % len(order)
