"""The draw of mutants is the same for a seed, and their trials are counted once."""

from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")

from tests.mutants import results
from tests.mutants.drawing import Mutant, draw, mutants_of
from tests.mutants.rooms import ROOMS
from tests.mutants.trials import Ended

SOURCE = '''"""A module."""
from typing import override


class Counter(Base):
    @override
    def add(self, number: int | None = None) -> int | None:
        """Adds a number, or 1."""
        if number is None:
            self.log("one")
        self.total = self.total + (number or 1)
        return self.total
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "counter.py").write_text(SOURCE)
    return tmp_path


def changed_lines(folder: Path) -> set[str]:
    """Every line that some mutant has and the module has not."""
    mutants = mutants_of(folder, Path("counter.py"))
    lines = (line for m in mutants for line in m.source(folder).splitlines())
    return {line.strip() for line in lines} - set(map(str.strip, SOURCE.splitlines()))


def test_a_mutant_is_one_change_of_an_operator(folder: Path) -> None:
    lines = changed_lines(folder)
    assert "if number is not None:" in lines
    assert "self.total = self.total - (number or 1)" in lines
    assert "self.total = self.total + (number and 1)" in lines
    assert "pass" in lines


def test_what_only_type_checkers_read_is_left_alone(folder: Path) -> None:
    assert not [line for line in changed_lines(folder) if "def add" in line]
    kept = [m.source(folder) for m in mutants_of(folder, Path("counter.py"))]
    assert all("@override" in source for source in kept)


def test_a_draw_depends_on_its_seed_and_takes_a_place_once(folder: Path) -> None:
    draws = [draw(folder, [Path("counter.py")], 4, seed) for seed in "001"]
    assert draws[0] == draws[1] != draws[2]
    places = [mutant.position for mutant in draws[0]]
    assert len(set(places)) == len(places) == 4


def test_no_room_lists_a_file_that_is_not_there() -> None:
    root = Path(__file__).parents[2]
    for room in ROOMS.values():
        assert room.source_files(root)
        assert room.test_files(root, Path("none"))


def test_every_file_of_these_folders_is_in_one_room() -> None:
    root = Path(__file__).parents[2]
    listed = [file for room in ROOMS.values() for file in room.source_files(root)]
    folders = {file.parent for file in listed} - {Path("lightning_adpsgd")}
    found = {path for folder in folders for path in (root / folder).glob("[!_]*.py")}
    assert {path.relative_to(root) for path in found} <= set(listed)
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize(
    ("outcomes", "first", "is_late_once"),
    [
        (["survived", "killed"], "survived", False),
        (["timed out"], "timed out", True),
        (["timed out", "survived"], "survived", False),
        (["timed out", "timed out"], "timed out", False),
        (["survived", "timed out"], "survived", True),
    ],
)
def test_one_trial_that_timed_out_says_nothing_yet(
    tmp_path: Path, outcomes: list[str], first: str, is_late_once: bool
) -> None:
    (tmp_path / "counter.py").write_text(SOURCE)
    mutant = draw(tmp_path, [Path("counter.py")], 1, "0")[0]
    for outcome in outcomes:
        results.write(tmp_path, tmp_path, "room", mutant, Ended(outcome, 1.0, ""))
    (result,) = results.read(tmp_path).values()
    assert (result.mutant, result.outcomes) == (mutant, outcomes)
    assert result.killer == []
    assert (result.first, result.last) == (first, outcomes[-1])
    assert result.is_late_once == is_late_once


def test_a_report_counts_a_mutant_once_and_shows_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "counter.py").write_text(SOURCE)
    mutants = draw(tmp_path, [Path("counter.py")], 3, "0")

    def tried(mutant: Mutant, outcome: str) -> None:
        results.write(tmp_path, tmp_path, "room", mutant, Ended(outcome, 1.0, ""))

    for mutant in mutants[1:]:
        tried(mutant, "survived")
    tried(mutants[0], "killed")
    tried(mutants[1], "killed")
    text = results.report(list(results.read(tmp_path).values()))
    assert "| room | 3 | 1 (33%) | 2 (67%) | 0 | 1 |" in text
    assert text.count("- `counter.py`") == 1
    assert f"line {mutants[2].position[0]}, {mutants[2].operator}" in text


def test_the_killer_is_the_test_that_has_failed_last(tmp_path: Path) -> None:
    (tmp_path / "counter.py").write_text(SOURCE)
    (mutant,) = draw(tmp_path, [Path("counter.py")], 1, "0")
    said = "FAILED tests/test_a.py::test_{}[1 x] - assert 1 == 2\n1 failed"
    for name in "ab":
        ended = Ended("killed", 1.0, said.format(name))
        results.write(tmp_path, tmp_path, "room", mutant, ended)
    (result,) = results.read(tmp_path).values()
    assert result.killer == ["tests/test_a.py::test_b"]
