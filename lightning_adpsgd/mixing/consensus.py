"""The consensus model: the mean of all super-learners, which replaces the weights.

Between `enter` and `leave`, the module's weights are the mean in all learners. The
local weights are kept aside and restored, but for buffers that a program has changed in
between: a threshold that a program sets at the end of a validation stays.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_adpsgd.mixing.communication import Communication
from lightning_adpsgd.weights.flat import Weights


class Consensus(NamedTuple):
    """The distance of the trained weights from their mean, when that was last taken.

    Attributes:
        distance: ``sqrt(mean_i |w_i - mean w|^2)`` over all weights.
        relative_distance: distance divided by ``|mean w|``.
        members: number of islands in the mean; 0 without islands.
    """

    distance: float
    relative_distance: float
    members: int = 0

    @classmethod
    def of(cls, spread: float, square: float, members: int = 0) -> "Consensus":
        """Makes it from the mean squared distance and the squared norm of the mean."""
        distance, norm = spread**0.5, square**0.5
        return cls(distance, distance / norm if norm else 0.0, members)


def all_diverged(whom: str) -> FloatingPointError:
    """The error when no weights are finite, so that there is no mean."""
    return FloatingPointError(
        f"the weights of all {whom} are infinite or NaN: training has diverged; lower "
        "the learning rate or lengthen its warm-up"
    )


Average = Callable[[list[Tensor], list[Tensor]], Consensus]


class ConsensusModel:
    """The mean over all super-learners; every learner must make the same calls.

    Args:
        communication: averaging, which pauses and settles before the mean is taken.
        meet: function that waits until all learners have come to the named meeting.
        average: function that replaces vectors by their mean and returns the distance
            of the trained weights from it.

    Attributes:
        adopts: whether the last `enter` said that `leave` is to adopt the mean.
    """

    def __init__(
        self,
        flat: Weights,
        communication: Communication,
        meet: Callable[[str], object],
        average: Average,
    ) -> None:
        self._flat, self._communication = flat, communication
        self._meet, self._average = meet, average
        self._local: list[Tensor] | None = None
        self._mean_buffers: list[Tensor] = []
        self.adopts = False

    @property
    def entered(self) -> bool:
        """Whether the module holds the mean."""
        return self._local is not None

    def local_weights(self) -> list[Tensor] | None:
        """A copy of what `leave` would restore; None if the module holds no mean."""
        if self._local is None:
            return None
        copies = [vector.clone() for vector in self._local]
        self._take_changed_buffers(copies)
        return copies

    def enter(
        self, occasion: str, adopts: bool = False, unmerged: bool = False
    ) -> Consensus:
        """Replaces the weights of all learners by their mean.

        Args:
            occasion: name of the meeting, the same in all learners.
            adopts: whether `leave` is to adopt the mean. Peers that have left earlier
                then average with the mean, and not with the local weights.
            unmerged: whether `leave` restores the weights without what exchanges have
                changed, which is merged later: a program that puts back what it kept
                of the weights loses nothing.
        """
        self.adopts = adopts
        self._communication.pause()
        self._meet(occasion)
        unmerged = unmerged and self._communication.has_exchanges
        # The distance is that of the weights in training. Settling would make two
        # super-learners equal if their last exchange was the last event.
        trained = [vector.clone() for vector in self._flat.vectors]
        self._communication.settle()
        self._flat.check_views()
        vectors = self._flat.vectors
        self._local = trained if unmerged else [vector.clone() for vector in vectors]
        shown = vectors if adopts else self._local
        self._communication.set_aside(shown, unmerged)
        try:
            consensus = self._average(vectors, trained)
        except FloatingPointError:  # no learner has a mean, and all keep their weights
            self.leave(adopt=False)
            raise
        self._mean_buffers = [b.clone() for b in self._flat.buffers_in(vectors)]
        return consensus

    @torch.no_grad()
    def leave(self, adopt: bool) -> None:
        """Restores the local weights or adopts the mean, and resumes exchanges."""
        assert self._local is not None
        if not adopt:
            self._take_changed_buffers(self._local)
            for vector, local in zip(self._flat.vectors, self._local, strict=True):
                vector.copy_(local)
        self._local, self._mean_buffers = None, []
        self._communication.resume()

    def _take_changed_buffers(self, local_weights: list[Tensor]) -> None:
        here = self._flat.buffers_in(self._flat.vectors)
        local = self._flat.buffers_in(local_weights)
        for now, mean, kept in zip(here, self._mean_buffers, local, strict=False):
            # A NaN of a learner that has diverged is in the mean, and changes nothing.
            if not torch.allclose(now, mean, rtol=0.0, atol=0.0, equal_nan=True):
                kept.copy_(now)
