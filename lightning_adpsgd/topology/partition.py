"""The division of learners into super-learners of consecutive ranks."""

from itertools import accumulate
from typing import NamedTuple


class Partition(NamedTuple):
    """The learners of a job, divided into super-learners.

    Attributes:
        sizes: N of each super-learner, in the order of the ranks.
        tensor_parallel_size: T, the number of learners of consecutive ranks that share
            each layer, and so read the same batches; divides every N.
    """

    sizes: tuple[int, ...]
    tensor_parallel_size: int = 1

    @property
    def num_learners(self) -> int:
        """The number of all learners."""
        return sum(self.sizes)

    @property
    def num_readers(self) -> int:
        """The number of learners that read different batches."""
        return self.num_learners // self.tensor_parallel_size

    @property
    def num_super_learners(self) -> int:
        """S, the number of super-learners."""
        return len(self.sizes)

    @property
    def is_even(self) -> bool:
        """Whether all super-learners have the same size."""
        return len(set(self.sizes)) == 1

    @property
    def all_ranks(self) -> list[range]:
        """The learners of each super-learner."""
        ends = accumulate(self.sizes)
        return [range(end - n, end) for n, end in zip(self.sizes, ends, strict=True)]

    @property
    def grids(self) -> list[list[list[int]]]:
        """The learners of each super-learner, [data_parallel][tensor_parallel]."""
        size = self.tensor_parallel_size
        return [
            [[*ranks[first : first + size]] for first in range(0, len(ranks), size)]
            for ranks in self.all_ranks
        ]

    def super_learner(self, rank: int) -> int:
        """The super-learner of a learner."""
        return next(s for s, end in enumerate(accumulate(self.sizes)) if rank < end)

    def place(self, rank: int) -> int:
        """The place of a learner in its super-learner, from 0."""
        return self.all_ranks[self.super_learner(rank)].index(rank)

    def weight(self, rank: int) -> float:
        """The weight of a learner in a mean that weighs super-learners equally."""
        return self.num_learners / (self.num_super_learners * self.size(rank))

    def size(self, rank: int) -> int:
        """N, the size of the super-learner that a learner is in."""
        return self.sizes[self.super_learner(rank)]
