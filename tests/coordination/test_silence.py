"""Who has given no sign of life for too long, by the looks of one that watches."""

from lightning_adpsgd.coordination.silence import SilenceWatch


def test_only_a_count_that_rises_shows_life() -> None:
    """An old one that somebody writes once more does not, nor one that is gone."""
    watch, told = SilenceWatch[str](silence_s=3.0), list[str]()
    later = [7, None, None, 8]
    for half_seconds in range(10):
        counts: dict[str, int | None] = {"rises": half_seconds}
        counts["old"] = 8 if half_seconds == 0 else later[half_seconds % 4]
        told = watch.look(counts, now=100 + half_seconds / 2)
    assert told == ["old"]


def test_who_comes_back_under_watch_is_measured_by_its_new_counts() -> None:
    """They began at 1 again, below what was seen before."""
    watch = SilenceWatch[str](silence_s=3.0)
    watch.look({"a": 50}, now=100.0)
    watch.look({}, now=100.5)
    for half_seconds in range(20):
        count = 1 + half_seconds
        assert watch.look({"a": count}, now=101 + half_seconds / 2) == []


def test_a_silence_of_just_the_bound_is_none() -> None:
    watch = SilenceWatch[str](silence_s=4.0)
    for second in range(5):
        assert watch.look({"a": 1}, now=100.0 + second) == []
    assert watch.look({"a": 1}, now=104.5) == ["a"]


def first_told(
    watch: SilenceWatch[str], counts: dict[str, int | None], begin: float
) -> float:
    """When a watch that looks each half second first tells of somebody."""
    looks = (begin + 0.5 * number for number in range(100))
    return next(now for now in looks if watch.look(counts, now))


def test_a_count_that_stands_still_for_too_long_is_told() -> None:
    watch = SilenceWatch[str](silence_s=3.0)
    assert watch.look({"a": 1, "b": 1}, now=100.0) == []
    assert first_told(watch, {"a": 2, "b": 1}, 100.5) == 103.5
    assert watch.look({"a": 3, "b": 1}, now=103.6) == ["b"]
    assert watch.look({"a": 3, "b": 2}, now=104.1) == []


def test_an_observer_that_was_away_itself_begins_to_count_anew() -> None:
    watch = SilenceWatch[str](silence_s=3.0)
    watch.look({"a": 1}, now=100.0)
    watch.forget()
    assert first_told(watch, {"a": 1}, 200.0) == 203.5


def test_a_machine_that_stood_still_finds_nobody_dead() -> None:
    """Whoever wakes first sees the counts of before, for a turn or two."""
    watch = SilenceWatch[str](silence_s=3.0)
    watch.look({"a": 1}, now=100.0)
    assert watch.look({"a": 1}, now=200.0) == []
    assert watch.look({"a": 1}, now=200.5) == []
    assert watch.look({"a": 2}, now=201.0) == []
    assert first_told(watch, {"a": 2}, 201.5) == 204.5


def test_who_was_not_watched_meanwhile_is_not_called_silent() -> None:
    watch = SilenceWatch[str](silence_s=3.0)
    watch.look({"a": 1}, now=100.0)
    watch.look({}, now=101.0)
    assert watch.look({"a": 1}, now=200.0) == []
