"""Claims of work units: the learners of one job count them in the job's store.

A claim is one atomic addition. The first units are dealt in advance, one to each
super-learner, so that each makes at least one step. docs/work-sharing.md says when a
learner claims ahead, and when a slow one leaves the rest to the others.
"""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from lightning_adpsgd.coordination.store import own_connection
from lightning_adpsgd.epochs.ranges import Ranges, as_ranges, from_rows, union
from lightning_adpsgd.epochs.work_units import Terms
from lightning_adpsgd.weights.worker import BackgroundWorker

_LOOK_S = 0.001
"""Seconds between two looks for a message of a super-learner's first learner."""
# The longest wait for the reason of a failed leader, in seconds.
_REASON_S = 3.0
# A learner waits for round trips of fewer seconds, or of a smaller part of a step, and
# holds nothing ahead.
_NEAR_S, _SHORT = 0.004, 0.05
# The number of round trips that must be known, and that are remembered.
_FEW, _MANY = 3, 10
# What is held ahead keeps the others waiting at the end of an epoch.
_MOST_AHEAD = 8


class LearnerIndex(NamedTuple):
    """The place of this learner in a job whose super-learners have one size.

    Attributes:
        super_learner: number of its super-learner.
        learner: its place in the super-learner; 0 is the leader.
    """

    super_learner: int
    num_super_learners: int
    learner: int = 0
    super_learner_size: int = 1


class LeaderBroadcast:
    """Broadcasts from the first learner of a super-learner, the leader, to its others.

    Args:
        store: store that nothing else uses.
        raise_if_failed: function that is called while a learner waits.
    """

    def __init__(
        self, store: Store, index: LearnerIndex, raise_if_failed: Callable[[], None]
    ) -> None:
        self._store, self._index = store, index
        self._raise_if_failed, self._num_messages = raise_if_failed, 0

    def share(self, speak: Callable[[], str]) -> str:
        """The leader's result of `speak`, in all learners; all must call it."""
        self._num_messages += 1
        key = f"message/{self._index.super_learner}/{self._num_messages}"
        if self._index.learner > 0:
            return self._hear(key)
        message = speak()
        if self._index.super_learner_size > 1:
            self._store.set(key, message)
        return message

    def _hear(self, key: str) -> str:
        try:
            return self._await(key)
        except DistError:  # the leader has gone; the job soon knows why
            deadline = time.monotonic() + _REASON_S
            while time.monotonic() < deadline:
                self._raise_if_failed()
                time.sleep(_LOOK_S)
            raise

    def _await(self, key: str) -> str:
        # Not `Store.wait`: other threads' calls of this connection would wait for it.
        while not self._store.check([key]):
            self._raise_if_failed()
            time.sleep(_LOOK_S)
        message = self._store.get(key).decode()
        if self._store.add(f"{key}/heard", 1) == self._index.super_learner_size - 1:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/heard")
        return message


class ClaimRate:
    """The number of units that all learners claim during one step of this one.

    It is the median of the last five counts, including earlier epochs, so that one
    hiccup has no effect. Of two in the middle it is the lower one.

    Attributes:
        has_counted: whether there is a count of this epoch, or no need of one.
    """

    def __init__(self) -> None:
        self._counts: deque[float] = deque(maxlen=5)
        self._last: int | None = None
        self._num_steps, self.has_counted = 0, False

    def note(self, number: int, num_steps: int) -> None:
        """Records the next unit when this learner has made some steps of the epoch.

        Claims without a step between them, which a loader makes for its workers, are
        one point: the next count begins at the last of them.
        """
        steps = num_steps - self._num_steps
        if self._last is not None and steps > 0:
            self._counts.append((number - self._last) / steps)
            self.has_counted = True
        self._last, self._num_steps = number, num_steps

    @property
    def is_unknown(self) -> bool:
        """Whether there is no count at all."""
        return not self._counts

    @property
    def median(self) -> float:
        """The number, if there is any count."""
        return statistics.median_low(self._counts)

    @property
    def latest(self) -> int:
        """The latest number in this epoch; 0 at its beginning."""
        return self._last or 0

    def start_epoch(self) -> None:
        """Starts an epoch, in which numbers restart from 0.

        After an epoch without a count, the oldest one is dropped, so that a learner
        that was slow once gets another try.
        """
        if not self.has_counted and self._counts:
            self._counts.popleft()
        self._last, self._num_steps, self.has_counted = None, 0, False

    def others_end_first(
        self,
        num_units: int,
        num_super_learners: int,
        num_held: int,
        num_claimed: float | None = None,
    ) -> bool:
        """Whether the others finish the rest before this learner makes one more step.

        Let t be the time of a step of this learner, and d the number of units that all
        learners claim in t. There are S super-learners, and R units remain. The others
        claim d - 1 units in t, and their last steps take (S - 1) t / (d - 1) on
        average. So they finish the rest in (R + S - 1) t / (d - 1). This learner, which
        has h = `num_held` units, finishes one more in (h + 1) t. Without held units the
        others are first if R <= d - S. If all learners hold h units, they are first if
        R <= (h + 1) (d - S).

        Without `num_claimed`, a step has passed since the last number.
        """
        if not self._counts:
            return False
        step = self.median
        if num_claimed is None:
            num_claimed = 0 if self._last is None else self._last + step
        # At the start of an epoch each has the unit that was dealt and claims one.
        remaining = num_units - max(num_claimed, 2 * num_super_learners)
        return remaining <= (num_held + 1) * (step - num_super_learners)


class Claim(NamedTuple):
    """The answer to a learner that asks for one more work unit.

    Attributes:
        number: number of the unit; None if there is no unit, or none at present.
        num_claimed: number of units of the epoch that learners have claimed so far.
        is_last: whether this epoch has no further unit for the learner.
    """

    number: int | None
    num_claimed: int
    is_last: bool


# Numbers, the steps made when they were asked for, and the seconds that they took.
_Drawn = tuple[range, int, float]


class DrawnNumbers:
    """Numbers of a counter; a thread draws them ahead if its round trips are long.

    Args:
        draw: function that adds to the counter, and returns what it was.
        num_steps: function for the number of steps so far; any thread may call it.
        note: called with the first number of each draw, and the number of steps then.
        round_trips: seconds that earlier draws took; later draws are added.
        held: the first numbers, which need no draw.
    """

    def __init__(
        self,
        draw: Callable[[int], int],
        num_steps: Callable[[], int],
        note: Callable[[int, int], None],
        round_trips: deque[float],
        held: Iterable[int] = (),
    ) -> None:
        self._draw, self._num_steps, self._note = draw, num_steps, note
        self._round_trips = round_trips
        self._numbers, self._steps = deque(held), deque[float](maxlen=5)
        self._pending: Future[_Drawn] | None = None
        self._returned_at = math.inf

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def any_left(self) -> bool:
        """Whether numbers are held, or on their way."""
        return bool(self._numbers or self._pending)

    def next(self, most: Callable[[], int]) -> int:
        """The next number; `most` gives the most to draw at once for later calls."""
        self._steps.append(max(0.0, time.monotonic() - self._returned_at))
        if self._pending and (self._pending.done() or not self._numbers):
            self.settle()
        if not self._numbers:
            self._take(*self._timed(1))
        number = self._numbers.popleft()
        num = 0 if self._pending else self._num_ahead()
        if num > len(self) and (num := min(num, most())) > len(self):
            self._draw_ahead(num)
        self._returned_at = time.monotonic()
        return number

    def settle(self) -> list[int]:
        """Waits for what is on its way; returns the numbers that are held."""
        if self._pending is not None:
            self._take(*self._pending.result())
            self._pending = None
        return [*self._numbers]

    def _num_ahead(self) -> int:
        """The number of units that this learner begins during a round trip."""
        if len(self._round_trips) < _FEW or not self._steps:
            return 0
        # The shortest, because a round trip may be late for any reason.
        round_trip, step = min(self._round_trips), statistics.median(self._steps)
        if round_trip < max(_NEAR_S, _SHORT * step):
            return 0
        return math.ceil(min(round_trip / max(step, _NEAR_S), _MOST_AHEAD))

    def _draw_ahead(self, num: int) -> None:
        worker = BackgroundWorker("adpsgd-claims", torch.device("cpu"))
        self._pending = worker.submit(lambda: self._timed(num))
        worker.stop(0.0)

    def _timed(self, num: int) -> _Drawn:
        begin, num_steps = time.monotonic(), self._num_steps()
        first = self._draw(num)
        return range(first, first + num), num_steps, time.monotonic() - begin

    def _take(self, numbers: range, num_steps: int, seconds: float) -> None:
        self._numbers.extend(numbers)
        self._round_trips.append(seconds)
        self._note(numbers.start, num_steps)


class ClaimCounter:
    """The pool of work units of one job: a counter for each epoch, in the job's store.

    The leader of each super-learner uses it; `remaining` is for all learners. Nothing
    else uses its store. `meet` returns when all learners have called it. `takes_turns`
    says whether learners wait for one another in every step. They then claim one unit
    each between two such waits, and leave out units that not all of them would get: a
    learner with one step more would wait for ever.
    """

    def __init__(
        self,
        store: Store,
        index: LearnerIndex,
        meet: Callable[[str], None],
        takes_turns: Callable[[], bool] = lambda: False,
    ) -> None:
        # A claim that is drawn ahead must not wait for the calls of other threads.
        self._store = own_connection(store) if index.learner == 0 else store
        self._index, self._meet, self._takes_turns = index, meet, takes_turns
        self._rate, self._num_gathered = ClaimRate(), 0
        self._round_trips = deque[float](maxlen=_MANY)

    def open(
        self,
        number: int,
        terms: Terms,
        num_units: Callable[[Terms], int],
        num_finished: Callable[[], int],
    ) -> Terms:
        """Begins an epoch, ends the previous one; returns the terms that all agree on.

        `num_finished` gives the number of units from here whose training is complete;
        any thread may call it.
        """
        self._number = number
        self._keys = PrefixStore(f"epoch/{number}", self._store)
        found = self._keys.compare_set("samples", "", terms.fingerprint).decode()
        agreed = terms._replace(fingerprint=found)
        self._all_units = num_units(agreed)
        self._stays: bool | None = None  # not asked yet
        self._rate.start_epoch()
        self._num_finished = num_finished
        dealt = [self._index.super_learner]
        self._drawn = DrawnNumbers(
            self._adder(), num_finished, self._rate.note, self._round_trips, dealt
        )
        return agreed

    @property
    def _num_units(self) -> int:
        left_out = self._all_units % self._index.num_super_learners
        return self._all_units - left_out * self._takes_turns()

    def next(self, num_held: int, waits: bool) -> Claim:
        """Claims the next unit.

        Args:
            num_held: number of units that this learner has claimed but not begun.
            waits: whether it holds so few that it needs a final answer: another unit,
                or that there is none. Islands wait for it.
        """
        if self._leaves(num_held):
            number = self._rate.latest
            # The other learners hear the same answer, and may hold more or fewer units.
            are_several = self._index.super_learner_size > 1
            is_last = waits or are_several or number >= self._num_units
            return Claim(None, self._num_units if is_last else number, is_last)
        number = self._drawn.next(lambda: self._most_ahead(num_held))
        num_claimed = max(number + 1, self._index.num_super_learners)
        is_last = number >= self._num_units
        num_claimed = min(num_claimed, self._num_units)
        return Claim(None if is_last else number, num_claimed, is_last)

    def end_last_step(self, num_steps: int) -> None:
        """Counts after the last of so many steps, if nothing was counted before.

        A learner that is so slow that it has one step in an epoch would not know
        whether it still is. Others that have claimed all that was left might have
        claimed more: that is no count, but the older ones are kept.
        """
        rate, num = self._rate, self._num_units
        if rate.has_counted or rate.latest >= num:
            return
        if (number := self._counted()) < num:
            rate.note(number, num_steps)
        else:
            rate.has_counted = True

    def _counted(self) -> int:
        """The number of claimed units, including those dealt in advance."""
        dealt = self._index.num_super_learners
        return min(dealt + self._keys.add("claimed", 0), self._num_units)

    def remaining(self, held: Ranges) -> Ranges | None:
        """The units that no learner has trained on, in the first one; None in others.

        All call it, outside of a step.
        """
        self._num_gathered += 1
        news = PrefixStore(f"gather/{self._num_gathered}", self._store)
        if self._index.learner == 0:
            ahead = (n for n in self._drawn.settle() if n < self._num_units)
            held = union(held, as_ranges(ahead))
            # All claims that others make before they come are in the largest count.
            words = json.dumps([self._number, self._counted(), held])
            news.set(str(self._index.super_learner), words)
        self._meet("what remains of the epoch")
        is_first = self._index.super_learner == self._index.learner == 0
        return self._combined(news) if is_first else None

    def _combined(self, news: Store) -> Ranges:
        keys = [str(number) for number in range(self._index.num_super_learners)]
        rows = [json.loads(news.get(key)) for key in keys]
        for key in keys:
            news.delete_key(key)
        epochs, num_claimed, held = zip(*rows, strict=True)
        if len(set(epochs)) > 1:
            raise ValueError(
                "with `work_sharing` all learners must be in the same epoch when a "
                f"checkpoint is written, got epochs {[*epochs]}: save at the end of "
                "epochs, or set `work_sharing=False`"
            )
        unclaimed = ((max(num_claimed), self._num_units),)
        return union(unclaimed, *map(from_rows, held))

    def _adder(self) -> Callable[[int], int]:
        """A function that adds to the counter of this epoch, even in a later one."""
        keys, dealt = self._keys, self._index.num_super_learners
        return lambda num: dealt + keys.add("claimed", num) - num

    def _most_ahead(self, num_held: int) -> int:
        """Half of this learner's share of the remaining units.

        None in turns, before its rate is known, or if the others would finish first.
        """
        # The unit that is handed out meanwhile is held too.
        count, held = self._index.num_super_learners, num_held + 1 + len(self._drawn)
        rate, num = self._rate, self._num_units
        if self._takes_turns() or rate.is_unknown:
            return 0
        if rate.others_end_first(num, count, held):
            return 0
        return int((num - rate.latest) / (2 * max(count, rate.median)))

    def _leaves(self, num_held: int) -> bool:
        count = self._index.num_super_learners
        if self._stays or self._takes_turns() or self._drawn.any_left:
            return False
        if not self._others_end_first(count, num_held):
            return False
        # The last super-learner stays, so that nothing remains. One that leaves for now
        # counts as having left, because its loader may take that for the end.
        if self._stays is None:
            self._stays = self._keys.add("left", 1) == count
        return not self._stays

    def _others_end_first(self, count: int, num_held: int) -> bool:
        """Whether they do by a count that includes the latest step, if it matters."""
        rate, num = self._rate, self._num_units
        asks = rate.is_unknown and self._num_finished() > 0
        if not (asks or rate.others_end_first(num, count, num_held)):
            return False
        number = self._adder()(0)
        rate.note(number, self._num_finished())
        return rate.others_end_first(num, count, num_held, number)
