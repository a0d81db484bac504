"""How often and how fast: budgets of bytes and of processor time."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_adpsgd.gossip import pacing
from lightning_adpsgd.gossip.pacing import CoreShare, Pacer

NUM_CORES = 2


class Clock:
    """Stands in for `time` and for what the system says of the cores."""

    def __init__(self) -> None:
        self.now = self.processor = self.idle = 100.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.processor

    def thread_time(self) -> float:
        return 0.0

    def run(self, seconds: float, busy: float, idle: float) -> None:
        """Lets time pass: of it the learner had so much, each core rested so long."""
        self.now += seconds
        self.processor += busy * seconds
        self.idle += NUM_CORES * idle * seconds


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
    patch.setattr(pacing.os, "sched_getaffinity", lambda _: set(range(NUM_CORES)))
    patch.setattr(
        cores,
        "_look",
        lambda: pacing._Mark(clock.now, clock.processor, clock.idle),
    )
    cores.watch_this_thread()
    return cores


def waited(cores: CoreShare, clock: Clock, idle: float = 0.0) -> float:
    """Seconds until the next exchange may begin."""
    begin = clock.now
    while pause_s := cores.pause_s():
        clock.run(pause_s, busy=0.5, idle=idle)
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


def test_beside_idle_cores_exchanges_are_free(clock: Clock, cores: CoreShare) -> None:
    for _ in range(5):
        cores.spent(1.0)
        clock.run(1.0, busy=0.0, idle=1.0)
        assert cores.pause_s() == 0.0


def test_where_no_core_is_idle_exchanges_keep_to_their_share(
    clock: Clock, cores: CoreShare
) -> None:
    """0.01 s of an exchange, and what comes with it, are a tenth of 0.35 s of work."""
    clock.run(10.0, busy=0.5, idle=0.0)
    assert cores.pause_s() == 0.0
    cores.spent(0.01)
    assert waited(cores, clock) == pytest.approx(0.035 / 0.1 / 0.5)


def test_who_waits_goes_on_when_the_cores_are_free_again(
    clock: Clock, cores: CoreShare
) -> None:
    cores.spent(1.0)
    assert waited(cores, clock, idle=1.0) < 1.0


def test_of_several_who_wait_only_one_begins(clock: Clock, cores: CoreShare) -> None:
    """Each pays beforehand, and what it then takes is not counted twice."""
    clock.run(1.0, busy=0.5, idle=0.0)
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
        clock.run(1.0, busy=0.5, idle=0.0)
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
    clock.run(1.0, busy=0.5, idle=0.0)
    assert cores.pause_s() == 0.0
    cores.spent(1000.0)
    assert waited(cores, clock) == pytest.approx(60.0)


@pytest.fixture
def free_cores(clock: Clock, cores: CoreShare) -> CoreShare:
    """As they are found while nobody computes."""
    clock.run(10.0, busy=0.0, idle=1.0)
    assert cores.pause_s() == 0.0
    return cores


def test_merges_take_a_hundredth_of_the_time_of_training(
    clock: Clock, free_cores: CoreShare
) -> None:
    free_cores.spent(1.0)  # more than the learner's own work pays for in a minute
    clock.run(10.0, busy=0.0, idle=1.0)
    for _ in range(3):
        free_cores.merged(0.05)
    # Two seconds in which nothing was taken count.
    assert waited(free_cores, clock, idle=1.0) == pytest.approx(15.0 - 2.0)
    free_cores.merged(0.05)
    assert waited(free_cores, clock, idle=1.0) == pytest.approx(5.0)


def test_exchanges_that_find_no_idle_core_take_a_hundredth_of_it(
    clock: Clock, free_cores: CoreShare
) -> None:
    """Half of each of two cores is busy then: a quarter of its work finds both so."""
    with free_cores.exchange():
        clock.run(1.0, busy=0.0, idle=0.5)
    free_cores.spent(0.1)
    # Paid for by the learner's own work it would be after 0.35 / 0.1 / 0.01 seconds.
    assert waited(free_cores, clock, idle=1.0) == pytest.approx(0.35 / 4 / 0.01 - 1.0)


def test_cores_are_as_busy_as_all_exchanges_have_found_them(
    clock: Clock, free_cores: CoreShare
) -> None:
    """However they overlap; what is between them does not count."""
    clock.run(10.0, busy=0.0, idle=0.0)
    with free_cores.exchange():
        clock.run(0.1, busy=0.0, idle=0.0)
        with free_cores.exchange():
            clock.run(0.1, busy=0.0, idle=0.5)
    clock.run(10.0, busy=0.0, idle=0.0)
    with free_cores.exchange():
        clock.run(0.1, busy=0.0, idle=1.0)
    assert free_cores._crowded == pytest.approx(0.5**2)


def test_an_exchange_that_fails_is_paid_for(
    clock: Clock, cores: CoreShare, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.run(10.0, busy=0.5, idle=0.0)
    assert cores.pause_s() == 0.0
    ends = iter((0.0, 0.01))
    monkeypatch.setattr(clock, "thread_time", lambda: next(ends))
    with pytest.raises(ValueError, match="lost"), cores.exchange():
        raise ValueError("lost")
    assert waited(cores, clock) == pytest.approx(0.035 / 0.1 / 0.5)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="cores are Linux's")
def test_the_system_says_which_cores_rest() -> None:
    core = {min(os.sched_getaffinity(0))}
    begin, before = time.monotonic(), pacing._idle_s(core)
    while time.monotonic() - begin < 0.3:
        pass
    rested = pacing._idle_s(core) - before
    assert 0 <= rested <= time.monotonic() - begin + 0.02
    assert pacing._idle_s(os.sched_getaffinity(0)) >= pacing._idle_s(core) > 0


def test_a_whole_share_is_no_bound(clock: Clock) -> None:
    cores = CoreShare(share=1.0)
    cores.watch_this_thread()
    cores.spent(1000.0)
    cores.merged(1000.0)
    clock.run(1.0, busy=0.5, idle=0.0)
    assert cores.pause_s() == 0.0
