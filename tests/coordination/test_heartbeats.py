"""Signs of life that learners give one another through the store."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.coordination import heartbeats
from lightning_adpsgd.coordination.heartbeats import Heartbeats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(heartbeats, "time", one)
    return one


def three(timeout_s: float) -> tuple[HashStore, list[Heartbeats]]:
    store, timeout = HashStore(), timedelta(seconds=timeout_s)
    return store, [Heartbeats(rank, 3, timeout) for rank in range(3)]


def seconds_until_lost(
    clock: Clock, one: Heartbeats, store: HashStore, others: Callable[[], object]
) -> float:
    begin = clock.now
    while not one.lost(store):
        clock.now += 0.1
        others()
        if clock.now > begin + 1000:
            return float("inf")
    return clock.now - begin


@pytest.mark.parametrize(("timeout_s", "least_s"), [(30.0, 30.0), (0.5, 6.0)])
def test_a_learner_without_a_sign_of_life_is_lost_after_the_timeout(
    clock: Clock, timeout_s: float, least_s: float
) -> None:
    store, (waits, lives, dies) = three(timeout_s)
    dies.beat(store)
    took = seconds_until_lost(clock, waits, store, lambda: lives.beat(store))
    assert waits.lost(store) == [2]
    assert least_s - 1e-6 <= took <= 1.5 * least_s


def test_learners_that_give_signs_of_life_are_waited_for(clock: Clock) -> None:
    store, (waits, *others) = three(30.0)

    def live() -> None:
        for one in others:
            one.beat(store)

    assert seconds_until_lost(clock, waits, store, live) == float("inf")


def test_a_learner_that_was_itself_stopped_takes_nobody_for_lost(clock: Clock) -> None:
    store, (waits, *_) = three(30.0)
    assert waits.lost(store) == []
    clock.now += 3600
    assert waits.lost(store) == []


def test_a_sign_of_life_is_given_several_times_in_a_look(clock: Clock) -> None:
    store, (_, lives, _) = three(30.0)
    for _ in range(100):
        lives.beat(store)
        clock.now += 0.1
    assert store.add("alive/1", 0) == 4


def test_a_learner_that_comes_back_is_lost_no_longer(clock: Clock) -> None:
    store, (waits, comes, other) = three(30.0)
    seconds_until_lost(clock, waits, store, lambda: other.beat(store))
    comes.beat(store)
    clock.now += 20
    other.beat(store)
    assert waits.lost(store) == []
