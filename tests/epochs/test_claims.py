"""Claims from a store: every sample once, for any interleaving of the learners."""

import json
import random
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import DistNetworkError
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
)

from lightning_adpsgd.epochs import claims
from lightning_adpsgd.epochs.batches import SharedBatches
from lightning_adpsgd.epochs.claims import (
    Claim,
    ClaimCounter,
    ClaimRate,
    DrawnNumbers,
    LeaderBroadcast,
    LearnerIndex,
)
from lightning_adpsgd.epochs.work_units import EpochState, Terms
from tests.helpers import together
from tests.stores import own_connections, served_and_near, while_a_call_waits

SEED = 5


def never() -> None:
    raise AssertionError("waited for the first learner of the super-learner")


class Learner:
    """Trains as fast as it is told: `step` takes one batch, and reads one ahead."""

    def __init__(
        self,
        index: LearnerIndex,
        store: Any,
        num_samples: int,
        batch_size: int,
        ahead: int,
    ) -> None:
        sampler = BatchSampler(RandomSampler(range(num_samples)), batch_size, False)
        broadcast = LeaderBroadcast(PrefixStore("loader", store), index, never)
        counter = ClaimCounter(store, index, lambda name: None)
        self.is_of_loop, self.is_within_batch = True, False
        self.shared = SharedBatches(
            sampler,
            index,
            SEED,
            broadcast,
            lambda: counter,
            is_training=lambda: False,
            reads_ahead=False,
            is_of_loop=lambda: self.is_of_loop,
            is_within_batch=lambda: self.is_within_batch,
        )
        self.trained: list[int] = []
        self._ahead = ahead
        self._batches: Iterator[list[int]] = iter(())
        self._fetched: list[list[int]] = []

    def start_epoch(self, epoch: int) -> None:
        self.shared.start_epoch(epoch)
        self._batches = iter(self.shared)
        self._fetched = []

    def step(self) -> bool:
        """Ends a step; whether there is a batch for another one."""
        self.shared.end_step()
        while len(self._fetched) <= self._ahead:
            batch = next(self._batches, None)
            if batch is None:
                break
            self._fetched.append(batch)
        if not self._fetched:
            return False
        self.trained += self._fetched.pop(0)
        self.shared.begin_batch()
        return True


class Sharing:
    """All learners of a job, one process and one thread: `step(s)` moves all N of s."""

    def __init__(
        self, num: int, size: int, num_samples: int, batch_size: int = 2, ahead: int = 1
    ) -> None:
        self.num, self.size, self.store = num, size, HashStore()
        self.learners = [
            Learner(
                LearnerIndex(s, num, n, size),
                self.store,
                num_samples,
                batch_size,
                ahead,
            )
            for s in range(num)
            for n in range(size)
        ]

    def step(self, super_learner: int) -> bool:
        first = super_learner * self.size
        steps = [x.step() for x in self.learners[first : first + self.size]]
        return all(steps)

    def run_epoch(self, picks: list[int], epoch: int = 0) -> None:
        for learner in self.learners:
            learner.start_epoch(epoch)
        self.run(picks)
        moving = True
        while moving:
            steps = [self.step(s) for s in range(self.num)]
            moving = any(steps)

    def run(self, picks: list[int]) -> None:
        for pick in picks:
            self.step(pick % self.num)

    def trained(self) -> list[int]:
        return list(chain.from_iterable(x.trained for x in self.learners))

    def state(self) -> EpochState:
        """What learner 0 writes down: it is the last to come, and so has all news."""
        *others, state = [learner.shared.state() for learner in reversed(self.learners)]
        assert state is not None
        assert others == [None] * len(others)
        return state


uneven_picks = st.lists(
    st.sampled_from([0] * 12 + [1] * 4 + [2, 3]), min_size=0, max_size=120
)


@settings(deadline=None)
@given(
    num=st.integers(1, 4),
    size=st.integers(1, 3),
    num_samples=st.integers(12, 90),
    batch_size=st.integers(1, 5),
    ahead=st.integers(0, 4),
    picks=uneven_picks,
)
def test_every_sample_is_trained_on_once_in_each_epoch(
    num: int, size: int, num_samples: int, batch_size: int, ahead: int, picks: list[int]
) -> None:
    sharing = Sharing(num, size, num_samples, batch_size, ahead)
    for epoch in range(3):
        sharing.run_epoch(picks, epoch)
        assert Counter(sharing.trained()) == Counter(
            dict.fromkeys(range(num_samples), epoch + 1)
        )


@settings(deadline=None)
@given(
    first=st.tuples(st.integers(1, 4), st.integers(1, 2)),
    second=st.tuples(st.integers(1, 4), st.integers(1, 2)),
    ahead=st.integers(0, 3),
    picks=uneven_picks,
    more=st.lists(st.integers(0, 3), max_size=6),
)
def test_a_job_of_another_size_goes_on_with_what_remains(
    first: tuple[int, int],
    second: tuple[int, int],
    ahead: int,
    picks: list[int],
    more: list[int],
) -> None:
    before = Sharing(*first, 61, ahead=ahead)
    for learner in before.learners:
        learner.start_epoch(2)
    before.run(picks[:20])
    trained, state = before.trained(), before.state()
    after = Sharing(*second, 61, ahead=ahead)
    num_left = 61 - len(trained)
    for learner in after.learners:
        learner.shared.load(state)
    if 0 < num_left < second[0] * second[1]:
        with pytest.raises(ValueError, match="at least as many samples as learners"):
            after.run_epoch(more, 2)
        return
    after.run_epoch(more, 2)
    assert sorted(trained + after.trained()) == list(range(61))
    # The next epoch is whole again.
    after.run_epoch(more, 3)
    assert Counter(trained + after.trained()) == Counter(list(range(61)) * 2)


def test_a_slow_learner_gets_less_and_every_learner_something() -> None:
    sharing = Sharing(4, 1, 2 * 160)
    fifths = [0, 1, 2] * 5 + [3]
    sharing.run_epoch(fifths * 20)
    nums = [len(learner.trained) // 2 for learner in sharing.learners]
    assert sum(nums) == 160
    assert nums[3] == pytest.approx(160 / 16, abs=2)
    assert nums[0] == pytest.approx(160 * 5 / 16, abs=3)
    small = Sharing(4, 1, 7, batch_size=3)
    small.run_epoch([0] * 10)
    assert sorted(len(learner.trained) for learner in small.learners) == [1, 2, 2, 2]


def test_a_new_iterator_goes_on_with_what_is_held() -> None:
    sharing = Sharing(2, 1, 20)
    for learner in sharing.learners:
        learner.start_epoch(0)
    sharing.run([0, 0, 1])
    for learner in sharing.learners:
        learner.start_epoch(0)
    sharing.run([0] * 20 + [1] * 20)
    assert sorted(sharing.trained()) == list(range(20))


def test_learners_of_a_super_learner_hear_its_first_in_any_order() -> None:
    store = HashStore()

    def claims(rank: int) -> list[int]:
        index = LearnerIndex(rank // 3, 2, rank % 3, 3)
        broadcast = LeaderBroadcast(store, index, lambda: None)
        counter = opened(store, index, 40)
        numbers = []
        while True:
            word = broadcast.share(lambda: json.dumps(counter.next(0, False)))
            number, _, is_last = json.loads(word)
            if is_last:
                return numbers
            numbers.append(number)

    ranks = list(range(6))
    random.shuffle(ranks)
    by_rank = dict(
        zip(ranks, together([lambda r=rank: claims(r) for rank in ranks]), strict=True)
    )
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert by_rank[3] == by_rank[4] == by_rank[5]
    assert sorted(by_rank[0] + by_rank[3]) == list(range(40))
    # Nothing but the counter and the checksum stays, and who has left.
    assert store.num_keys() <= 2 + 1


def opened(store: Any, index: LearnerIndex, num_units: int) -> ClaimCounter:
    counter = ClaimCounter(store, index, lambda name: None)
    counter.open(0, Terms(SEED, (), "same"), lambda terms: num_units, lambda: 0)
    return counter


@pytest.mark.parametrize("num_units", [24, 25, 26])
def test_learners_that_wait_for_one_another_get_equally_many_units(
    num_units: int,
) -> None:
    """Learner 0 is first, second and third in turn, and seems slow at the end."""
    store, steps = HashStore(), [0]
    counters = [
        ClaimCounter(store, LearnerIndex(n, 3), lambda name: None, lambda: True)
        for n in range(3)
    ]
    for one in counters:
        one.open(0, Terms(SEED, (), ""), lambda terms: num_units, lambda: steps[0])
    rounds = list[list[int | None]]()
    for number in range(9):
        order = [1, 2]
        order.insert(number % 3, 0)
        rounds.append([counters[n].next(1, True).number for n in order])
        steps[0] += 1
    *whole, after = rounds
    assert sorted(chain.from_iterable(whole)) == [*range(24)]  # pyright: ignore
    assert after == [None] * 3


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_program_gets_an_equal_share_of_the_whole_epoch_and_claims_nothing(
    has_begun: bool,
) -> None:
    """Eleven batches are six units of two, so each learner sees three batches."""
    sharing, seen = Sharing(2, 2, num_samples=22), list[int]()
    if has_begun:
        for learner in sharing.learners:
            learner.start_epoch(0)
        sharing.run([0, 0, 1])
    for learner in sharing.learners:
        learner.is_of_loop = False
        share = list(learner.shared)
        assert len(share) == 3
        seen += chain.from_iterable(share)
        learner.is_of_loop = True
    assert sorted(seen) == list(range(22))
    if has_begun:
        sharing.run([0, 1] * 6)
    else:
        sharing.run_epoch([])
    assert sorted(sharing.trained()) == list(range(22))


def test_a_program_reads_the_size_of_batches_as_from_torchs_own_sampler() -> None:
    shared = Sharing(2, 1, num_samples=8, batch_size=4).learners[0].shared
    assert (shared.batch_size, shared.drop_last) == (4, False)


def test_who_asks_for_the_length_of_a_shared_loader_is_told_the_remedy() -> None:
    learner = Sharing(2, 1, num_samples=8).learners[0]
    with pytest.raises(TypeError, match="set `work_sharing=False`"):
        len(DataLoader(range(8), batch_sampler=learner.shared))  # pyright: ignore


class SlowCounter:
    """A counter that answers after a while, and what it was asked for."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.asked = seconds, list[int]()
        self.noted, self.num_steps = list[tuple[int, int]](), 0

    def add(self, num: int) -> int:
        first = sum(self.asked)
        self.asked.append(num)
        time.sleep(self._seconds)
        return first

    def drawn(self) -> DrawnNumbers:
        def note(first: int, num_steps: int) -> None:
            self.noted.append((first, num_steps))

        return DrawnNumbers(self.add, lambda: self.num_steps, note, deque(maxlen=10))


def test_where_the_counter_is_far_numbers_are_drawn_ahead_and_together() -> None:
    """Steps of 4 ms and round trips of 20: with one for each, 60 of them take 1.2 s."""
    counter = SlowCounter(0.02)
    drawn, numbers = counter.drawn(), list[int]()
    for _ in range(60):
        numbers.append(drawn.next(lambda: 100))
        time.sleep(0.004)
        counter.num_steps += 1
    assert numbers == [*range(60)]
    assert drawn._num_ahead() > 0
    assert len(counter.asked) < 60
    assert 1 < max(counter.asked) <= 8
    held = drawn.settle()
    assert [*numbers, *held] == [*range(sum(counter.asked))]
    firsts, steps = zip(*counter.noted, strict=True)
    assert [*firsts] == [sum(counter.asked[:n]) for n in range(len(counter.asked))]
    assert [*steps] == sorted(steps)
    # Those of the moment at which each was asked for, and no step has more than one.
    assert steps[0] == 0
    assert 0 < steps[-1] < 60


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 100), (0.01, 0)])
def test_nothing_is_held_where_the_counter_is_near_or_the_end_is(
    seconds: float, most: int
) -> None:
    counter = SlowCounter(seconds)
    drawn = counter.drawn()
    for number in range(30):
        assert drawn.next(lambda: most) == number
        assert not drawn.any_left
    assert (drawn._num_ahead() > 0) == bool(seconds)


@pytest.mark.parametrize(("step_s", "is_short"), [(0.5, True), (0.1, False)])
def test_a_round_trip_that_is_short_beside_a_step_is_no_reason_to_draw_ahead(
    monkeypatch: pytest.MonkeyPatch, step_s: float, is_short: bool
) -> None:
    now = 0.0

    def add(num: int) -> int:
        nonlocal now
        now += 0.01
        return 0

    monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: now))
    drawn = DrawnNumbers(add, lambda: 0, lambda first, steps: None, deque(maxlen=10))
    for _ in range(10):
        drawn.next(lambda: 0)
        now += step_s
    assert (drawn._num_ahead() == 0) == is_short


def test_what_is_drawn_ahead_remains_of_the_epoch() -> None:
    """A checkpoint of this moment has it, and nothing twice."""
    store, index = HashStore(), LearnerIndex(0, 1)
    counter = ClaimCounter(store, index, lambda name: None)
    counter.open(0, Terms(0, (), "text"), lambda terms: 9, lambda: 0)
    assert [counter.next(0, True).number for _ in range(3)] == [0, 1, 2]
    counter._drawn._draw_ahead(8)
    assert counter.remaining(((2, 3),)) == ((2, 9),)
    assert [counter.next(0, True).number for _ in range(7)] == [*range(3, 9), None]


def test_who_has_one_step_in_an_epoch_draws_nothing_ahead_of_it() -> None:
    """Far from the counter; it begins with the unit that is dealt, and has no other."""
    counter = opened(HashStore(), LearnerIndex(3, 4), 200)
    counter._round_trips.extend([0.03] * 3)
    counter._rate = rate_of([150] * 3)
    counter._rate.start_epoch()
    assert counter.next(0, True).number == 3
    assert counter.next(1, True) == Claim(None, 200, True)


@pytest.mark.parametrize(
    ("counts", "most"),
    [([], 0), ([0] * 3, 8), ([2] * 3, 8), ([20] * 3, 2), ([40] * 3, 1)],
)
def test_before_its_first_step_a_learner_draws_at_most_half_of_its_share(
    counts: list[int], most: int
) -> None:
    """Far from the counter, of 100 units; during one step all claim `counts`."""
    counter = opened(HashStore(), LearnerIndex(1, 2), 100)
    counter._round_trips.extend([0.03] * 3)
    counter._rate = rate_of(counts)
    counter._rate.start_epoch()
    assert counter.next(0, True).number == 1
    assert counter._drawn.settle() == [*range(2, 2 + most)]


@pytest.mark.parametrize("waits", [True, False])
def test_the_last_to_leave_stays(waits: bool) -> None:
    store, ends = HashStore(), []
    for super_learner in range(3):
        counter = opened(store, LearnerIndex(super_learner, 3), 40)
        # As if each were very slow: all others together make 30 steps in one of its.
        for steps, number in enumerate((0, 31)):
            counter._rate.note(number, steps)
        assert counter.next(0, waits).number == super_learner
        ends.append(counter.next(1, waits))
    # One that need not know for sure may ask again.
    left = Claim(None, 40, True) if waits else Claim(None, 3, False)
    assert ends == [left, left, Claim(3, 4, False)]


def test_the_rate_compares_with_what_the_others_would_do_meanwhile() -> None:
    def leaves(numbers_per_step: int, num_units: int, num_held: int) -> bool:
        rate = ClaimRate()
        for step in range(4):
            rate.note(step * numbers_per_step, step)
        return rate.others_end_first(num_units, 4, num_held)

    # One of four, five times slower than the others: 16 numbers to a step. In two of
    # its steps the others make 30, of which the last three may come late.
    assert leaves(16, 3 * 16 + 16 + 24, 1)
    assert not leaves(16, 3 * 16 + 16 + 25, 1)
    assert leaves(16, 3 * 16 + 16 + 12, 0)
    # Equally fast ones, and the fast one of unequal ones, never leave.
    assert not leaves(4, 3 * 4 + 4 + 1, 1)
    assert not leaves(3, 3 * 3 + 3 + 1, 3)


def test_the_rate_is_that_of_the_last_five_counts() -> None:
    rate, number = rate_of([1] * 9 + [16] * 3), 9 + 3 * 16
    # The median of the last five is 16; with a sixth it would be 8.5.
    assert rate.others_end_first(number + 16 + 24, 4, 1)
    assert not rate.others_end_first(number + 16 + 25, 4, 1)


def rate_of(counts: list[int]) -> ClaimRate:
    """Of a learner during whose steps all have claimed so many units."""
    rate, number = ClaimRate(), 0
    for num_steps, count in enumerate([0, *counts]):
        rate.note(number := number + count, num_steps)
    return rate


def test_claims_without_a_step_between_them_are_no_count() -> None:
    """A loader claims for all its workers before the first step."""
    rate = ClaimRate()
    for number in range(0, 32, 2):
        rate.note(number, 0)
    assert not rate.others_end_first(1, 2, 0)
    rate.note(30 + 11, 1)
    assert rate.others_end_first(41 + 11 + 9, 2, 0)
    assert not rate.others_end_first(41 + 11 + 10, 2, 0)
    # Two steps later the counter has grown by twice as much.
    rate.note(41 + 22, 3)
    assert rate.others_end_first(63 + 11 + 9, 2, 0)
    assert not rate.others_end_first(63 + 11 + 10, 2, 0)


@pytest.mark.parametrize(
    ("slower", "steps"), [(2, [9] * 6), (10, [2] * 6), (25, [2] + [1] * 5)]
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_slow_learner_knows_it_after_its_first_step_and_stays_slow(
    size: int, slower: int, steps: list[int]
) -> None:
    """Of four and epochs of 64 units, which ideally are 9.1, 2.1 and 0.8 steps of it.

    Two it holds before it knows how slow it is, and the one that is dealt always.
    """
    sharing = Sharing(4, size, 64 * size, batch_size=1)
    slow, nums = sharing.learners[-1], list[int]()
    for epoch in range(6):
        before = len(slow.trained)
        sharing.run_epoch(([3] + [0, 1, 2] * slower) * 32, epoch)
        nums.append(len(slow.trained) - before)
    assert nums == steps


def test_who_had_one_step_in_each_epoch_does_its_part_once_it_is_fast() -> None:
    sharing = Sharing(4, 1, 64, batch_size=1)
    one, nums = sharing.learners[3], list[int]()
    for epoch in range(12):
        slower = 25 if epoch < 6 else 1
        before = len(one.trained)
        sharing.run_epoch(([3] + [0, 1, 2] * slower) * 32, epoch)
        nums.append(len(one.trained) - before)
    assert nums == [2, 1, 1, 1, 1, 1, 1, 16, 16, 16, 16, 16]


def test_a_first_step_that_is_late_is_forgotten_with_the_second() -> None:
    rate = rate_of([60, 4])
    assert not rate.others_end_first(64 + 4 + 1, 4, 1)


def test_that_nothing_was_left_to_count_is_no_sign_of_a_fast_learner() -> None:
    """At the last unit of its epoch the others have claimed the few that were left."""
    store, rate = HashStore(), rate_of([16] * 3)
    counter = opened(store, LearnerIndex(3, 4), 12)
    counter._rate = rate
    rate.start_epoch()
    rate.note(10, 0)
    PrefixStore("epoch/0", store).add("claimed", 20)
    counter.end_last_step(1)
    assert rate.has_counted
    assert [*rate._counts] == [16] * 3
    # All had gone before this learner's step: the others could claim nothing.
    rate.start_epoch()
    rate.note(13, 0)
    counter.end_last_step(1)
    assert not rate.has_counted


def test_with_workers_a_slow_learner_hoards_in_the_first_epoch_alone() -> None:
    """Ten times slower than the other, it should do 100 / 11 of 100 units."""
    sharing = Sharing(2, 1, 100, batch_size=1, ahead=16)
    slow, nums = sharing.learners[1], list[int]()
    for epoch in range(8):
        before = len(slow.trained)
        sharing.run_epoch(([0] * 10 + [1]) * 20, epoch)
        nums.append(len(slow.trained) - before)
    assert nums[0] > 16
    assert max(nums[1:]) <= 10
    assert min(nums[1:]) >= 7


def test_who_was_slow_in_an_epoch_before_does_its_part_again() -> None:
    """It takes less in the burst, and looks at the counter with each step."""
    sharing = Sharing(2, 1, 100, batch_size=1, ahead=16)
    one = sharing.learners[1]
    for epoch in range(2):
        sharing.run_epoch(([0] * 10 + [1]) * 20, epoch)
    before = len(one.trained)
    sharing.run_epoch([0, 1] * 60, 2)
    assert len(one.trained) - before >= 40


@pytest.mark.parametrize("size", [1, 2])
def test_a_slow_super_learner_of_several_leaves_for_good(size: int) -> None:
    """Its learners may hold more or fewer, and one would take it for the end alone."""
    counter = opened(HashStore(), LearnerIndex(1, 2, 0, size), 40)
    counter.next(0, False)
    with patch.object(counter, "_leaves", return_value=True):
        assert counter.next(8, False).is_last == (size > 1)


def test_a_loader_that_is_replaced_keeps_no_pool() -> None:
    learner = Learner(LearnerIndex(0, 1), HashStore(), 8, 2, 1)
    learner.start_epoch(0)
    learner.step()
    pool: Any = weakref.ref(learner.shared._pool())
    learner.shared.retire()
    assert pool() is None


def test_before_its_second_claim_a_learner_leaves_nothing_to_others() -> None:
    for rate in (ClaimRate(), rate_of([])):
        assert not rate.others_end_first(1, 2, 0)


def test_as_an_epoch_begins_each_has_one_unit_and_claims_one() -> None:
    rate = rate_of([16] * 3)
    rate.start_epoch()
    # Of 4 super-learners 8 units are claimed; then as within an epoch.
    assert rate.others_end_first(8 + 24, 4, 1)
    assert not rate.others_end_first(8 + 25, 4, 1)
    # The first claim of an epoch is no step from the last one of the epoch before.
    rate.note(1000, 1)
    assert rate.others_end_first(1016 + 24, 4, 1)
    assert not rate.others_end_first(1016 + 25, 4, 1)


def test_who_was_slow_once_is_tried_again_after_an_epoch_without_a_count() -> None:
    rate = rate_of([50, 50, 2])
    rate.start_epoch()
    assert rate.others_end_first(30, 4, 0)
    rate.start_epoch()  # 50 and 2, of which the lower one counts
    assert not rate.others_end_first(30, 4, 0)
    for _ in range(9):
        rate.start_epoch()
    assert not rate.others_end_first(1, 4, 0)


@contextmanager
def resting() -> Iterator[list[float]]:
    """The pauses of who waits; time passes in them alone."""
    rests = list[float]()
    clock = SimpleNamespace(sleep=rests.append, monotonic=lambda: sum(rests))
    with patch.object(claims, "time", clock):
        yield rests


def failing_at_the_third_look() -> Callable[[], None]:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise RuntimeError("learner 0 has failed")

    return look


def test_who_waits_for_a_leader_that_has_failed_ends_with_its_error() -> None:
    # Nothing is there yet, each of so many times that somebody looks.
    found = iter([False] * 9)
    silent: Any = SimpleNamespace(check=lambda keys: next(found))
    follower = LearnerIndex(0, 1, 1, 2)
    broadcast = LeaderBroadcast(silent, follower, failing_at_the_third_look())
    with resting() as rests, pytest.raises(RuntimeError, match="learner 0 has failed"):
        broadcast.share(lambda: "never said here")
    assert rests == [0.001, 0.001]


def test_who_has_lost_the_store_of_its_leader_waits_for_the_reason() -> None:
    """It closes as the leader ends, before anybody has read why."""

    def closed(keys: list[str]) -> bool:
        raise DistNetworkError("the connection was closed")

    broken: Any = SimpleNamespace(check=closed)
    follower = LearnerIndex(0, 1, 1, 2)
    broadcast = LeaderBroadcast(broken, follower, failing_at_the_third_look())
    with resting() as rests, pytest.raises(RuntimeError, match="learner 0 has failed"):
        broadcast.share(lambda: "never said here")
    assert rests == [0.001, 0.001]


def test_who_never_hears_the_reason_raises_what_it_knows_after_three_seconds() -> None:
    def closed(keys: list[str]) -> bool:
        raise DistNetworkError("the connection was closed")

    broken: Any = SimpleNamespace(check=closed)
    broadcast = LeaderBroadcast(broken, LearnerIndex(0, 1, 1, 2), lambda: None)
    with resting() as rests, pytest.raises(DistNetworkError, match="was closed"):
        broadcast.share(lambda: "never said here")
    assert sum(rests) == pytest.approx(3.0, abs=0.002)


def test_what_all_have_heard_is_deleted() -> None:
    store = HashStore()
    of_three = [LeaderBroadcast(store, LearnerIndex(0, 1, n, 3), never) for n in (0, 1)]
    last = LeaderBroadcast(store, LearnerIndex(0, 1, 2, 3), never)
    for word in ("one", "two"):
        words = [one.share(lambda said=word: said) for one in of_three]
        assert words == [word, word]
        assert store.num_keys() == 2  # the last has yet to hear it
        assert last.share(lambda: "never said here") == word
        assert store.num_keys() == 0


def test_a_leader_alone_tells_nobody() -> None:
    store = HashStore()
    broadcast = LeaderBroadcast(store, LearnerIndex(0, 1), never)
    assert broadcast.share(lambda: "a word") == "a word"
    assert store.num_keys() == 0


def test_claims_are_counted_up_to_the_last_unit() -> None:
    store = HashStore()
    one, other = (opened(store, LearnerIndex(s, 2), 4) for s in range(2))
    # One unit is dealt to each; then they claim.
    assert one._counted() == 2
    assert one.next(0, False) == Claim(0, 2, False)
    assert one.next(0, False) == Claim(2, 3, False)
    assert other.next(0, False) == Claim(1, 2, False)
    assert other._counted() == 3
    assert other.next(0, False) == Claim(3, 4, False)
    for counter in (one, other):
        assert counter.next(0, False) == Claim(None, 4, True)
        assert counter._counted() == 4


def test_who_has_no_unit_to_begin_with_has_none() -> None:
    """There are fewer units than super-learners."""
    store = HashStore()
    last = opened(store, LearnerIndex(2, 3), 2)
    assert last._counted() == 2
    assert last.next(0, False) == Claim(None, 2, True)


def test_learners_with_other_data_are_told() -> None:
    sharing = Sharing(2, 1, 12)
    other = Learner(LearnerIndex(1, 2), sharing.store, 13, 2, 1)
    sharing.learners[0].start_epoch(0)
    with pytest.raises(ValueError, match=r"13 samples.* here and 12 samples.* in oth"):
        other.start_epoch(0)


def test_a_checkpoint_of_other_data_is_refused() -> None:
    learner = Sharing(1, 1, 30).learners[0]
    learner.shared.load(EpochState(0, SEED, 31, ((4, 31),)))
    with pytest.raises(ValueError, match="epoch of 31 samples and this one has 30"):
        learner.start_epoch(0)


def test_the_rest_of_an_epoch_in_another_order_is_refused() -> None:
    before = Sharing(1, 1, 30)
    before.learners[0].start_epoch(0)
    before.run([0] * 5)
    state = before.state()

    def resumed(state: EpochState, sampler: Any, batch_size: int) -> list[int]:
        learner = Sharing(1, 1, 30).learners[0]
        learner.shared._batches = BatchSampler(sampler, batch_size, False)
        learner.shared.load(state)
        learner.start_epoch(0)
        return list(chain.from_iterable(learner._batches))

    shuffled, in_order = RandomSampler(range(30)), SequentialSampler(range(30))
    # Batches may have another size.
    assert sorted(before.trained() + resumed(state, shuffled, 3)) == list(range(30))
    with pytest.raises(ValueError, match="another order of its 30 samples: resume"):
        resumed(state, in_order, 2)
    # Earlier versions did not write it down.
    earlier = {k: v for k, v in state._asdict().items() if k != "checksum"}
    assert len(resumed(EpochState(**earlier), in_order, 2)) == 20


@pytest.mark.parametrize("size", [1, 2])
def test_units_whose_step_is_ahead_remain(size: int) -> None:
    """A checkpoint within a batch has weights from before it."""
    sharing = Sharing(2, size, 40)
    for learner in sharing.learners:
        learner.start_epoch(0)
    sharing.run([0, 1, 1])

    def num_left() -> int:
        return sum(end - begin for begin, end in sharing.state().remaining)

    num_samples = 2 * size  # of a unit
    assert num_left() == 40 - 3 * num_samples
    for learner in sharing.learners:
        learner.is_within_batch = True
    assert num_left() == 40 - num_samples


def test_learners_in_different_epochs_cannot_write_one_state() -> None:
    sharing = Sharing(2, 1, 20)
    for epoch, learner in enumerate(sharing.learners):
        learner.start_epoch(epoch)
    with pytest.raises(ValueError, match=r"same epoch .* got epochs \[0, 1\]: save at"):
        sharing.state()


@own_connections
def test_claims_do_not_wait_for_other_calls_of_the_store() -> None:
    """Far from the store, the look for failures took a round trip before each claim."""
    _served, store = served_and_near()
    counter = ClaimCounter(store, LearnerIndex(0, 2), lambda name: None)
    with while_a_call_waits(store) as waiting:
        counter.open(0, Terms(0, (), "same"), lambda terms: 40, lambda: 0)
        assert [counter.next(0, False).number for _ in range(2)] == [0, 2]
        assert waiting.is_alive()


@pytest.mark.parametrize("learner", [0, 1])
def test_learners_that_never_claim_open_no_connection(
    learner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(claims, "own_connection", opened.append)
    ClaimCounter(HashStore(), LearnerIndex(0, 1, learner, 2), lambda name: None)
    assert len(opened) == (learner == 0)


def held_by(learner: Learner) -> list[list[int]]:
    """The batches that a new iterator hands out, of which one was fetched before."""
    return list(learner.shared)


def begun() -> Learner:
    """One that trains on its first batch of four, and has fetched the next."""
    learner = Learner(LearnerIndex(0, 1), HashStore(), 8, 2, 1)
    learner.start_epoch(0)
    assert learner.step()
    return learner


def test_what_is_held_of_an_epoch_is_no_part_of_the_next() -> None:
    learner = begun()
    learner.shared.start_epoch(1)
    assert sorted(chain.from_iterable(held_by(learner))) == [*range(8)]


def test_an_epoch_that_begins_again_goes_on_with_what_is_held() -> None:
    learner = begun()
    learner.shared.start_epoch(0)
    rest = chain.from_iterable(held_by(learner))
    assert sorted([*learner.trained, *rest]) == [*range(8)]


def test_a_loader_that_was_replaced_hands_nothing_out() -> None:
    learner = begun()
    learner.shared.retire()
    assert held_by(learner) == []


def test_a_loader_that_is_closed_hands_out_what_is_held_and_knows_what_remains() -> (
    None
):
    learner = begun()
    state = learner.shared.state()
    assert state is not None
    learner.shared.close()
    assert [len(batch) for batch in held_by(learner)] == [2]
    assert learner.shared.state() == state


def test_what_remains_can_be_asked_for_again_and_leaves_nothing_in_the_store() -> None:
    store = HashStore()
    counter = opened(store, LearnerIndex(0, 1), 9)
    counter.next(0, True)
    nums = set[int]()
    for _ in range(3):
        assert counter.remaining(()) == ((1, 9),)
        nums.add(store.num_keys())
    assert len(nums) == 1
