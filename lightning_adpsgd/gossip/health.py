"""Whether a learner's own weights are what its peers refuse."""

from lightning_adpsgd.gossip.protocol import Outcome

PATIENCE = 8
"""Exchanges in a row that find a learner's weights too far away, before it is ill."""


class Health:
    """What exchanges say of this learner's own weights; who shares it guards it.

    Weights that are not finite are ill at once. Of two that are too far apart the
    larger ones are to blame, and ill if that goes on: the next exchange may be with
    somebody else, and find nothing.

    Args:
        step: Of what was read before that step nobody is to blame any more.

    Attributes:
        illness: What is wrong; none as long as nothing is.
    """

    def __init__(self, step: int = -1) -> None:
        self._step, self._num_far = step, 0
        self.illness: str | None = None

    def note(self, outcome: Outcome) -> None:
        """An exchange has ended."""
        if outcome.first_step <= self._step:
            return
        if not outcome.mine:
            self._num_far = 0
        elif not outcome.finite:
            self.illness = "were infinite or not a number"
        else:
            self._num_far += 1
            if self._num_far >= PATIENCE:
                self.illness = "had gone far from those of its peers"
