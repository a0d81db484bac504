"""A wait tells of itself after twice the time each time, and ends with a remedy."""

import logging

import pytest

from lightning_adpsgd.islands import waiting
from lightning_adpsgd.islands.waiting import Wait
from tests.islands.archipelago import still_clock


@pytest.mark.parametrize(
    ("usual_s", "expected"), [(0.0, [2.0, 4.0, 8.0, 16.0]), (6.0, [8.0, 16.0])]
)
def test_a_wait_is_told_after_twice_the_time_each_time(
    usual_s: float,
    expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    clock = still_clock(monkeypatch, waiting)
    looks = list[float]()

    def look() -> None:
        looks.append(clock.now)

    wait = Wait("the sun", "wind the clock", 30.0, look, usual_s)
    told = list[float]()
    while clock.now < 130:
        clock.now += 0.5
        wait.go_on("it is night")
        told += [clock.now - 100] * (len(caplog.records) - len(told))
    assert told == expected
    assert "waited 16 s for the sun, and waits at most 30 s (" in caplog.text
    clock.now += 0.5
    with pytest.raises(RuntimeError, match=r"30 s for the sun \(it is night\).*wind"):
        wait.go_on("it is night")
    assert len(looks) == 61
