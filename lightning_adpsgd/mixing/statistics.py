"""The counters of a learner's communication, and a snapshot of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Statistics:
    """The counters of a learner's communication so far.

    Attributes:
        exchanges: number of completed exchanges with a peer, without those refused;
            number of rounds in the synchronous modes.
        merges: number of merges of averages into the training weights.
        bytes_sent: payload bytes that this learner has sent to other super-learners.
        exposed_seconds: seconds for which the training thread waited for communication.
        staleness: number of averages by age: the number of optimizer steps from the
            first reading of weights to the merge.
        refused: number of averages of which a non-finite or far part was left out.
        peer_ages: number of optimizer steps since the last exchange, averaged or
            refused, or the start, for each super-learner that this one asks.
        far: number of averages of which a part was left out as too far away.
        reloads: number of times that a peer's weights replaced this learner's.
        members: number of islands present, with this one; 0 without islands.
        joined: number of islands that have joined after this one.
        lost: number of islands gone without a goodbye since this one joined.
        damaged: number of parts left out because they arrived damaged.
        skipped: number of step boundaries at which no partner was ready in time.
        partner_seconds: the part of `exposed_seconds` that waited for a partner.
    """

    exchanges: int = 0
    merges: int = 0
    bytes_sent: int = 0
    exposed_seconds: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    peer_ages: dict[int, int] = field(default_factory=dict)
    far: int = 0
    reloads: int = 0
    members: int = 0
    joined: int = 0
    lost: int = 0
    damaged: int = 0
    skipped: int = 0
    partner_seconds: float = 0.0


class Tally(Statistics):
    """The counters while they run; threads that share them must hold a lock."""

    @classmethod
    def total(cls, tallies: Sequence["Tally"]) -> "Tally":
        """The sums of the counters of several learners."""
        names = vars(cls()).keys() - {"staleness", "peer_ages"}
        sums: dict[str, Any] = {n: sum(getattr(t, n) for t in tallies) for n in names}
        staleness = sum((Counter(one.staleness) for one in tallies), Counter[int]())
        return cls(**sums, staleness=dict(sorted(staleness.items())))

    def snapshot(self, **others: Any) -> Statistics:
        """A copy, with the fields that others count."""
        staleness = dict(self.staleness)
        return Statistics(**{**vars(self), "staleness": staleness, **others})

    def merged(self, staleness: int) -> None:
        """Counts a merged average, of this age in optimizer steps."""
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1

    def merged_all(self, first_steps: list[int], step: int) -> None:
        """Counts a merge of averages whose weights had seen these steps; empties it."""
        for first_step in first_steps:
            self.merged(step - first_step)
        self.merges += bool(first_steps)
        first_steps.clear()
