"""What a learner's communication has done: the counters, and a copy of them."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Statistics(NamedTuple):
    """What a learner's communication has done so far.

    Attributes:
        exchanges: number of averages completed with a peer; in the synchronous modes,
            of rounds.
        merges: number of times that the training side took in what was averaged.
        bytes_sent: payload sent to other super-learners by this learner.
        exposed_seconds: time that the training thread waited for communication.
        staleness: number of averages by their age, the optimizer steps between snapshot
            and merge.
        refused: number of averages from which something was left out, because it was
            non-finite or too far away.
        peer_ages: optimizer steps since the last completed exchange, or the start, for
            each super-learner that this one exchanges with asynchronously.
        far: number of averages from which something was left out as too far away.
        reloads: number of times that the weights were replaced by those of a peer.
        members: number of super-learners present, this one included; 0 where it never
            changes.
        joined: number of super-learners that have come since this one did.
        lost: number of super-learners that have gone without a word since then.
        damaged: number of parts left out because they arrived damaged.
        list_age_seconds: time since the member list was last read; 0 without islands.
        service_errors: number of turns in which a service thread of an island, such as
            that of the member list, met an unexpected error.
        service_seconds: time since the last good turn of the service thread for which
            that is longest; 0 without islands.
        skipped: number of step boundaries at which no partner was ready in time.
        partner_seconds: time that the training thread waited for a partner, part of
            `exposed_seconds`.
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
    list_age_seconds: float = 0.0
    service_errors: int = 0
    service_seconds: float = 0.0
    skipped: int = 0
    partner_seconds: float = 0.0


@dataclass
class Tally:
    """The counters behind `Statistics`; threads that share it guard it."""

    exchanges: int = 0
    merges: int = 0
    bytes_sent: int = 0
    exposed_seconds: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    far: int = 0
    damaged: int = 0
    skipped: int = 0
    partner_seconds: float = 0.0

    def snapshot(self) -> Statistics:
        """A copy, without what others count."""
        own = {**vars(self), "staleness": dict(self.staleness)}
        return Statistics(peer_ages={}, **own)

    def merged(self, staleness: int) -> None:
        """Counts a merged average of this age in optimizer steps."""
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
