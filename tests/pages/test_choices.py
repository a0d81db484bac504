"""The tables of docs/which-mode.md and docs/tuning.md are those of code and results."""

import re
from pathlib import Path

import pytest

from lightning_adpsgd.strategy.names import NAMES
from tests.pages.blocks import section
from tests.test_figures import complaints

DOCS = Path(__file__).parents[2] / "docs"
WHICH = DOCS / "which-mode.md"


@pytest.mark.parametrize("page", ["which-mode.md", "tuning.md"])
def test_every_figure_of_a_page_is_in_a_committed_file(page: str) -> None:
    assert complaints((DOCS / page).read_text(encoding="utf-8")) == []


def test_the_table_of_names_has_every_name_of_the_strategy() -> None:
    table = section(WHICH, "The names")
    assert set(re.findall(r'^\| `"(\w+)"`', table, re.M)) == {"ddp", *NAMES}


def test_the_table_of_names_says_what_a_name_sets() -> None:
    rows = re.findall(r'^\| `"(\w+)"` \|(.+)$', section(WHICH, "The names"), re.M)
    sizes = {name: cells.split("|")[2].strip() for name, cells in rows if name in NAMES}
    assert {name for name, size in sizes.items() if size == "1"} == {
        name for name, dials in NAMES.items() if dials["super_learner_size"] == 1
    }
    rings = {name for name, cells in rows if cells.strip().startswith("ring")}
    assert rings - {"ddp"} == {
        name for name, dials in NAMES.items() if "ring" in dials["topology"]
    }


def test_a_decision_names_only_modes_that_there_are() -> None:
    table = section(WHICH, "The decision").partition("\n\n`")[0]
    named = set(re.findall(r'`"(\w+)"`', table))
    assert named <= {"ddp", "sync", "random_ring", *NAMES}
    assert {"ddp", "adpsgd", "hadpsgd", "rdpsgd"} <= named
