"""Figures of the README and of pages with results are those of the committed files."""

import json
from pathlib import Path

import pytest

from tests.figures import ROOT, Marked, complaint, figures_in, is_rounded, marked
from tests.pages.blocks import section

README = ROOT / "README.md"


def complaints(text: str, first_line: int = 1) -> list[str]:
    return [
        f"line {stretch.line}: {found}"
        for stretch in marked(text, first_line)
        if (found := complaint(stretch))
    ]


def test_every_figure_with_which_the_readme_claims_is_in_a_committed_file() -> None:
    text = README.read_text(encoding="utf-8")
    for claims in (
        text.partition("\n## ")[0],
        section(README, "What you gain"),
        section(README, "Results"),
    ):
        first_line = 1 + text[: text.index(claims)].count("\n")
        assert complaints(claims, first_line) == []


@pytest.mark.parametrize("page", ["evidence", "results"])
def test_every_figure_of_a_page_with_results_is_in_a_committed_file(page: str) -> None:
    assert complaints((ROOT / "docs" / f"{page}.md").read_text()) == []


def test_what_any_page_marks_is_in_the_file_that_it_names() -> None:
    """Other pages need no marks, but those that they have must hold."""
    found = [
        f"{page.name}, line {stretch.line}: {wrong}"
        for page in [README, *sorted((ROOT / "docs").rglob("*.md"))]
        for stretch in marked(page.read_text(encoding="utf-8"))
        if stretch.source is not None and (wrong := complaint(stretch))
    ]
    assert found == []


# --- what a mark can say


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rows = [
        {
            "case": {"method": name},
            "table": "speeds",
            "value": {"median": value, "low": value - 1, "high": value + 1},
            "ratio": value / 4,
            "details": {"MB a step": 0.5},
        }
        for name, value in (("ddp", 4.0), ("adpsgd", 3.96), ("adpsgd, x=1", 2.0))
    ]
    (tmp_path / "some.json").write_text(json.dumps({"rows": rows, "longest": 2.5}))
    (tmp_path / "some.md").write_text("Loss 1.94 [1.90, 2.00], 12 % worse.\n")
    return tmp_path


def said(text: str, root: Path) -> list[str]:
    return [found for stretch in marked(text) if (found := complaint(stretch, root))]


@pytest.mark.parametrize(
    "text",
    [
        "It keeps 0.99 <!-- some.json: ratio where method=adpsgd -->.",
        "It keeps 99 % <!-- some.json: ratio where method=adpsgd -->.",
        "1.00, 0.99 and 0.5 <!-- some.json: ratio where table=speeds -->",
        "4.0 [3.0, 5.0] <!-- some.json: value where method=ddp; "
        "low where method=ddp; high where method!=adpsgd, method!=adpsgd, x=1 -->",
        "0.5 <!-- some.json: ratio where method=adpsgd, x=1, table=speeds -->",
        "2.5 s <!-- some.json: longest -->, 0.50 MB "
        "<!-- some.json: details.MB a step where method=ddp -->",
        "1.94 and 12 % <!-- some.md -->",
        "7.25 <!-- not compared: a paper -->",
        "`x=0.1`, 1907.05701, torch 2 and [this](a-0.5.md) are no figures",
    ],
)
def test_figures_that_a_file_holds_are_accepted(text: str, root: Path) -> None:
    assert said(text, root) == []


@pytest.mark.parametrize(
    ("text", "complaint_"),
    [
        ("0.98 <!-- some.json: ratio where method=adpsgd -->", "0.98 for 0.99"),
        ("0.99 <!-- some.json: ratio where table=speeds -->", "not as many"),
        ("0.99 <!-- some.json: ratio where method=gone -->", "not as many"),
        ("0.99", "no mark"),
        ("0.99 <!-- some.json: ratio where method=adpsgd -->, 0.5", "no mark"),
        ("1.95 <!-- some.md -->", "not in some.md"),
        ("1.95 <!-- gone.md -->", "no gone.md"),
        ("1.95 <!-- not compared -->", "does not say why"),
    ],
)
def test_other_figures_are_told(text: str, complaint_: str, root: Path) -> None:
    (found,) = said(text, root)
    assert complaint_ in found


def test_figures_are_numbers_with_a_point_and_percentages() -> None:
    text = "From -0.32 [-0.56, 0.02] to 99 %, 2.5 % and 1.5; 16 learners, 2026-11-22."
    assert figures_in(text) == ["-0.32", "-0.56", "0.02", "99 %", "2.5 %", "1.5"]


def test_a_figure_is_rounded_to_its_own_digits() -> None:
    assert is_rounded("0.99", 0.9949)
    assert not is_rounded("0.99", 0.9951)
    assert is_rounded("99 %", 0.9949)
    assert is_rounded("3", 3.4)


def test_a_mark_speaks_for_its_line_alone() -> None:
    stretches = list(marked("0.5\n0.7 <!-- some.md -->", first_line=7))
    assert stretches == [
        Marked(7, ["0.5"], None, ""),
        Marked(8, ["0.7"], "some.md", ""),
    ]
