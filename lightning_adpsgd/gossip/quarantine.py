"""Keeps diverged weights from spreading, and brings a diverged learner back.

Both ends leave out a part of an exchange that is non-finite or too far away, so that
the mean is preserved (`Disagreement`). A learner whose own weights are to blame tries
to continue from those of a peer, at most three times in ten minutes (`Quarantine`).
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor

from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.protocol import Outcome
from lightning_adpsgd.mixing.averages import all_finite
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup, gather_shards
from lightning_adpsgd.weights.replica import Replica

_log = logging.getLogger(__name__)

# A part is too far beyond this many usual disagreements, and norms of the weights.
USUAL_TIMES = 20.0
WEIGHTS_TIMES = 2.0
# Exchanges until the usual disagreement is known; its largest factor per exchange then.
NUM_FIRST = 16
MOST_CHANGE = 1.25

MOST_FAR_EXCHANGES = 8
"""Consecutive exchanges that find weights too far away until they count as diverged."""

MOST_RELOADS = 3
"""The most attempts to continue from a peer's weights within ten minutes."""

# The most peers that one attempt asks.
_MOST_PEERS = 8
# In seconds. Only recent attempts count: a long training may have many accidents.
_WINDOW_S = 600.0
# The pause after the first attempt; each further pause is twice as long.
_FIRST_PAUSE_S = 0.5


class WeightsDiverged(FloatingPointError):
    """A learner's weights diverged, and no peer's weights can replace them."""


class Disagreement:
    """The usual distance between the two ends of one lane.

    Exploding weights stay finite for a while, and each exchange carries half of them to
    a healthy learner. Both ends of a lane see the same messages, and judge them alike.

    A part is too far away if its disagreement is 20 times the usual disagreement of all
    parts together, and more than twice the norm of the smaller end's weights. The first
    condition alone would mistake a start from equal weights, or a merge after a long
    separation, for an explosion. The second alone would mistake weights that start at
    zero. The usual disagreement grows by a quarter per exchange at most, and shrinks by
    a fifth, so that it cannot keep up with weights that double each time. During the
    first 16 exchanges that found a disagreement, it is the largest so far, and no part
    counts as far.
    """

    def __init__(self) -> None:
        self._usual, self._num_seen = 0.0, 0
        self._square, self._was_far = 0.0, False

    def is_unusual(self, distance: float) -> bool:
        """Whether a disagreement of this norm requires a check of the weights."""
        self._square += distance * distance
        return self._num_seen >= NUM_FIRST and distance > USUAL_TIMES * self._usual

    def is_far(self, distance: float, norm: float, other_norm: float) -> bool:
        """Whether to leave out an unusual part, given the norms at both ends."""
        # An overflow to infinity is far, too.
        is_near = distance <= WEIGHTS_TIMES * min(norm, other_norm)
        self._was_far = self._was_far or not is_near
        return not is_near

    def end(self) -> None:
        """Ends an exchange, and updates the usual distance unless it was too far."""
        distance, was_far = math.sqrt(self._square), self._was_far
        self._square, self._was_far = 0.0, False
        if was_far or not 0.0 < distance < math.inf:
            return
        if self._num_seen < NUM_FIRST:
            self._usual = max(self._usual, distance)
        else:
            lowest, highest = self._usual / MOST_CHANGE, self._usual * MOST_CHANGE
            self._usual = min(max(distance, lowest), highest)
        self._num_seen += 1


WeightsOf = Callable[[int, float], list[Tensor] | None]
"""The weights of a peer, if they come within so many seconds."""


class Quarantine:
    """Detects whether a learner has diverged, and reloads a peer's weights if so.

    Non-finite weights count as diverged at once. If two ends are too far apart, the
    larger weights are to blame. They count as diverged only if this persists, because
    the next exchange may be with another peer and find nothing.

    The learners of one super-learner have the same weights. If one of them notices a
    fault in its shard, all recover at one step, each from its shard of the same peer.
    The engine's lock guards what `note` writes. The training thread calls the others.

    Args:
        vectors: all weights that this learner holds.
        replica: this learner's shards.
    """

    def __init__(
        self,
        members: Members,
        vectors: Sequence[Tensor],
        group: SuperLearnerGroup,
        replica: Replica,
        timeout: timedelta,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._attempts = clock, deque[float]()
        self._members, self._vectors, self._group = members, vectors, group
        self._replica, self._timeout = replica, timeout
        self.num_reloads = 0
        # Exchanges that read weights before this step no longer count.
        self._since, self._num_far = -1, Counter[int]()
        self._symptom: str | None = None

    def note(self, outcome: Outcome, section: int = 0) -> None:
        """Records the outcome of an exchange of a section."""
        if outcome.first_step <= self._since:
            return
        if not outcome.is_to_blame:
            self._num_far[section] = 0
        elif not outcome.finite:
            self._symptom = "were infinite or NaN"
        else:
            self._num_far[section] += 1
            if self._num_far[section] >= MOST_FAR_EXCHANGES:
                self._symptom = "had gone far from those of its peers"

    def begin_anew(self) -> None:
        """Forgets what exchanges have found, before training goes on from new weights.

        An exchange under way that began at this step or an earlier one does not count
        either: it may have read the old ones.
        """
        with self._replica.guard:  # one of them may be noted now
            self._since, self._symptom = self._replica.step, None
            self._num_far.clear()

    @property
    def wants_reload(self) -> bool:
        """Whether this learner's weights have diverged and it may reload now.

        It waits after an attempt, longer each time: a fault that hits several learners
        at once may pass, and a healthy peer may appear.
        """
        if self._symptom is None:
            return False
        num = self._num_attempts()
        pause_s = _FIRST_PAUSE_S * 2 ** (num - 1)
        return not num or self._clock() - self._attempts[-1] >= pause_s

    def _num_attempts(self) -> int:
        while self._attempts and self._clock() - self._attempts[0] > _WINDOW_S:
            self._attempts.popleft()
        return len(self._attempts)

    def reload(self, peers: Sequence[int], weights_of: WeightsOf) -> None:
        """Replaces the weights by those of a peer, if one has healthy weights.

        Args:
            peers: numbers of the peers to ask, in order; all learners of the
                super-learner use the list of the first one.

        Raises:
            WeightsDiverged: There were too many recent attempts, or the last one found
                no peer with finite weights; raised in all of the super-learner.
        """
        step, limit = self._replica.step, MOST_RELOADS
        symptom = self._symptom or "were found diverged by another of its learners"
        own = self._members.live_schedule.own
        what = f"the weights of super-learner {own} {symptom} at step {step}"
        num, *chosen = self._agreed(peers)
        self._attempts.append(self._clock())
        if num >= limit:
            raise WeightsDiverged(
                f"{what}, after {num} attempts in {_WINDOW_S / 60:g} minutes to "
                "continue from a peer's weights: check its data and its device, or "
                "lower the learning rate"
            )
        found = self._healthy_weights(chosen, weights_of)
        if found is None and num + 1 == limit:
            raise WeightsDiverged(
                f"{what}, and none of its peers {chosen} has finite weights: training "
                "has diverged; lower the learning rate or lengthen its warm-up"
            )
        if found is not None:
            self._go_on_from(found[1])
            self.num_reloads += 1
        if self._group.index == 0:
            outcome = (
                f"it continues from those of super-learner {found[0]} with a new "
                "optimizer state"
                if found is not None
                else f"none of its peers {chosen} has finite weights; it asks again"
            )
            _log.warning("%s: %s (attempt %d of %d)", what, outcome, num + 1, limit)

    def adopt(self, values: Sequence[Tensor]) -> None:
        """Continues from other weights; counts as a reload if its own have diverged.

        Their optimizer state would spoil the new ones at the next step.
        """
        self.num_reloads += self._symptom is not None
        self._go_on_from(values)

    def _go_on_from(self, values: Sequence[Tensor]) -> None:
        self._replica.put(values)
        gather_shards(self._vectors, self._group, self._timeout)
        self.begin_anew()

    def _healthy_weights(
        self, peers: Sequence[int], weights_of: WeightsOf
    ) -> tuple[int, list[Tensor]] | None:
        # The other learners wait twice as long for the result.
        limit = self._timeout.total_seconds() / 2
        for peer in peers:
            values = weights_of(peer, limit)
            is_usable = values is not None and all_finite(values)
            (misses,) = self._group.agree([not is_usable], self._timeout)
            if values is not None and not misses:
                return peer, values
        return None

    def _agreed(self, peers: Sequence[int]) -> list[int]:
        """The first learner's number of attempts and peers to ask."""
        found = [0] * (_MOST_PEERS + 2)
        if self._group.index == 0:
            chosen = peers[:_MOST_PEERS]
            found[: len(chosen) + 2] = [len(chosen), self._num_attempts(), *chosen]
        number, *agreed = self._group.agree(found, self._timeout)
        return agreed[: number + 1]
