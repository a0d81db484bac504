"""The rules that both ends of an exchange follow, and the values that they send.

They are pure, without threads, networks or clocks, so that the engine (`gossip`) and
the virtual cluster (`virtual.timeline`) share them.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from random import Random
from statistics import median
from typing import NamedTuple

from torch import Tensor

# The median of a few steps ignores the end of an epoch, which takes many times as long.
_NUM_STEPS, _SHARE_OF_STEP = 5, 0.25
# A learner that the pairs of others leave over meets one of them a few steps later.
_FEW_IN_VAIN = 3
# A plausible count is below this.
_MOST = 1 << 53
_MOMENT = 1e-9  # in seconds; clocks do not tell less apart
# An exchange that takes a little longer than the last one is worth waiting for.
_TIMES_LAST = 2


class Position(NamedTuple):
    """The progress of a learner.

    Attributes:
        steps: number of optimizer steps that its weights have seen.
        samples: number of samples of all learners together, as far as it knows.
        epochs: number of epochs that it has completed.
    """

    steps: int = 0
    samples: int = 0
    epochs: int = 0

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Position":
        """Reads the numbers of a peer.

        Raises:
            ValueError: A number is negative or implausibly large.
        """
        if not all(0 <= number < _MOST for number in numbers):
            raise ValueError(f"its position must count from 0, got {[*numbers]}")
        return cls(*numbers)

    def rank(self, shares_epochs: bool) -> tuple[int, ...]:
        """What to compare to find the further of two positions.

        It is the number of steps, after that of epochs where learners share these.
        """
        return (self.epochs, self.steps) if shares_epochs else (self.steps,)


BEGINNING = Position()


def furthest(positions: Iterable[Position], shares_epochs: bool) -> Position:
    """The furthest position."""
    return max(positions, key=lambda one: (one.rank(shares_epochs), one))


class Pulled(NamedTuple):
    """A peer's position, and its weights x: a tensor for each chunk, on the host."""

    position: Position
    values: list[Tensor]


class Outcome(NamedTuple):
    """The result of one exchange at one end.

    Attributes:
        finite: whether all parts were finite; those that were not are left out.
        bytes_sent: payload bytes that this end sent.
        first_step: number of optimizer steps of the weights when reading began.
        damaged: number of parts left out because they arrived damaged at one end.
        near: whether no part was too far away (`quarantine`); such parts are left out.
        is_to_blame: whether this end's weights were non-finite, or the larger ones of
            two ends that were too far apart.
        few_bits: whether weights travelled in 8 bits or fewer.
    """

    finite: bool
    bytes_sent: int
    first_step: int
    damaged: int = 0
    near: bool = True
    is_to_blame: bool = False
    few_bits: bool = False

    @property
    def averaged(self) -> bool:
        """Whether all parts that arrived intact were averaged."""
        return self.finite and self.near


def due_round(step: int, every: int) -> int | None:
    """The round that a learner starts after `step` steps; None if none is due."""
    round, rest = divmod(step, every)
    return round if rest == 0 else None


def exchange_weight(gain: float, num_mine: int, num_theirs: int) -> float:
    """The weight a in ``d += a (theirs - mine)``, the same at both ends (Metropolis).

    `num_mine` and `num_theirs` count the exchanges that each end had under way when
    this one began, including this one.
    """
    return gain / (1 + max(num_mine, num_theirs))


class Patience:
    """How long a super-learner waits at its step boundaries, and for whom.

    docs/concepts.md, "Pairs that are ready", has the rules and their reasons.

    Args:
        max_wait: longest wait in seconds; None: a quarter of the last steps' median.
        num_peers: number of peers that may be met.

    Attributes:
        in_vain: number of boundaries in a row without a partner.
        repeats: number of meetings in a row with one of those met last.
    """

    def __init__(self, max_wait: float | None, draw: Random, num_peers: int) -> None:
        self._max_wait, self._draw, self._num_avoided = max_wait, draw, num_peers // 2
        self._steps = deque[float](maxlen=_NUM_STEPS)
        self._meetings = list[int]()  # peers, those met last at the beginning
        self.repeats = self.in_vain = 0

    @property
    def avoided(self) -> frozenset[int]:
        """The peers to avoid for the first part of a wait."""
        return frozenset(() if self.in_vain else self._meetings[: self._num_avoided])

    def waits(self, of_step: float | None) -> tuple[float, float]:
        """The wait for peers that are not avoided, and that for any, from the arrival.

        `of_step` is the duration of the last step; None: it is unknown.
        """
        if of_step is not None:
            self._steps.append(of_step)
        usual = _SHARE_OF_STEP * median(self._steps or [0.0])
        is_chosen = self._draw.random() < 0.5
        longest = usual if self._max_wait is None else self._max_wait
        if self.in_vain:
            skips = self.in_vain > _FEW_IN_VAIN and is_chosen
            return 0.0, 0.0 if skips else longest
        avoids = self.avoided and (not self.repeats or is_chosen)
        return min(longest, usual) / 2 if avoids else 0.0, longest

    def choose(self, peers: Sequence[int]) -> int:
        """The one to take of several peers."""
        new = [peer for peer in peers if peer not in self._meetings]
        return self._draw.choice(new) if new else max(peers, key=self._meetings.index)

    def met(self, partner: int | None, no_other: bool = False) -> None:
        """Remembers how a boundary has ended; `no_other` than the last may come."""
        if partner is None:
            self.in_vain += 1
            return
        is_repeat = not no_other and partner in self._meetings[: self._num_avoided]
        self.repeats = self.repeats + 1 if is_repeat else 0
        self._meetings = [partner, *(one for one in self._meetings if one != partner)]
        self.in_vain = 0


class UnderWay:
    """The exchanges that one learner has under way, and the peers in line for one.

    docs/concepts.md, "How often", has the rules. A learner that has admitted a peer
    stays free until that one begins, or declines. One that asks without a request is
    never refused. The caller must hold a lock; `now` is in seconds of any clock.

    Args:
        own: number of this learner, which for an island changes as others come and go.
    """

    def __init__(self, own: Callable[[], int] = lambda: 0) -> None:
        self._own, self._with = own, Counter[int]()
        # By peer, in seconds: when the last exchange began; how long the last one took.
        self._began, self._took = dict[int, float](), dict[int, float]()
        # Peers in line to be requested; when the last exchange with each had begun at
        # that time.
        self._line, self._met_before = set[int](), dict[int, float]()
        # Peers requested that have not answered, and since when; peers that request.
        self._requested, self._requesting = dict[int, float](), set[int]()
        # Peers for which this learner stays free, and since when.
        self._admitted = dict[int, float]()

    def enter(self, peer: int, asked: bool = False, now: float = 0.0) -> int:
        """Begins an exchange; returns the number under way, 0 if it may not begin.

        It may not if this learner asks a peer with which it is already exchanging.
        """
        if self._with[peer] and not asked:
            return 0
        if asked:
            self._admitted.pop(peer, None)
        self._with[peer] += 1
        self._began[peer] = now
        return self._with.total()

    def leave(self, peer: int, now: float = 0.0) -> None:
        """Ends an exchange with a peer."""
        self._with[peer] -= 1
        self._took[peer] = now - self._began[peer]

    def total(self) -> int:
        """The number under way."""
        return self._with.total()

    # --- the line of those to request

    def line_up(self, peer: int) -> None:
        """Adds a peer to those that this learner will request."""
        self._line.add(peer)
        self._met_before[peer] = self._began_at(peer)

    def step_out(self, peer: int) -> None:
        """Takes a peer from the line."""
        self._line.discard(peer)

    @property
    def in_line(self) -> list[int]:
        """The peers in line."""
        return sorted(self._line)

    def has_been_met(self, peer: int) -> bool:
        """Whether an exchange with a peer has begun since it lined up."""
        return self._began_at(peer) != self._met_before[peer]

    def wait_s(self, peer: int, now: float) -> float:
        """The seconds until a peer in line may be requested, if nothing ends before.

        Infinity: another is first, an exchange with this one is under way or about to
        begin, none has ended yet, or this one has been taken from the line.
        """
        # Those that begin themselves hold up no other, however long they take.
        waiting = [one for one in self._line if not self._begins_itself(one)]
        if peer not in waiting or self._met_first(waiting) != peer:
            return math.inf
        busy_since = [*self._taken_since(), *self._requested.values()]
        return self._patience_s(peer, now, busy_since)

    def request(self, peer: int, now: float) -> None:
        """Notes that a peer is being requested."""
        self._requested[peer] = now

    def answered_by(self, peer: int) -> None:
        """Notes that a peer that was requested has answered, or is lost."""
        self._requested.pop(peer, None)

    def may_begin(self, peer: int, now: float) -> bool:
        """Whether to begin with a peer that has admitted this learner, or decline."""
        if self._begins_itself(peer) or self.has_been_met(peer):
            return False
        return not self._patience_s(peer, now, self._taken_since())

    # --- those that request

    def requested_by(self, peer: int) -> None:
        """Notes that a peer requests an exchange."""
        self._requesting.add(peer)

    @property
    def requests(self) -> list[int]:
        """The peers that wait to be admitted."""
        return sorted(self._requesting)

    def admission_wait_s(self, peer: int, now: float) -> float:
        """The seconds until a peer may be admitted, if nothing ends before.

        Infinity: another peer or this learner's own request to that peer comes first,
        or no exchange has ended yet.
        """
        if self._with[peer]:
            return 0.0  # the exchange under way serves it, so it declines at once
        if self._awaits_own_request(peer):
            return math.inf
        is_held = self._holds(peer)
        rivals = [one for one in self._requesting if self._holds(one) == is_held]
        in_line = [one for one in rivals if not self._awaits_own_request(one)]
        if self._met_first([peer, *in_line]) != peer:
            return math.inf
        busy_since = self._taken_since()
        if is_held:
            busy_since += self._requested.values()
        return self._patience_s(peer, now, busy_since)

    def admit(self, peer: int, now: float) -> None:
        """Stays free for a peer, until that one begins or declines."""
        self._requesting.discard(peer)
        self._admitted[peer] = now

    def declined_by(self, peer: int) -> None:
        """Notes that a peer that was admitted does not begin, or is lost."""
        self._requesting.discard(peer)
        self._admitted.pop(peer, None)

    # --- private

    def _holds(self, peer: int) -> bool:
        """Whether a requesting peer must wait for answers to this learner's requests.

        A cycle of requests has a learner whose number is smaller than those of both
        its neighbours. Only such a learner lets others wait, so no cycle blocks.
        """
        return any(self._own() < min(peer, one) for one in self._requested)

    def _begins_itself(self, peer: int) -> bool:
        """Whether an exchange with a peer is under way, or about to begin."""
        return bool(self._with[peer]) or peer in self._admitted

    def _awaits_own_request(self, peer: int) -> bool:
        """Whether the two have requested each other, and that peer answers first."""
        return peer in self._requested and self._own() < peer

    def _began_at(self, peer: int) -> float:
        return self._began.get(peer, -math.inf)

    def _met_first(self, peers: Iterable[int]) -> int:
        return min(peers, key=lambda one: (self._began_at(one), one))

    def _taken_since(self) -> list[float]:
        """The times since which exchanges are under way or about to begin."""
        begins = [self._began[one] for one, number in self._with.items() if number]
        return [*begins, *self._admitted.values()]

    def _patience_s(self, peer: int, now: float, busy_since: Sequence[float]) -> float:
        """The seconds left to wait for exchanges that began at these times."""
        if not busy_since:
            return 0.0
        longest = self._took.get(peer, max(self._took.values(), default=math.inf))
        left = max(busy_since) + _TIMES_LAST * longest - now
        return left if left > _MOMENT else 0.0
