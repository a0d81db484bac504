"""The consensus model: the mean of all super-learners, put in the place of the weights.

While it is entered, the module's weights are the mean, in all learners alike; the local
weights are kept aside and come back when it is left.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_adpsgd.coordination import Coordinator
from lightning_adpsgd.mixing import Communication, to_averaging_dtype
from lightning_adpsgd.parameters import FlatParameters


class Consensus(NamedTuple):
    """How far the super-learners were from their mean when it was last taken.

    Attributes:
        distance: ``sqrt(mean_i |w_i - mean w|^2)`` over all weights.
        relative_distance: The same over ``|mean w|``.
    """

    distance: float
    relative_distance: float


class ConsensusModel:
    """Takes the mean over all super-learners; every learner calls it alike.

    Args:
        flat: The weights.
        communication: Paused while the mean is in place.
        coordinator: Where learners wait until all have paused.
    """

    def __init__(
        self,
        flat: FlatParameters,
        communication: Communication,
        coordinator: Coordinator,
    ) -> None:
        self._flat, self._communication = flat, communication
        self._coordinator = coordinator
        self.local_weights: list[Tensor] | None = None

    @property
    def entered(self) -> bool:
        """Whether the module holds the mean at present."""
        return self.local_weights is not None

    def enter(self, occasion: str) -> Consensus:
        """Replaces the weights of all learners by their mean.

        Args:
            occasion: Names the meeting; the same in all learners.
        """
        self._communication.pause()
        self._coordinator.meet(occasion)
        self._communication.settle()
        self._flat.check_views()
        self.local_weights = [vector.clone() for vector in self._flat.vectors]
        return _average(self._flat.vectors)

    @torch.no_grad()
    def leave(self, adopt: bool) -> None:
        """Puts the local weights back, or adopts the mean, and lets gossip go on."""
        if self.local_weights is None:
            return
        if not adopt:
            pairs = zip(self._flat.vectors, self.local_weights, strict=True)
            for vector, local in pairs:
                vector.copy_(local)
        self.local_weights = None
        self._communication.resume()


@torch.no_grad()
def _average(vectors: list[Tensor]) -> Consensus:
    sums = torch.zeros(2, dtype=torch.float64)
    for vector in vectors:
        mean = to_averaging_dtype(vector)
        dist.all_reduce(mean)
        # The learners of a super-learner hold equal weights, and super-learners are of
        # one size, so the mean over learners is the mean over super-learners.
        mean.div_(dist.get_world_size())
        sums[0] += (vector - mean).abs().double().square().sum()
        sums[1] += mean.abs().double().square().sum()
        vector.copy_(mean)
    dist.all_reduce(sums)
    distance, norm = sums.div_(dist.get_world_size()).sqrt().tolist()
    return Consensus(distance, distance / norm if norm else 0.0)
