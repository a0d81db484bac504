"""Work sharing: the portions of an epoch are claimed from a counter in the job's store.

A claim is one atomic addition, so a fast learner claims more, and the epoch ends for
all at about the same time. Every portion is claimed once. The first ones are dealt
beforehand, one to each super-learner: nobody goes through an epoch without a step.

A learner claims when its loader asks for a batch, which is before the batch is needed.
Near the end a slow learner leaves what remains to the others if they would be done with
it before the slow learner had made one step more. No clock is read for this: from one
claim of a learner to its next the counter grows by what all have claimed meanwhile.
"""

import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from lightning_adpsgd.epochs.work_units import (
    Epoch,
    Portions,
    Ranges,
    draw_epoch,
    merged,
)

_LOOK_S = 0.001
"""Between two looks for what the first of a super-learner has claimed."""


class Place(NamedTuple):
    """Where a learner stands in the job."""

    super_learner: int
    num_super_learners: int
    learner: int = 0
    super_learner_size: int = 1

    @property
    def rank(self) -> int:
        """Of the learner among all."""
        return self.super_learner * self.super_learner_size + self.learner

    @property
    def num_learners(self) -> int:
        """All of the job."""
        return self.num_super_learners * self.super_learner_size


class Relay:
    """Lets all learners of a super-learner hear what its first one has to say.

    Args:
        store: Keys that nothing else uses.
        place: Of this learner.
        raise_if_failed: Called while this learner waits for the first.
    """

    def __init__(
        self, store: Store, place: Place, raise_if_failed: Callable[[], None]
    ) -> None:
        self._store, self._place = store, place
        self._raise_if_failed = raise_if_failed

    def word(self, key: str, speak: Callable[[], str]) -> str:
        """What `speak` gives in the first learner; all of them ask."""
        if self._place.learner > 0:
            return self._hear(key)
        word = speak()
        if self._place.super_learner_size > 1:
            self._store.set(key, word)
        return word

    def _hear(self, key: str) -> str:
        # Not `Store.wait`: it keeps the thread that watches for failures from looking.
        while not self._store.check([key]):
            self._raise_if_failed()
            time.sleep(_LOOK_S)
        word = self._store.get(key).decode()
        if self._store.add(f"{key}/heard", 1) == self._place.super_learner_size - 1:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/heard")
        return word


class Pace:
    """How many portions all learners claim between two claims of this one.

    Over the last five claims, of earlier epochs too: one hiccup says nothing.
    """

    def __init__(self) -> None:
        self._steps: deque[int] = deque(maxlen=5)
        self._last: int | None = None

    def note(self, ticket: int) -> None:
        """A claim of this learner got this number."""
        if self._last is not None:
            self._steps.append(ticket - self._last)
        self._last = ticket

    def start_epoch(self) -> None:
        """Numbers begin anew; an epoch without a claim makes the oldest step forgotten.

        So a learner that was slow once is tried again.
        """
        if self._last is None and self._steps:
            self._steps.popleft()
        self._last = None

    def others_end_first(
        self, num_portions: int, num_super_learners: int, num_held: int
    ) -> bool:
        """Whether the rest is done before this learner has made one step more.

        With t the time of one own step and d the numbers per step, the others claim
        d - 1 portions in t, and their last step takes (S - 1) t / (d - 1) on average.
        They end R portions in (R + S - 1) t / (d - 1); this learner ends one more in
        (`num_held` + 1) t, and if they all hold as many, in as many times d - S.
        """
        if not self._steps:
            return False
        step = statistics.median(self._steps)
        # At the start of an epoch each has the portion that was dealt and claims one.
        claimed = 2 * num_super_learners if self._last is None else self._last + step
        remaining = num_portions - claimed
        return remaining <= (num_held + 1) * (step - num_super_learners)


class Claims:
    """The portions of one epoch that one super-learner gets, in the order of its steps.

    The first learner of a super-learner claims and the others read what it got.

    Args:
        store: Keys of this epoch alone, shared by all learners.
        place: Of this learner.
        num_portions: Of the epoch.
        pace: Of this learner.
        fingerprint: Equal in all learners, or they would share different epochs.
        raise_if_failed: Called while this learner waits for another.

    Attributes:
        num_tickets: Numbers that this learner has drawn from the counter itself.
    """

    def __init__(
        self,
        store: Store,
        place: Place,
        num_portions: int,
        pace: Pace,
        fingerprint: str,
        raise_if_failed: Callable[[], None],
    ) -> None:
        self._store, self._place, self._num_portions = store, place, num_portions
        self._pace, self._fingerprint = pace, fingerprint
        self._relay = Relay(store, place, raise_if_failed)
        self._num_claims, self._ended, self._stays = 0, False, False
        self._num_seen = min(place.num_super_learners, num_portions)
        self.num_tickets = 0
        pace.start_epoch()

    def next(self, num_held: int) -> int | None:
        """Claims one portion more; none at the end of the epoch.

        Args:
            num_held: Portions that this learner has claimed and not begun to train on.

        Raises:
            ValueError: Another learner has another epoch.
        """
        if self._ended:
            return None
        if self._num_claims == 0:
            self._check_same_epoch()
        word = self._relay.word(self._key(), lambda: str(self._claim(num_held)))
        number = int(word)
        self._num_claims += 1
        self._num_seen = min(number + 1, self._num_portions)
        self._ended = number >= self._num_portions
        return None if self._ended else number

    def num_claimed(self) -> int:
        """Portions that anybody has claimed; those dealt beforehand count.

        Equal in the learners of a super-learner, who must not disagree about what has
        happened: with several of them it is what was so at their last claim.
        """
        if self._place.super_learner_size == 1:
            dealt = self._place.num_super_learners
            return min(dealt + self._store.add("claimed", 0), self._num_portions)
        return self._num_seen

    def _claim(self, num_held: int) -> int:
        if self._leaves(num_held):
            return self._num_portions
        ticket = self._place.num_super_learners + self._store.add("claimed", 1) - 1
        self.num_tickets += 1
        self._pace.note(ticket)
        return ticket

    def _leaves(self, num_held: int) -> bool:
        count, num = self._place.num_super_learners, self._num_portions
        if self._stays or not self._pace.others_end_first(num, count, num_held):
            return False
        # Whoever would be the last to leave stays, so that nothing remains.
        self._stays = self._store.add("left", 1) == count
        return not self._stays

    def _key(self) -> str:
        return f"claim/{self._place.super_learner}/{self._num_claims}"

    def _check_same_epoch(self) -> None:
        mine = f"{self._fingerprint}\t{self._place.rank}"
        first, rank = self._store.compare_set("epoch", "", mine).decode().split("\t")
        if first != self._fingerprint:
            raise ValueError(
                "`work_sharing` needs the same samples in the same order in all "
                f"learners, got {self._fingerprint} (checksum) in learner "
                f"{self._place.rank} and {first} in learner {rank}: give every learner "
                "the whole data set, and samplers that draw from torch's or Python's "
                "common generators"
            )


class EpochState(NamedTuple):
    """What a checkpoint keeps of an epoch that is under way.

    Attributes:
        epoch: Its number.
        seed: Of the order of samples, in this epoch and all others.
        num_samples: Of the whole epoch.
        remaining: The positions on which nobody has trained.
    """

    epoch: int
    seed: int
    num_samples: int
    remaining: Ranges


class SharedBatches:
    """The batches that this learner gets, epoch for epoch: a loader's batch sampler.

    Everything happens in the training thread. What has been claimed is remembered until
    training on it begins, so that an iterator can be thrown away and made anew.

    Args:
        batches: The batch sampler of the user's loader.
        place: Of this learner.
        seed: Of the order of samples; the same in all learners.
        store: Keys of this job, shared by all learners.
        raise_if_failed: Called while this learner waits for another.
    """

    def __init__(
        self,
        batches: Any,
        place: Place,
        seed: int,
        store: Callable[[int], Store],
        raise_if_failed: Callable[[], None],
    ) -> None:
        self._batches, self._place, self._seed = batches, place, seed
        self._store, self._raise_if_failed = store, raise_if_failed
        self._pace = Pace()
        self._loaded: EpochState | None = None
        self._current: EpochUnderWay | None = None
        self.epoch = 0

    def load(self, state: EpochState) -> None:
        """Goes on with an epoch that another job began."""
        self._loaded, self._seed, self.epoch = state, state.seed, state.epoch
        self._current = None

    @property
    def under_way(self) -> "EpochUnderWay | None":
        """The epoch whose batches were last asked for."""
        return self._current

    def __iter__(self) -> Iterator[list[int]]:
        if self._current is None or self._current.number != self.epoch:
            self._current = self._begin()
        return self._current.batches()

    def begin_batch(self) -> None:
        """Training on the next batch begins."""
        if self._current is not None:
            self._current.begin_batch()

    def _begin(self) -> "EpochUnderWay":
        epoch = draw_epoch(self._batches, self._seed, self.epoch)
        remaining = remaining_of(epoch, self.epoch, self._loaded)
        portions = Portions(
            remaining,
            epoch,
            self._place.num_super_learners,
            self._place.super_learner_size,
            bool(getattr(self._batches, "drop_last", False)),
        )
        claims = Claims(
            self._store(self.epoch),
            self._place,
            len(portions),
            self._pace,
            epoch.fingerprint(),
            self._raise_if_failed,
        )
        state = EpochState(self.epoch, self._seed, len(epoch.order), remaining)
        return EpochUnderWay(state, epoch, portions, claims, self._place)


def remaining_of(epoch: Epoch, number: int, state: EpochState | None) -> Ranges:
    """What remains of an epoch after what another job has done of it.

    Args:
        epoch: Whole.
        number: Of the epoch.
        state: Of the other job; none if there was none.

    Raises:
        ValueError: The other job had other data.
    """
    if state is None or state.epoch != number:
        return epoch.everything()
    if state.num_samples != len(epoch.order):
        raise ValueError(
            f"the checkpoint was written in an epoch of {state.num_samples} "
            f"samples and this one has {len(epoch.order)}: go on with the same "
            "data, or from a checkpoint of the end of an epoch"
        )
    return state.remaining


class _News(NamedTuple):
    """What a learner tells the others before a checkpoint."""

    epoch: int
    num_tickets: int
    held: Ranges


class EpochUnderWay:
    """One epoch of one learner: what it holds, has begun, and may still claim."""

    def __init__(
        self,
        state: EpochState,
        epoch: Epoch,
        portions: Portions,
        claims: Claims,
        place: Place,
    ) -> None:
        self._state, self._epoch, self._place = state, epoch, place
        self._portions, self._claims = portions, claims
        # Dealt beforehand; the rest is claimed.
        dealt = place.super_learner
        self._held = deque([dealt] if dealt < len(portions) else [])

    @property
    def number(self) -> int:
        """Of the epoch."""
        return self._state.epoch

    @property
    def num_portions(self) -> int:
        """What the epoch had to hand out when this job began with it."""
        return len(self._portions)

    def num_claimed(self) -> int:
        """Portions that anybody has claimed."""
        return self._claims.num_claimed()

    def batches(self) -> Iterator[list[int]]:
        """Indices of the samples of each batch, what is held already at first."""
        for number in tuple(self._held):
            yield self._samples(number)
        while (number := self._claims.next(len(self._held))) is not None:
            self._held.append(number)
            yield self._samples(number)

    def begin_batch(self) -> None:
        """Training begins on the batch that was claimed first."""
        if self._held:
            self._held.popleft()

    def gather(self, store: Store, meet: Callable[[str], None]) -> EpochState | None:
        """What remains for everybody; all learners come, between two of their steps.

        Args:
            store: Keys of this occasion.
            meet: Returns when all learners have come.

        Returns:
            The state, in learner 0 alone.

        Raises:
            ValueError: Learners are in different epochs.
        """
        news = _News(self.number, self._claims.num_tickets, self._mine())
        store.set(f"held/{self._place.rank}", json.dumps(news))
        meet("what remains of the epoch")
        if self._place.rank:
            return None
        keys = [f"held/{rank}" for rank in range(self._place.num_learners)]
        state = self._combined([_News(*json.loads(store.get(key))) for key in keys])
        for key in keys:
            store.delete_key(key)
        return state

    def _combined(self, news: "list[_News]") -> EpochState:
        numbers = [item.epoch for item in news]
        if len(set(numbers)) > 1:
            raise ValueError(
                "with `work_sharing` all learners must be in the same epoch when a "
                f"checkpoint is written, got epochs {numbers}"
            )
        # Not the counter itself: those who have met may go on claiming.
        num_tickets = sum(item.num_tickets for item in news)
        num_claimed = self._place.num_super_learners + num_tickets
        unclaimed = self._portions.left_from(num_claimed)
        held = chain.from_iterable(item.held for item in news)
        remaining = merged((first, last) for first, last in chain(unclaimed, held))
        return self._state._replace(remaining=remaining)

    def _mine(self) -> Ranges:
        mine = (self._portions[number][self._place.learner] for number in self._held)
        return tuple(chain.from_iterable(mine))

    def _samples(self, number: int) -> list[int]:
        return self._epoch.samples(self._portions[number][self._place.learner])
