"""What a learner's communication has come to: the counters, and a copy of them."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Statistics(NamedTuple):
    """What a learner's communication has done so far.

    Attributes:
        exchanges: Averages completed with a peer (or rounds, in the synchronous modes).
        merges: Times that the training side took in what was averaged.
        bytes_sent: Payload sent to other super-learners by this learner.
        exposed_seconds: Time that the training thread waited for communication.
        staleness: Optimizer steps between snapshot and merge, and how often.
        refused: Averages from which something was left out, because it was not finite
            or too far away.
        damaged: Parts of vectors left out because they arrived damaged.
        peer_ages: For each super-learner that this one exchanges with asynchronously,
            optimizer steps since the last completed exchange, or since the start.
        members: Super-learners that are there, this one counted; 0 where their number
            never changes.
        joined: Super-learners that have come since this one did.
        lost: Super-learners that have gone without a word since then.
    """

    exchanges: int
    merges: int
    bytes_sent: int
    exposed_seconds: float
    staleness: dict[int, int]
    refused: int
    peer_ages: dict[int, int]
    far: int = 0
    reloads: int = 0
    members: int = 0
    joined: int = 0
    lost: int = 0
    damaged: int = 0


@dataclass
class Tally:
    """The counters behind `Statistics`; whoever shares it guards it."""

    exchanges: int = 0
    merges: int = 0
    bytes_sent: int = 0
    exposed_seconds: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    peer_ages: dict[int, int] = field(default_factory=dict)
    far: int = 0
    reloads: int = 0
    damaged: int = 0

    def snapshot(self) -> Statistics:
        """An immutable copy."""
        copies = {
            "staleness": dict(self.staleness),
            "peer_ages": dict(self.peer_ages),
        }
        return Statistics(**{**vars(self), **copies})

    def merged(self, staleness: int) -> None:
        """Counts one merged exchange of this age in optimizer steps."""
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
