"""What the long run of faults reads from the journals of its learners."""

import json
from pathlib import Path

import pytest

from benchmarks import page, results, soak, step_journal
from benchmarks.history import Fault
from benchmarks.step_journal import Entry, Journal, Life

STEP_S = 0.5


def life(
    begin: float, end: float, members: float = 3, later: float = 0, since: float = 1e9
) -> Life:
    """Steps in even distances, with another number of members from some time on."""
    times = [begin + STEP_S * k for k in range(round((end - begin) / STEP_S))]
    return [Entry(t, later if t >= since else members, 1.0, 1e6 * t) for t in times]


def test_a_diary_is_read_back_and_what_a_kill_has_torn_is_left_out(
    tmp_path: Path,
) -> None:
    entries = life(0, 3)
    for number in (0, 10, 2):  # the lives are in the order of their numbers
        journal = Journal(tmp_path, 4, number)
        for entry in entries[: number + 1]:
            journal.write(entry)
    path = tmp_path / "4.10.journal"
    path.write_bytes(path.read_bytes() + b"torn")
    assert step_journal.read(tmp_path, 4) == [entries[:1], entries[:3], entries]
    assert step_journal.read(tmp_path, 1) == []
    assert step_journal.last(tmp_path, 4) == entries[-1]
    assert step_journal.last(tmp_path, 1) is None


def test_a_gap_is_that_of_a_learner_that_did_not_suffer_itself() -> None:
    steps = [entry for entry in life(0, 40) if not 20 < entry.time < 27]
    assert max(step_journal.gaps(steps, [])) == 7.0
    assert max(step_journal.gaps(steps, [(19.9, 27.5)])) == STEP_S
    assert max(step_journal.gaps(steps, [(1.0, 2.0)])) == 7.0


def test_a_death_is_known_when_the_last_one_knows_of_it() -> None:
    lives = [[life(0, 60, 3, 2, 20.5)], [life(0, 60, 3, 2, 23)], [life(0, 20)]]
    assert step_journal.detection(lives, [2], 20.1) == pytest.approx(2.9)


def test_a_death_that_somebody_does_not_show_has_no_time() -> None:
    lives = [[life(0, 60, 3, 2, 20.5)], [life(0, 60)], [life(0, 20)]]
    assert step_journal.detection(lives, [2], 20.1) is None
    assert step_journal.detection(lives, [0, 1, 2], 20.1) is None


def test_who_goes_at_the_same_time_is_not_asked() -> None:
    lives = [[life(0, 60, 3, 2, 21)], [life(0, 22)], [life(0, 20)]]
    assert step_journal.detection(lives, [2], 20.1) == pytest.approx(0.9)


def test_a_death_beside_which_another_joins_has_no_time() -> None:
    lives = [[life(0, 60, 3, 2, 28)], [life(21.5, 60)], [life(0, 20)]]
    assert step_journal.detection(lives, [2], 20.1) is None


def test_memory_grows_from_after_the_start_to_the_end() -> None:
    grown = step_journal.growth(life(0, 300), settled_s=60)
    # Medians of 30 s ... 60 s, and of 240 s ... 300 s, at a megabyte a second.
    assert grown == pytest.approx(1e6 * (270 - 45), rel=0.01)
    assert step_journal.growth(life(0, 100), settled_s=60) is None


def test_figures_are_those_of_all_lives() -> None:
    lives = [
        [life(0, 120, 3, 2, 50.5)],
        [life(0, 120, 3, 2, 51)],
        [life(0, 50), life(70, 120)],
    ]
    found = soak.figures(lives, [Fault("kill", (2,), 50.2, 60.0)])
    of_each = soak.series(lives)
    assert of_each["lives of each"] == [1, 1, 2]
    assert of_each["steps of each"] == [240, 240, 200]
    closed = found["seconds from kill to closed ring"]
    assert closed == {
        "faults": 1,
        "seen": 1,
        "median": pytest.approx(0.8),
        "largest": pytest.approx(0.8),
    }
    assert found["seconds between steps, largest"] == STEP_S
    assert of_each["members that learner 0 knew of, each 10 s"][4:7] == [3, 3, 2]
    assert of_each["loss of learner 0 by minute"] == [1.0, 1.0]


def test_the_page_of_results_shows_a_long_run(tmp_path: Path) -> None:
    path = results.ROOT / "benchmarks" / "results" / "soak.json"
    text = page.render([json.loads(path.read_text())], tmp_path)
    assert "| seconds from kill to closed ring, largest |" in text
