"""The schedule of mixing matrices: which one applies in which round."""

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from lightning_adpsgd.topology.matrices import check_mixing
from lightning_adpsgd.topology.named import Topology
from lightning_adpsgd.topology.topology import Part, check_part, equal_shares


@dataclass(frozen=True)
class Schedule:
    """A topology of S super-learners, with its gain and seed.

    Args:
        topology: topology, a sequence of mixing matrices.
        num_super_learners: S.
        gain: gamma in T_gamma = (1 - gamma) I + gamma T; 0 < gamma <= 1.
        seed: seed of random topologies.
    """

    topology: Topology
    num_super_learners: int
    gain: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.topology.check_size(self.num_super_learners)

    def mixing(self, round: int) -> Tensor:
        """The matrix of a round, [S, S], checked, before the gain is applied."""
        matrix = self.topology.matrix(self.num_super_learners, round, self.seed)
        check_mixing(matrix)
        return matrix

    def part(self, index: int, round: int) -> Part:
        """The checked shares that `index` takes and gives, before the gain."""
        part = self.topology.part(index, self.num_super_learners, round, self.seed)
        check_part(part)
        return part

    def asks(self, index: int, round: int) -> list[int]:
        """The peers that `index` asks in its own round number `round`."""
        return self.topology.asks(index, self.num_super_learners, round, self.seed)

    def is_mean(self, round: int) -> bool:
        """Whether all super-learners take the exact mean, as an all-reduce computes."""
        period = self.topology.period(self.num_super_learners)
        return _is_mean(
            self.topology,
            self.num_super_learners,
            round % period if period else round,
            self.seed,
        )


@lru_cache(maxsize=64)
def _is_mean(topology: Topology, size: int, round: int, seed: int) -> bool:
    # For all indices: a learner that posts an all-reduce must know that the others do.
    mean = equal_shares(range(size))
    return all(topology.takes(i, size, round, seed) == mean for i in range(size))
