"""How often and how fast: budgets of bytes and of processor time."""

import pytest

from lightning_adpsgd import pacing
from lightning_adpsgd.pacing import CoreShare, Pacer


class Clock:
    """Stands in for `time` and for what the system says of the training thread."""

    def __init__(self) -> None:
        self.now = self.processor = self.queued = 100.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.processor

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
    cores = CoreShare(share=0.1)
    cores.watch_this_thread()
    monkeypatch.setattr(
        cores,
        "_look",
        lambda: pacing._Mark(clock.now, clock.processor, clock.queued),
    )
    cores._mark = cores._look()
    return cores


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
    assert cores.pause_s() == pytest.approx(0.035 / 0.1 / 0.5)
    clock.run(0.3, busy=0.5, queueing=0.5)
    assert cores.pause_s() == pytest.approx(0.4)
    clock.run(0.3, busy=0.5, queueing=0.0)  # the cores are free again
    cores.spent(0.01)
    assert cores.pause_s() == 0.0


def test_no_pause_is_longer_than_ten_seconds(clock: Clock, cores: CoreShare) -> None:
    clock.run(1.0, busy=0.5, queueing=0.5)
    cores.pause_s()
    cores.spent(1000.0)
    assert cores.pause_s() == pytest.approx(10.0)


def test_a_whole_share_is_no_bound(clock: Clock) -> None:
    cores = CoreShare(share=1.0)
    cores.watch_this_thread()
    cores.spent(1000.0)
    clock.run(1.0, busy=0.5, queueing=0.5)
    assert cores.pause_s() == 0.0
