"""The draw of mutants: the same for a seed, and never what only type checkers read."""

from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")

from tests.mutants.drawing import draw, mutants_of
from tests.mutants.rooms import ROOMS

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
