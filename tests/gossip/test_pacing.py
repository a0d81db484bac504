"""How often and how fast: budgets of bytes and of processor time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_adpsgd.gossip import pacing
from lightning_adpsgd.gossip.pacing import CoreShare, Pacer


class Clock:
    """Stands in for `time` and for what the system says of the training thread."""

    def __init__(self) -> None:
        self.now = self.processor = self.queued = 100.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.processor

    def thread_time(self) -> float:
        return 0.0

    def run(self, seconds: float, busy: float, queueing: float) -> None:
        """Lets time pass in which so much of it went to work and to waiting."""
        self.now += seconds
        self.processor += busy * seconds
        self.queued += queueing * seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    return clock


@pytest.fixture
def cores(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> CoreShare:
    return watched(CoreShare(share=0.1, overhead=3.5), clock, monkeypatch)


def watched(cores: CoreShare, clock: Clock, patch: pytest.MonkeyPatch) -> CoreShare:
    """Told of the system by the clock."""
    patch.setattr(
        cores,
        "_look",
        lambda: pacing._Mark(clock.now, clock.processor, clock.queued),
    )
    cores.watch_this_thread()
    return cores


def waited(cores: CoreShare, clock: Clock, queueing: float = 0.5) -> float:
    """Seconds until the next exchange may begin."""
    begin = clock.now
    while pause_s := cores.pause_s():
        clock.run(pause_s, busy=0.5, queueing=queueing)
    return clock.now - begin


def test_bytes_come_at_the_rate_of_the_budget(clock: Clock) -> None:
    pacer = Pacer(1000.0, clock.monotonic)
    assert pacer.charge(500) == 0.0
    assert pacer.charge(1000) == pytest.approx(0.5)
    assert pacer.charge(10) == pytest.approx(1.5)
    clock.now += 100.0  # what was not used is not saved up
    assert pacer.charge(1000) == 0.0
    assert pacer.charge(1000) == pytest.approx(1.0)


def test_without_a_budget_nothing_waits() -> None:
    assert [Pacer(None).charge(10**12) for _ in range(3)] == [0.0] * 3


def test_where_nobody_queues_for_a_core_exchanges_are_free(
    clock: Clock, cores: CoreShare
) -> None:
    for _ in range(5):
        cores.spent(10.0)
        clock.run(1.0, busy=1.0, queueing=0.01)
        assert cores.pause_s() == 0.0


def test_where_the_training_queues_exchanges_keep_to_their_share(
    clock: Clock, cores: CoreShare
) -> None:
    """0.01 s of an exchange, and what comes with it, are a tenth of 0.35 s of work."""
    clock.run(1.0, busy=0.5, queueing=0.5)
    assert cores.pause_s() == 0.0
    cores.spent(0.01)
    assert waited(cores, clock) == pytest.approx(0.035 / 0.1 / 0.5)


def test_who_waits_goes_on_when_the_cores_are_free_again(
    clock: Clock, cores: CoreShare
) -> None:
    cores.spent(1.0)
    assert waited(cores, clock, queueing=0.0) < 1.0
    clock.run(1.0, busy=0.5, queueing=0.5)  # and nothing of it is owed later
    assert cores.pause_s() == 0.0


def test_of_several_who_wait_only_one_begins(clock: Clock, cores: CoreShare) -> None:
    """Each pays beforehand, and what it then takes is not counted twice."""
    clock.run(1.0, busy=0.5, queueing=0.5)
    assert cores.pause_s() == 0.0
    cores.spent(0.01)
    period = 0.035 / 0.1 / 0.5
    assert [waited(cores, clock) for _ in range(3)] == pytest.approx(3 * [period])
    for _ in range(3):
        cores.spent(0.01)
    assert waited(cores, clock) == pytest.approx(period)


@given(st.lists(st.floats(1e-4, 0.05), min_size=1, max_size=20))
def test_all_that_exchanges_take_is_paid_for(taken: list[float]) -> None:
    """However long each takes beside the one before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pacing, "time", clock := Clock())
        cores = watched(CoreShare(share=0.1, overhead=3.5), clock, patch)
        clock.run(1.0, busy=0.5, queueing=0.5)
        begin = clock.now
        for seconds in taken:
            waited(cores, clock)
            cores.spent(seconds)
        waited(cores, clock)
        owed = 3.5 * sum(taken) / 0.1 / 0.5
        # What is paid ahead for the exchange that may begin now, and no more.
        ahead = 3.5 * max(taken) / 0.1 / 0.5
        assert owed - 1e-6 <= clock.now - begin + 1e-9 <= owed + ahead + 1e-6


def test_learners_that_begin_on_short_cores_pay_for_the_first_exchange(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the size of their weights, since nothing was measured yet."""
    small, large = (
        watched(CoreShare(0.1, num_bytes, overhead=3.5), clock, monkeypatch)
        for num_bytes in (4_000, 40_000_000)
    )
    begin = clock.now
    assert waited(small, clock) < 0.01
    clock.now = begin
    assert waited(large, clock) > 1.0


def test_no_pause_is_longer_than_a_minute(clock: Clock, cores: CoreShare) -> None:
    clock.run(1.0, busy=0.5, queueing=0.5)
    assert cores.pause_s() == 0.0
    cores.spent(1000.0)
    assert waited(cores, clock) == pytest.approx(60.0)


@pytest.fixture
def free_cores(clock: Clock, cores: CoreShare) -> CoreShare:
    """As they are found after a minute in which a hundredth went to queueing."""
    for _ in range(60):
        cores.pause_s()
        clock.run(1.0, busy=0.5, queueing=0.01)
        with cores.exchange():
            pass
    assert cores.pause_s() == 0.0
    return cores


def test_merges_take_a_hundredth_of_the_time_of_training(
    clock: Clock, free_cores: CoreShare
) -> None:
    for _ in range(3):
        free_cores.merged(0.05)
    # Two seconds in which nothing was taken count.
    assert waited(free_cores, clock, queueing=0.01) == pytest.approx(15.0 - 2.0)
    free_cores.merged(0.05)
    assert waited(free_cores, clock, queueing=0.01) == pytest.approx(5.0)


def test_the_training_queues_for_exchanges_a_hundredth_of_its_time(
    clock: Clock, free_cores: CoreShare
) -> None:
    with free_cores.exchange():
        clock.run(2.0, busy=0.5, queueing=0.04)
    # What it queues without exchanges is not their doing.
    assert waited(free_cores, clock, queueing=0.01) == pytest.approx(
        6.0 - 2.0, rel=0.01
    )


def test_what_training_queues_anyway_keeps_no_exchange_waiting(
    clock: Clock, free_cores: CoreShare
) -> None:
    for _ in range(20):
        with free_cores.exchange():
            clock.run(1.0, busy=0.5, queueing=0.01)
        assert free_cores.pause_s() == 0.0


def test_an_exchange_that_fails_is_under_way_no_more(
    clock: Clock, free_cores: CoreShare
) -> None:
    with pytest.raises(ValueError, match="lost"), free_cores.exchange():
        raise ValueError("lost")
    clock.run(10.0, busy=0.5, queueing=0.04)  # which is usual now
    with free_cores.exchange():
        clock.run(1.0, busy=0.5, queueing=0.04)
    assert waited(free_cores, clock, queueing=0.04) < 0.1


def test_a_whole_share_is_no_bound(clock: Clock) -> None:
    cores = CoreShare(share=1.0)
    cores.watch_this_thread()
    cores.spent(1000.0)
    cores.merged(1000.0)
    clock.run(1.0, busy=0.5, queueing=0.5)
    assert cores.pause_s() == 0.0
