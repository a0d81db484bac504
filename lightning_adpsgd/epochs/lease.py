"""A lease on work units: those that an island holds, has finished, and claims next.

From the current ledger it computes the ledger that should replace it (`ledger`). It has
no thread and does not communicate.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from lightning_adpsgd.epochs.claims import ClaimRate
from lightning_adpsgd.epochs.ledger import Ledger, OtherTerms
from lightning_adpsgd.epochs.ranges import (
    Ranges,
    as_ranges,
    common,
    count,
    numbers,
    union,
    without,
)

# Claimed ahead: at least `_AHEAD` units, or enough for the longer of `_AHEAD_S` seconds
# and `_AHEAD_TURNS` turns. A claim fails if a faster island has written first.
_AHEAD, _AHEAD_S, _AHEAD_TURNS = 2, 1.0, 3
# Seconds between two marks, at least; the last nine give the speed of training.
_MARK_S = 0.05
# The number of stretches into which an epoch is cut for each island of the job.
_STRETCHES = 16
# The end of the epoch is near if this number of units, or fewer, is left per island.
_NEAR = 8


class Lead:
    """How many units to claim ahead; for the thread of a pool, over all its epochs.

    Each claim replaces the text of the ledger, if nobody else has done so since it was
    read. So an island near the rendezvous must claim rarely, or it keeps the far ones
    from theirs, which take a round trip.

    Attributes:
        turn_s: seconds that a turn has taken lately.
    """

    def __init__(self) -> None:
        self.turn_s, self._finished = 0.0, 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=9)

    def took(self, seconds: float) -> None:
        """Records the duration of a turn."""
        self.turn_s = max(seconds, 0.8 * self.turn_s)

    def note(self, num: int) -> None:
        """Records how many units have been finished since the last call."""
        self._finished += num
        now = time.monotonic()
        if not self._marks or now - self._marks[-1][0] > _MARK_S:
            self._marks.append((now, self._finished))

    def units(self) -> int:
        """The number of units to claim ahead, by the speed of training."""
        if not self._marks or self._marks[-1][1] == self._marks[0][1]:
            return _AHEAD
        (begin, before), (end, after) = self._marks[0], self._marks[-1]
        seconds = max(_AHEAD_S, _AHEAD_TURNS * self.turn_s)
        return max(_AHEAD, math.ceil(seconds * (after - before) / (end - begin)))


class Plan(NamedTuple):
    """What follows from a ledger that was read.

    Attributes:
        claimed: units that this island gets.
        lost: units claimed ahead that other islands turn out to have.
        twice: units that this island trains on, or has trained on, although another
            island has or had them.
        num_finished: number of finished units of this island that the ledger records.
    """

    ledger: Ledger
    claimed: list[int]
    lost: Ranges
    twice: Ranges
    num_finished: int


class Lease:
    """This island's part of one epoch; callers must hold the lock of its pool.

    Args:
        ledger: ledger at the start of the epoch, if no other island has one.
        num_finished: function for the number of handed-out units that are finished.

    Attributes:
        origin: training whose ledger it is, until it is closed; None: not yet known.
        ledger: last known ledger.
        out: units claimed and handed out but not finished, in the order of training.
        ahead: units claimed but not handed out.
        is_fresh: whether it may still adopt any ledger that it finds.
        is_awaited: whether the training thread waits for more.
        has_ended: whether the training thread knows that there are no more units.
    """

    def __init__(
        self,
        number: int,
        ledger: Ledger,
        name: str,
        rate: ClaimRate,
        lead: Lead,
        num_finished: Callable[[], int],
    ) -> None:
        self.number, self.ledger, self._name, self._rate = number, ledger, name, rate
        self._lead, self._num_ahead = lead, _AHEAD
        self.origin: str | None = None
        self.num_units = count(ledger.left)
        self.out, self.ahead = deque[int](), deque[int]()
        self.is_fresh, self.is_awaited, self.has_ended = True, False, False
        self.is_leaving = False
        self._finished: list[int] = []
        self._num_finished, self._num_noted = num_finished, 0
        self._told_twice = set[int]()
        self._share: Ranges | None = None
        self._revisions = dict[str, int]()
        # Units that some island held, or that this one tried to claim. Even if they are
        # in `left`, other islands may still believe that they are held.
        self._held_once: Ranges = ()
        rate.start_epoch()

    @property
    def num_claimed(self) -> int:
        """The number of units that islands have claimed, as far as known."""
        return self.num_units - count(self.ledger.left)

    @property
    def is_near_its_end(self) -> bool:
        """Whether others may soon take units that this island takes alone."""
        return count(self.ledger.left) <= _NEAR * max(1, len(self.ledger.held))

    @property
    def is_short(self) -> bool:
        """Whether it is time to claim more units ahead."""
        return len(self.ahead) <= self._num_ahead // 2

    # --- used by the training thread

    def note_rate(self) -> None:
        """Records what islands have claimed, while units are left."""
        if self.ledger.left:
            self._rate.note(self.num_claimed, self._num_finished())

    def hand_out(self) -> int:
        """Hands out the first of the units that were claimed ahead."""
        number = self.ahead.popleft()
        self.out.append(number)
        return number

    def take_alone(self, place: int, num: int) -> int | None:
        """Takes the last unit of this island's share, while the ledger is unreachable.

        After its share it takes units that another island once held. The island whose
        share they are in may not know that they were returned.
        """
        if self._share is None:
            self._share = common(self.ledger.left, self._stretches(place, num))
        rest = self._share or common(self.ledger.left, self._held_once)
        if not rest:
            return None
        number = rest[-1][1] - 1
        taken = ((number, number + 1),)
        self._share = without(self._share, taken)
        left = without(self.ledger.left, taken)
        self.ledger, self.is_fresh = self.ledger._replace(left=left), False
        self.out.append(number)
        return number

    def _stretches(self, place: int, num: int) -> Ranges:
        """This island's share of all units, whether or not they are left."""
        end = self.num_units
        length = max(1, -(-end // (_STRETCHES * num)))
        begins = range(place * length, end, num * length)
        return union(tuple((begin, min(begin + length, end)) for begin in begins))

    def close(self, leaves: bool) -> None:
        """Returns the units that were not trained on."""
        self._note_finished()
        self._give_back(self.ahead)
        self._give_back(self.out)
        self.has_ended, self.is_leaving = True, leaves

    # --- used by the thread of the pool

    def is_old(self, found: Ledger) -> bool:
        """Whether a ledger is an old one that was replaced and then written again."""
        newest = self._revisions.get(found.life)
        if newest is None:
            return False
        return found.revision < newest or found.life != self.ledger.life

    def _known_beside(self, found: Ledger) -> Ledger:
        """What this island knows beside a ledger, as `Ledger.joined` takes it."""
        known = self.ledger
        if found.life != known.life:
            return known
        # Within one life, the ledger found holds all that others have reported.
        return found._replace(left=union(found.left, known.left))

    def plan(self, found: Ledger, gone: set[str]) -> Plan:
        """The plan for a ledger from the rendezvous, including its replacement.

        `gone` names the islands of the ledger that have left or died.
        """
        name = self._name
        self._note_finished()
        out, finished = as_ranges(self.out), as_ranges(self._finished)
        # Others may remember its units although it reported, if it was evicted.
        is_asked = found.life != self.ledger.life or name in found.awaited
        if is_asked and not self.is_fresh:
            mine = union(out, as_ranges(self.ahead), finished)
            found = found.joined(self._known_beside(found), name, mine)
        # Only then, because it must be known to own the units that it gives back.
        if found.another_waits(name) and not self.is_awaited:
            self._give_back(self.ahead)
        ahead = as_ranges(self.ahead)
        holds = union(out, ahead)
        ledger, twice = found.report(name, holds, finished)
        lost, claimed = common(ahead, twice), ()
        ledger = ledger.without_names(gone | ({name} if self.is_leaving else set()))
        if ledger.is_settled and not self.has_ended:
            ledger, claimed = ledger.claim(name, self._wanted(ledger, lost))
        if not self.is_leaving:
            rests = self.is_awaited and not (claimed or without(ahead, lost))
            ledger = ledger.rest(name, rests or self.has_ended)
        twice = without(twice, ahead)
        # Noted now, because others may learn of the claim even if no answer arrives.
        held = ledger.held.values()
        self._held_once = union(self._held_once, *found.held.values(), *held)
        after = ledger.after(found)
        return Plan(after, numbers(claimed), lost, twice, len(self._finished))

    def apply(self, plan: Plan) -> int:
        """Records that a plan was carried out; counts new units trained on twice."""
        if plan.ledger.terms != self.ledger.terms:
            if not self.is_fresh:
                raise OtherTerms(
                    "the rendezvous answered too late: the epoch has begun without it"
                )
            # As far as known here; `IslandPool.open` counts them by the new terms.
            self.num_units = plan.ledger.end
        self.ledger, self.is_fresh, self._share = plan.ledger, False, None
        self._revisions[plan.ledger.life] = plan.ledger.revision
        lost = set(numbers(plan.lost))
        self.ahead = deque(number for number in self.ahead if number not in lost)
        self.ahead.extend(plan.claimed)
        if self.has_ended:  # meanwhile, and nobody here trains on them any more
            self._give_back(self.ahead)
        del self._finished[: plan.num_finished]
        news = set(numbers(plan.twice)) - self._told_twice
        self._told_twice |= news
        return len(news)

    def _note_finished(self) -> None:
        before = self._num_noted
        while self._num_noted < self._num_finished() and self.out:
            self._finished.append(self.out.popleft())
            self._num_noted += 1
        self._lead.note(self._num_noted - before)

    def _give_back(self, units: deque[int]) -> None:
        """Gives up claimed units; the next report says so."""
        back = as_ranges(units)
        held = {**self.ledger.held}
        held[self._name] = without(held.get(self._name, ()), back)
        left = union(self.ledger.left, back)
        self.ledger = self.ledger._replace(left=left, held=held)
        units.clear()

    def _wanted(self, ledger: Ledger, lost: Ranges) -> int:
        num_ahead = len(self.ahead) - count(lost)
        slow = self._rate.others_end_first(
            self.num_units, len(ledger.held), len(self.out) + num_ahead
        )
        # The last island does not leave the rest to others.
        others = set(ledger.held) - {self._name}
        if slow and not others <= set(ledger.resting):
            return 0
        if ledger.another_waits(self._name):
            return int(self.is_awaited and not num_ahead)
        # Towards the end of an epoch fewer, so that nobody waits for what others hold.
        share = count(ledger.left) // (2 * max(1, len(ledger.held)))
        waits = self.is_awaited and not num_ahead
        units = max(self._lead.units(), 2 * self._num_ahead * waits)
        self._num_ahead = max(_AHEAD, min(units, share))
        return max(0, self._num_ahead - num_ahead)
