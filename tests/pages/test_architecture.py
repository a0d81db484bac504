"""docs/architecture.md names the rooms that there are, in the order of their floors."""

import itertools
import re
from pathlib import Path

from tests.pages.blocks import section
from tests.test_house import FLOORS

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_the_page_has_every_room_and_no_other() -> None:
    cells = re.findall(r"^\| (`[^|]+) \|", section(PAGE, "Rooms"), re.M)
    named = [room for cell in cells for room in re.findall(r"`(\w+)`", cell)]
    rooms = {room for floor in FLOORS for room in floor if room != "__main__"}
    assert len(named) == len(set(named))
    assert set(named) == rooms


def test_a_room_is_not_named_before_one_that_it_knows() -> None:
    cells = re.findall(r"^\| (`[^|]+) \|", section(PAGE, "Rooms"), re.M)
    floor_of = {room: n for n, floor in enumerate(FLOORS) for room in floor}
    levels = [{floor_of[r] for r in re.findall(r"`(\w+)`", cell)} for cell in cells]
    assert [min(level) for level in levels] == sorted(min(level) for level in levels)
    assert all(max(lower) <= min(upper) for lower, upper in itertools.pairwise(levels))
