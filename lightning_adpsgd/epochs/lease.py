"""What one island has of one epoch: what it holds, has finished, and would claim next.

It computes, from the ledger that it finds, the one that should be there (`ledger`). It
has no thread and communicates nothing.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from lightning_adpsgd.epochs.claims import Pace
from lightning_adpsgd.epochs.ledger import (
    Ledger,
    OtherTerms,
    as_ranges,
    common,
    numbers,
    union,
)
from lightning_adpsgd.epochs.work_units import Ranges, count, without

_AHEAD = 2
# Of an epoch for each island, where each goes on alone.
_STRETCHES = 16
# Portions left for each island, below which the end of the epoch is near.
_NEAR = 8


class Plan(NamedTuple):
    """What a look at the ledger leads to.

    Attributes:
        ledger: That should be there.
        claimed: What this island gets by it.
        lost: Of what it had claimed ahead, what others have.
        twice: What it trains on, or has, though others had it.
        num_finished: So many of its finished portions are written down.
    """

    ledger: Ledger
    claimed: list[int]
    lost: Ranges
    twice: Ranges
    num_finished: int


class Holding:
    """What this island has of one epoch; every use is under the lock of its pool.

    Args:
        number: Of the epoch.
        ledger: As it begins, should nobody have another.
        name: Of this island.
        pace: Of its claims.
        num_finished: How many of those handed out it has trained on to the end.

    Attributes:
        ledger: As last known.
        num_portions: Of the epoch.
        out: Claimed and handed out, in the order of training, not finished.
        ahead: Claimed and not handed out.
        is_fresh: Whether it may still take over any ledger that it finds.
        consults: Whether the training thread waits for more.
        has_ended: Whether it has been told that there is no more.
        is_leaving: Whether this island ends altogether.
    """

    def __init__(
        self,
        number: int,
        ledger: Ledger,
        name: str,
        pace: Pace,
        num_finished: Callable[[], int],
    ) -> None:
        self.number, self.ledger, self._name, self._pace = number, ledger, name, pace
        self.num_portions = count(ledger.left)
        self.out, self.ahead = deque[int](), deque[int]()
        self.is_fresh, self.consults, self.has_ended = True, False, False
        self.is_leaving = False
        self._finished: list[int] = []
        self._num_finished, self._num_noted = num_finished, 0
        self._told_twice = set[int]()
        self._share: Ranges | None = None
        pace.start_epoch()

    @property
    def num_claimed(self) -> int:
        """Portions that anybody has claimed, as far as is known."""
        return self.num_portions - count(self.ledger.left)

    @property
    def is_near_its_end(self) -> bool:
        """Whether what one takes alone may soon be taken by others."""
        return count(self.ledger.left) <= _NEAR * max(1, len(self.ledger.held))

    # --- the training thread's

    def hand_out(self) -> int:
        """The first of those that were claimed ahead."""
        number = self.ahead.popleft()
        self.out.append(number)
        self._pace.note(self.num_claimed)
        return number

    def take_alone(self, place: int, num: int) -> int | None:
        """The last that is left of the own share, where nobody can be asked.

        Args:
            place: Of this island among those on the roll.
            num: Of those on the roll.
        """
        if self._share is None:
            self._share = common(self.ledger.left, self._stretches(place, num))
        if not self._share:
            return None
        number = self._share[-1][1] - 1
        taken = ((number, number + 1),)
        self._share = without(self._share, taken)
        left = without(self.ledger.left, taken)
        self.ledger, self.is_fresh = self.ledger._replace(left=left), False
        self.out.append(number)
        return number

    def _stretches(self, place: int, num: int) -> Ranges:
        """A share of all portions; of whom each is does not depend on what is left."""
        end = self.num_portions
        length = max(1, -(-end // (_STRETCHES * num)))
        begins = range(place * length, end, num * length)
        return union(tuple((begin, min(begin + length, end)) for begin in begins))

    def close(self, leaves: bool) -> None:
        """What was not trained on goes back."""
        self._note_finished()
        self._give_back(self.ahead)
        self._give_back(self.out)
        self.has_ended, self.is_leaving, self.consults = True, leaves, False

    # --- the pool's thread's

    def plan(self, found: Ledger, gone: set[str]) -> Plan:
        """What should take the place of the ledger that was found.

        Args:
            found: In the rendezvous.
            gone: Who has a part in it, and is not there any more.

        Raises:
            OtherTerms: It is of other samples.
        """
        name = self._name
        self._note_finished()
        if found.anybody_waits(name) and not self.consults:
            self._give_back(self.ahead)
        ahead, finished = as_ranges(self.ahead), as_ranges(self._finished)
        holds = union(as_ranges(self.out), ahead)
        if found.life != self.ledger.life and not self.is_fresh:
            found = found.joined(self.ledger, name, union(holds, finished))
        ledger, twice = found.report(name, holds, finished)
        lost, claimed = common(ahead, twice), list[int]()
        ledger = ledger.without_names(gone | ({name} if self.is_leaving else set()))
        if ledger.is_settled and not self.has_ended:
            ledger, claimed = ledger.claim(name, self._wanted(ledger, lost))
        if not self.is_leaving:
            rests = self.consults and not (claimed or without(ahead, lost))
            ledger = ledger.rest(name, rests or self.has_ended)
        twice = without(twice, ahead)
        return Plan(ledger, claimed, lost, twice, len(self._finished))

    def apply(self, plan: Plan) -> int:
        """Takes note that a plan has been carried out.

        Returns:
            How many portions are found only now to be trained on twice.

        Raises:
            OtherTerms: It is of other samples.
        """
        if plan.ledger.terms != self.ledger.terms and not self.is_fresh:
            raise OtherTerms("the answer came after the epoch had begun without it")
        self.ledger, self.is_fresh, self._share = plan.ledger, False, None
        lost = set(numbers(plan.lost))
        self.ahead = deque(number for number in self.ahead if number not in lost)
        self.ahead.extend(plan.claimed)
        del self._finished[: plan.num_finished]
        news = set(numbers(plan.twice)) - self._told_twice
        self._told_twice |= news
        return len(news)

    def _note_finished(self) -> None:
        while self._num_noted < self._num_finished() and self.out:
            self._finished.append(self.out.popleft())
            self._num_noted += 1

    def _give_back(self, portions: deque[int]) -> None:
        """As if they had never been claimed: the next report says so."""
        back = as_ranges(portions)
        held = {**self.ledger.held}
        held[self._name] = without(held.get(self._name, ()), back)
        left = union(self.ledger.left, back)
        self.ledger = self.ledger._replace(left=left, held=held)
        portions.clear()

    def _wanted(self, ledger: Ledger, lost: Ranges) -> int:
        num_ahead = len(self.ahead) - count(lost)
        slow = self._pace.others_end_first(
            self.num_portions, len(ledger.held), len(self.out) + num_ahead
        )
        # Whoever would be the last to leave the rest to others stays.
        if slow and not ledger.others_rest(self._name):
            return 0
        needs = int(self.consults and not num_ahead)
        return needs if ledger.anybody_waits(self._name) else _AHEAD - num_ahead
