"""How far two super-learners usually are from each other, and what is too far.

A learner whose weights explode is finite for a while, and each exchange takes half of
what it has become to a healthy one. Both ends of a lane see the same messages and judge
each part of them alike, without a word: it is left out by both, and the mean stays.

A part is too far if the two disagree about it by 20 times of what they usually disagree
about in all parts together, and by more than twice the weights of the smaller end. The
first alone would take a start from equal weights, or a merge after a long time apart,
for an explosion; the second alone, weights that begin at zero. What is usual follows by
a quarter per exchange, so that growth that doubles each time is soon left behind, and
is the largest so far during the first 16 exchanges that found a disagreement.
"""

import math

USUAL_TIMES = 20.0
WEIGHTS_TIMES = 2.0
NUM_FIRST = 16
PACE = 1.25


class Disagreement:
    """Of the two ends of one lane; equal at both, for it follows what crossed alone."""

    def __init__(self) -> None:
        self._usual, self._num_seen = 0.0, 0
        self._square, self._was_far = 0.0, False

    def is_unusual(self, distance: float) -> bool:
        """Whether a part deserves a look at the weights themselves.

        Args:
            distance: Norm of what the two ends disagree about in this part.
        """
        self._square += distance * distance
        return self._num_seen >= NUM_FIRST and distance > USUAL_TIMES * self._usual

    def is_far(self, distance: float, norm: float, other_norm: float) -> bool:
        """Whether an unusual part is to be left out.

        Args:
            distance: As for `is_unusual`.
            norm: Of the part at one end.
            other_norm: Of the part at the other.
        """
        # An overflow to infinity is far, too.
        is_near = distance <= WEIGHTS_TIMES * min(norm, other_norm)
        self._was_far = self._was_far or not is_near
        return not is_near

    def end(self) -> None:
        """An exchange has ended: what is usual follows, unless it was too far."""
        distance, was_far = math.sqrt(self._square), self._was_far
        self._square, self._was_far = 0.0, False
        if was_far or not 0.0 < distance < math.inf:
            return
        if self._num_seen < NUM_FIRST:
            self._usual = max(self._usual, distance)
        else:
            lowest, highest = self._usual / PACE, self._usual * PACE
            self._usual = min(max(distance, lowest), highest)
        self._num_seen += 1
