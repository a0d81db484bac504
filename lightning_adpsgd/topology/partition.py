"""Which learners form which super-learner: those of consecutive ranks."""

from itertools import accumulate
from typing import NamedTuple


class Partition(NamedTuple):
    """The learners of a job, divided into super-learners.

    Attributes:
        sizes: N of each super-learner, in the order of the ranks.
    """

    sizes: tuple[int, ...]

    @classmethod
    def even(cls, num_learners: int, size: int) -> "Partition":
        """Super-learners of one size, which divides the number of learners."""
        return cls((size,) * (num_learners // size))

    @property
    def num_learners(self) -> int:
        """The number of all learners."""
        return sum(self.sizes)

    @property
    def num_super_learners(self) -> int:
        """S."""
        return len(self.sizes)

    @property
    def is_even(self) -> bool:
        """Whether all super-learners are of one size."""
        return len(set(self.sizes)) == 1

    @property
    def all_ranks(self) -> list[range]:
        """The learners of each super-learner."""
        ends = accumulate(self.sizes)
        return [range(end - n, end) for n, end in zip(self.sizes, ends, strict=True)]

    def ranks(self, super_learner: int) -> range:
        """The learners of a super-learner."""
        return self.all_ranks[super_learner]

    def super_learner(self, rank: int) -> int:
        """The super-learner of a learner."""
        return next(s for s, end in enumerate(accumulate(self.sizes)) if rank < end)

    def place(self, rank: int) -> int:
        """The place of a learner in its super-learner, from 0."""
        return self.ranks(self.super_learner(rank)).index(rank)

    def weight(self, rank: int) -> float:
        """The weight at which a mean over learners is one over super-learners."""
        return self.num_learners / (self.num_super_learners * self.size(rank))

    def size(self, rank: int) -> int:
        """N of the super-learner of a learner."""
        return self.sizes[self.super_learner(rank)]
