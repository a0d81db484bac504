"""The batch sampler that yields the batches that a learner gets from the pool.

In each epoch it yields the units that the first learner of the super-learner, the
leader, claims from the pool. It remembers each unit until training on it begins, so an
iterator can be discarded and replaced. Everything happens in the training thread.

Only the iterators of the training loop claim. A program may iterate over its loader
too, to look at a batch or at all of them. It then gets this learner's equal share of
the whole epoch, as under `ddp`, and takes nothing from the pool.

An island may give work units back, so the epoch has no more units only once none can
come back. Only a learner that is about to run out of batches waits for that: it holds
at most one batch, or two if workers of a loader read ahead. A learner that holds more
gets the answer that there is no unit at present. So does a slow learner of one job that
holds more and leaves units to the others.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from typing_extensions import override

from lightning_adpsgd.epochs.claims import (
    Claim,
    ClaimCounter,
    LeaderBroadcast,
    LearnerIndex,
)
from lightning_adpsgd.epochs.pool import IslandPool
from lightning_adpsgd.epochs.ranges import Ranges, as_ranges
from lightning_adpsgd.epochs.work_units import (
    Epoch,
    EpochState,
    Terms,
    WorkUnits,
    draw_epoch,
    remaining_of,
)

Pool = ClaimCounter | IslandPool
"""The pool of an epoch's work units, which the leader of a super-learner asks."""


@dataclass(eq=False)
class EpochUnderWay:
    """One epoch of one learner.

    Args:
        units: work units that were left when this job began the epoch.
        last_claim: the last claim, equal in all learners of the super-learner.
    """

    number: int
    seed: int
    epoch: Epoch
    units: WorkUnits
    num_begun: int = 0
    last_claim: Claim = field(default=Claim(None, 0, is_last=False))

    def samples(self, number: int, learner: int) -> list[int]:
        """Indices of the samples of a learner's batch in a unit."""
        return self.epoch.samples(self.units[number][learner])

    def state(self, remaining: Ranges) -> EpochState:
        """The state for a checkpoint if these units remain."""
        positions, epoch = self.units.positions(remaining), self.epoch
        known = self.number, self.seed, len(epoch.order)
        return EpochState(*known, positions, epoch.checksum)


class SharedBatches:
    """The batches of one learner.

    Args:
        batches: batch sampler of the user's loader.
        seed: seed of the order of samples, unless other islands have another.
        pool: function that gives the pool; None while there is none to draw from.
        reads_ahead: whether the loader has workers.
        is_of_loop: function that says whether an iterator is the training loop's.
        is_within_batch: function that says whether the step of a begun batch is ahead.
    """

    def __init__(
        self,
        batches: Any,
        index: LearnerIndex,
        seed: int,
        broadcast: LeaderBroadcast,
        pool: Callable[[], Pool | None],
        is_training: Callable[[], bool],
        reads_ahead: bool,
        is_of_loop: Callable[[], bool] = lambda: True,
        is_within_batch: Callable[[], bool] = lambda: False,
    ) -> None:
        self._batches, self._index, self.seed = batches, index, seed
        self._broadcast, self._pool = broadcast, pool
        self._is_training, self._most_held = is_training, 2 if reads_ahead else 1
        self._is_of_loop, self._is_within_batch = is_of_loop, is_within_batch
        self._begun: tuple[EpochUnderWay, int] | None = None
        self._loaded: EpochState | None = None
        self._last: EpochState | None = None
        self._held = deque[tuple[EpochUnderWay, int]]()
        self.under_way: EpochUnderWay | None = None
        self._finished = -1, 0  # epoch and number of units when it was retired
        self.epoch = 0

    @property
    def batch_size(self) -> Any:
        """The batch size, for which a program may ask, or None."""
        return getattr(self._batches, "batch_size", None)

    @property
    def drop_last(self) -> bool:
        """Whether batches that are not full are dropped."""
        return bool(getattr(self._batches, "drop_last", False))

    def load(self, state: EpochState) -> None:
        """Continues an epoch of another job, unless islands are in a different one."""
        self._loaded, self.seed, self.epoch = state, state.seed, state.epoch
        self._last = state  # until the pool is open

    def close(self) -> None:
        """Hands out no more batches; `state` stays unchanged."""
        self._last, self._pool = self.state(), lambda: None

    def retire(self) -> None:
        """Lets go of the epoch, and of the pool and the job's store with it.

        The pool may still ask how many units are finished.
        """
        if self.under_way is not None:
            number = self.under_way.number
            self._finished = number, self._num_finished(number)
        self._pool, self.under_way = (lambda: None), None
        del self._broadcast
        self._begun = None
        self._held.clear()

    def start_epoch(self, number: int) -> None:
        """Begins to hand out another epoch; drops what is held of the previous one."""
        self.epoch = number
        if self.under_way is not None and self.under_way.number != number:
            self._held.clear()

    def begin_batch(self) -> None:
        """Records that training begins on the batch that was handed out first."""
        if self._held:
            self._begun = epoch, _ = self._held.popleft()
            epoch.num_begun += 1

    def end_step(self) -> None:
        """Records that an optimizer step was made, perhaps the last of the epoch."""
        current, pool = self.under_way, self._pool()
        if current is None or self._held or not current.last_claim.is_last:
            return
        if self._index.learner == 0 and isinstance(pool, ClaimCounter):
            pool.end_last_step(current.num_begun)

    def state(self) -> EpochState | None:
        """The rest of the epoch in a learner that knows it, or None; a collective."""
        pool, current = self._pool(), self.under_way
        if pool is None or current is None:
            return self._last
        begun = [self._begun] if self._begun and self._is_within_batch() else []
        mine = (number for epoch, number in (*begun, *self._held) if epoch is current)
        remaining = pool.remaining(as_ranges(mine))
        return None if remaining is None else current.state(remaining)

    def __len__(self) -> int:
        # Lightning takes this error for "unknown"; a program sees the remedy.
        raise TypeError(
            "the training loader has no length, because learners share its epochs and "
            "none knows how many batches it gets: set `work_sharing=False`"
        )

    def __iter__(self) -> Iterator[list[int]]:
        if not self._is_of_loop():
            return self._equal_share()
        if (pool := self._pool()) is not None:
            self._current(pool)
        learner = self._index.learner
        return _Handing(self, (epoch.samples(n, learner) for epoch, n in self._held))

    def draw(self) -> list[int] | None:
        """The samples of one more batch; None at the end of the epoch, or for now."""
        pool = self._pool()
        if pool is None:
            return None
        current = self._current(pool)
        if current.last_claim.is_last:
            return None
        current.last_claim = self._claim(pool)
        number = current.last_claim.number
        if number is None:
            return None
        self._held.append((current, number))
        return current.samples(number, self._index.learner)

    def _equal_share(self) -> Iterator[list[int]]:
        """The batches of an equal share; the last may come to another learner too."""
        known = self.under_way  # none before an island has joined, or after a reload
        epoch = known and known.epoch
        epoch = epoch or draw_epoch(self._batches, self.seed, self.epoch)
        units = self._units(epoch, epoch.everything())
        first, num = self._index.super_learner, self._index.num_super_learners
        for number in range(0, len(units), num):
            ranges = units[(number + first) % len(units)]
            yield epoch.samples(ranges[self._index.learner])

    def _current(self, pool: Pool) -> EpochUnderWay:
        if self.under_way is None or self.under_way.number != self.epoch:
            self.under_way = self._begin_epoch(pool, self.epoch)
        return self.under_way

    def _claim(self, pool: Pool) -> Claim:
        num_held = len(self._held)
        waits = num_held <= self._most_held
        words = self._broadcast.share(lambda: json.dumps(pool.next(num_held, waits)))
        return Claim(*json.loads(words))

    def _begin_epoch(self, pool: Pool, number: int) -> EpochUnderWay:
        @cache
        def draw(seed: int) -> Epoch:
            return draw_epoch(self._batches, seed, number)

        def agree() -> str:
            own = draw(self.seed)
            base = remaining_of(own, number, self._loaded)
            agreed = pool.open(
                number,
                Terms(self.seed, base, own.fingerprint()),
                lambda terms: len(self._cut(draw(terms.seed), terms)),
                lambda: self._num_finished(number),
            )
            return json.dumps(agreed)

        terms = Terms.from_row(json.loads(self._broadcast.share(agree)))
        self.seed, epoch = terms.seed, draw(terms.seed)
        return EpochUnderWay(number, self.seed, epoch, self._cut(epoch, terms))

    def _cut(self, epoch: Epoch, terms: Terms) -> WorkUnits:
        if epoch.fingerprint() != terms.fingerprint:
            raise ValueError(
                "`work_sharing` needs the same samples in the same order in all "
                f"learners, got {epoch.fingerprint()} (checksum) here and "
                f"{terms.fingerprint} in others: give every learner the whole data "
                "set, and samplers that draw from torch's or Python's common generators"
            )
        return self._units(epoch, terms.base)

    def _units(self, epoch: Epoch, base: Ranges) -> WorkUnits:
        num, size = self._index.num_super_learners, self._index.super_learner_size
        return WorkUnits(base, epoch, num, size, self.drop_last)

    def _num_finished(self, number: int) -> int:
        """The number of units that are trained on, or fewer; for any thread."""
        current = self.under_way
        if current is None or current.number != number:
            return self._finished[1] if self._finished[0] == number else 0
        num_begun = current.num_begun  # first: a batch may begin between the two
        return num_begun - self._is_training()


class _Handing(Iterator[list[int]]):
    """An iterator that can continue after a temporary end."""

    def __init__(self, batches: SharedBatches, held: Iterable[list[int]]) -> None:
        self._batches, self._held = batches, deque(held)

    @override
    def __next__(self) -> list[int]:
        batch = self._held.popleft() if self._held else self._batches.draw()
        if batch is None:
            raise StopIteration
        return batch
