"""The batches that an island gets from the pool of all islands: a batch sampler.

Epoch for epoch it hands out what the first learner of the island claims (`pool`)
and remembers it until training on it begins, so that an iterator can be thrown away and
made anew. Everything happens in the training thread.

Who asks for a batch holds one already, or two where workers of a loader read ahead. The
sampler ends only when nothing can come back; who still holds more than that is told
that there is nothing for now.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch._C._distributed_c10d import Store
from typing_extensions import override

from lightning_adpsgd.epochs.claims import EpochState, Place, Relay, remaining_of
from lightning_adpsgd.epochs.ledger import Terms, as_ranges, union
from lightning_adpsgd.epochs.pool import IslandPool
from lightning_adpsgd.epochs.work_units import Epoch, Portions, draw_epoch


class IslandEpoch:
    """One epoch of one learner of an island.

    Args:
        number: Of the epoch.
        epoch: Its samples.
        portions: As all islands number them.
        terms: On which they do.

    Attributes:
        number: Of the epoch.
        num_begun: Portions on which training has begun.
        num_seen_claimed: Portions that anybody had claimed when this island last did.
    """

    def __init__(
        self, number: int, epoch: Epoch, portions: Portions, terms: Terms
    ) -> None:
        self.number, self.epoch, self.portions = number, epoch, portions
        self.terms, self.num_begun, self.num_seen_claimed = terms, 0, 0

    @property
    def num_portions(self) -> int:
        """What the epoch had to hand out when its pool was made."""
        return len(self.portions)

    def num_claimed(self) -> int:
        """Portions that anybody has claimed; equal in all learners of the island."""
        return self.num_seen_claimed

    def samples(self, number: int, learner: int) -> list[int]:
        """Indices of the samples of a learner's batch in a portion."""
        return self.epoch.samples(self.portions[number][learner])


class IslandBatches:
    """The batches of one learner of an island.

    Args:
        batches: The batch sampler of the user's loader.
        place: Of this learner in its island.
        seed: Of the order of samples, unless others have another.
        store: Of this island alone.
        raise_if_failed: Called while this learner waits.
        is_training: Whether a batch is being trained on.
        reads_ahead: Whether the loader has workers.

    Attributes:
        epoch: The number of the epoch to hand out from.
    """

    def __init__(
        self,
        batches: Any,
        place: Place,
        seed: int,
        store: Store,
        raise_if_failed: Callable[[], None],
        is_training: Callable[[], bool],
        reads_ahead: bool = False,
    ) -> None:
        self._batches, self._place, self._seed = batches, place, seed
        self._relay = Relay(store, place, raise_if_failed)
        self._is_training, self._most_held = is_training, 2 if reads_ahead else 1
        self._pool: IslandPool | None = None
        self._begun, self._num_words = False, 0
        self._loaded: EpochState | None = None
        self._last: EpochState | None = None
        self._held = deque[tuple[IslandEpoch, int]]()
        self.under_way: IslandEpoch | None = None
        self.epoch = 0

    # --- from start to end

    def load(self, state: EpochState) -> None:
        """Goes on with an epoch that was begun before, if the others are not in one."""
        self._loaded, self._seed, self.epoch = state, state.seed, state.epoch

    def begin(self, pool: IslandPool | None) -> None:
        """The island is among the others: from here on there are batches.

        Args:
            pool: Started; of the first learner alone.
        """
        self._pool, self._begun = pool, True

    def leave(self, seconds: float) -> None:
        """Gives back what was not trained on; waits that long at most."""
        self._last, self._begun = self.state(), False
        if self._pool is not None:
            self._pool.leave(seconds)

    # --- the epoch

    def start_epoch(self, number: int) -> None:
        """What is in hand of another epoch is not trained on."""
        self.epoch = number
        if self.under_way is not None and self.under_way.number != number:
            self._held.clear()

    @property
    def seed(self) -> int:
        """Of the order of samples, as agreed."""
        return self._seed

    def begin_batch(self) -> None:
        """Training begins on the batch that was handed out first."""
        if self._held:
            self._held.popleft()[0].num_begun += 1

    def state(self) -> EpochState | None:
        """What remains for everybody, as the first learner knows it; elsewhere none."""
        pool, current = self._pool, self.under_way
        if pool is None or current is None or not self._begun:
            return self._last
        own = as_ranges(n for epoch, n in self._held if epoch is current)
        remaining = current.portions.positions(union(pool.remaining(), own))
        order, seed = current.epoch.order, current.terms.seed
        return EpochState(current.number, seed, len(order), remaining)

    def __iter__(self) -> Iterator[list[int]]:
        return _Handing(self, [self._samples(*held) for held in self._held])

    def draw(self) -> list[int] | None:
        """The samples of one batch more; none at the end of the epoch, or for now."""
        if not self._begun:
            return None
        current = self.under_way
        if current is None or current.number != self.epoch:
            current = self.under_way = self._begin_epoch(self.epoch)
        number, current.num_seen_claimed = self._claim()
        if number is None:
            return None
        self._held.append((current, number))
        return self._samples(current, number)

    # --- private

    def _samples(self, epoch: IslandEpoch, number: int) -> list[int]:
        return epoch.samples(number, self._place.learner)

    def _claim(self) -> tuple[int | None, int]:
        waits = len(self._held) <= self._most_held

        def claim() -> str:
            assert self._pool is not None
            return json.dumps([self._pool.next(waits), self._pool.num_claimed])

        number, num_claimed = json.loads(self._word(claim))
        return number, num_claimed

    def _begin_epoch(self, number: int) -> IslandEpoch:
        drawn: dict[int, Epoch] = {}

        def draw(seed: int) -> Epoch:
            if seed not in drawn:
                drawn[seed] = draw_epoch(self._batches, seed, number)
            return drawn[seed]

        def agree() -> str:
            assert self._pool is not None
            own = draw(self._seed)
            base = remaining_of(own, number, self._loaded)
            agreed = self._pool.open(
                number,
                Terms(self._seed, base, own.fingerprint()),
                lambda terms: len(self._cut(draw(terms.seed), terms)),
                lambda: self._num_finished(number),
            )
            return json.dumps(agreed)

        terms = Terms.from_row(json.loads(self._word(agree)))
        self._seed, epoch = terms.seed, draw(terms.seed)
        return IslandEpoch(number, epoch, self._cut(epoch, terms), terms)

    def _cut(self, epoch: Epoch, terms: Terms) -> Portions:
        if epoch.fingerprint() != terms.fingerprint:
            raise ValueError(
                "`work_sharing` needs the same samples in the same order in all "
                f"islands, got {epoch.fingerprint()} (checksum) here and "
                f"{terms.fingerprint} in others: give every island the whole data set, "
                "and samplers that draw from torch's or Python's common generators"
            )
        size = self._place.super_learner_size
        drop_last = bool(getattr(self._batches, "drop_last", False))
        return Portions(terms.base, epoch, 1, size, drop_last)

    def _num_finished(self, number: int) -> int:
        """Called by the thread of the pool too: never more than is so."""
        current = self.under_way
        if current is None or current.number != number:
            return 0
        num_begun = current.num_begun  # before it is asked whether that one has ended
        return num_begun - self._is_training()

    def _word(self, speak: Callable[[], str]) -> str:
        self._num_words += 1
        return self._relay.word(f"pool/{self._num_words}", speak)


class _Handing(Iterator[list[int]]):
    """Goes on after an end that was one for now."""

    def __init__(self, batches: IslandBatches, held: list[list[int]]) -> None:
        self._batches, self._held = batches, deque(held)

    @override
    def __next__(self) -> list[int]:
        batch = self._held.popleft() if self._held else self._batches.draw()
        if batch is None:
            raise StopIteration
        return batch
