"""Figures of the README and of pages with results are those of the committed files."""

import json
from pathlib import Path

import pytest

from tests.figures import ROOT, Marked, complaint, figures_in, is_rounded, marked
from tests.pages.blocks import section
from tests.pages.tables import sections

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
    pages = (
        page for room in ("docs", "recipes") for page in (ROOT / room).rglob("*.md")
    )
    found = [
        f"{page.name}, line {stretch.line}: {wrong}"
        for page in [README, *sorted(pages)]
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
    (tmp_path / "some.md").write_text(PAGE, encoding="utf-8")
    return tmp_path


PAGE = """\
# Results

Loss 1.94 [1.90, 2.00] of `ddp`,
12 % worse.

## Speech, clipped

A clipped one has 1.95, not 11.95.

| loss | batch 64 | ratio, 10% |
|---|---|---|
| `ddp` | 1.21 [1.18, 1.24] @ 0.5 | 1 |
| adpsgd; alone | 1.35, 1.37 | 0.67 [0.61, 0.77] |
| twice | 1.55 | 0.91 |

| seed | method | batch 64 |
|---|---|---|
| 1 | ddp | 1.31 |
| 2 | ddp | 1.41 |
| twice | | 1.65 |

### Below

Loss 1.97.

## Speech, clipped

Loss 1.99.
"""


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
        '1.94 [1.90, 2.00], and 12 % <!-- some.md#results: "Loss 1.94 [1.90, 2.00]"; '
        '"of ddp, 12 % worse" -->',
        '1.9 <!-- some.md#speech-clipped: "one has 1.95" -->',
        "1.21 [1.18, 1.24] <!-- some.md#speech-clipped: batch 64 where ddp -->",
        "1.2 <!-- some.md#speech-clipped: batch 64 where ddp -->",
        "1.21 and 0.67 within 10 % <!-- some.md#speech-clipped: batch 64 where ddp; "
        "ratio, 10% where adpsgd, alone -->",
        "1.21, 1.18 <!-- some.md#speech-clipped: batch 64 where ddp; "
        "batch 64[2] where ddp -->",
        "1.35 and 1.37 <!-- some.md#speech-clipped: batch 64 where adpsgd, alone -->",
        "1.41, 1.31 <!-- some.md#speech-clipped: batch 64 where 2, ddp; "
        "batch 64 where 1 -->",
        "1.37 <!-- some.md#speech-clipped: batch 64[2] where adpsgd, alone -->",
        "Within 10 % none <!-- some.md#speech-clipped: ratio, 10% where ddp -->",
        '1.97 <!-- some.md#below: "Loss 1.97" -->',
        '1.99 <!-- some.md#speech-clipped-1: "Loss 1.99" -->',
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
        ("1.94 <!-- some.md -->", "does not say where"),
        ("1.94 <!-- some.md#results -->", "does not say where"),
        ('1.94 <!-- some.md#results: "--x 1.94" -->', "no mark"),
        ('1.94 <!-- some.md: "Loss 1.94" -->', "does not say where"),
        ('1.94 <!-- some.md#gone: "Loss 1.94" -->', "no some.md#gone"),
        ("1.95 <!-- gone.md -->", "no gone.md"),
        ("1.95 <!-- not compared -->", "does not say why"),
    ],
)
def test_other_figures_are_told(text: str, complaint_: str, root: Path) -> None:
    (found,) = said(text, root)
    assert complaint_ in found


HERE = "some.md#speech-clipped"
CELL = "batch 64 where ddp"


@pytest.mark.parametrize(
    ("text", "complaint_"),
    [
        pytest.param(f"1.22 <!-- {HERE}: {CELL} -->", "['1.22'] are not", id="digit"),
        pytest.param(f"1.18 <!-- {HERE}: {CELL} -->", "['1.18'] are not", id="end"),
        pytest.param(f"1.210 <!-- {HERE}: {CELL} -->", "['1.210'] are not", id="finer"),
        pytest.param(f"1.35 <!-- {HERE}: {CELL} -->", "['1.35'] are not", id="row"),
        pytest.param(f"0.67 <!-- {HERE}: {CELL} -->", "['0.67'] are not", id="column"),
        pytest.param(f"1.97 <!-- {HERE}: {CELL} -->", "['1.97'] are not", id="section"),
        pytest.param(f"1.21 % <!-- {HERE}: {CELL} -->", "are not", id="unit"),
        pytest.param(
            f"1.21 [1.18, 1.25] <!-- {HERE}: {CELL} -->", "'1.25'] are", id="interval"
        ),
        pytest.param(
            f"1.21, 1.18 <!-- {HERE}: {CELL} -->", "['1.18'] are", id="half an interval"
        ),
        pytest.param(f"1.21, 1.35 <!-- {HERE}: {CELL} -->", "['1.35'] are", id="more"),
        pytest.param(
            f"1.21 within 15 % <!-- {HERE}: {CELL}; ratio, 10% where ddp -->",
            "['15 %'] are not among",
            id="margin",
        ),
        pytest.param(
            f"0.67, 1.21 <!-- {HERE}: {CELL}; ratio, 10% where adpsgd, alone -->",
            "['0.67', '1.21'] are not",
            id="order",
        ),
        pytest.param(
            f"1.21 <!-- {HERE}: {CELL}; ratio, 10% where adpsgd, alone -->",
            "[] are not",
            id="fewer",
        ),
        pytest.param(
            f"1.31 <!-- {HERE}: batch 64 where 3, ddp -->", "not exactly one", id="none"
        ),
        pytest.param(
            f"1.55 <!-- {HERE}: batch 64 where twice -->", "not exactly one", id="two"
        ),
        pytest.param(
            f"1.21 <!-- {HERE}: batch 65 where ddp -->", "not exactly one", id="head"
        ),
        pytest.param(f"1.21 <!-- {HERE}: batch 64 -->", "not exactly one", id="no row"),
    ],
)
def test_figures_of_another_place_in_a_page_are_told(
    text: str, complaint_: str, root: Path
) -> None:
    (found,) = said(text, root)
    assert complaint_ in found


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        pytest.param("1.96", "one has 1.95", id="digit"),
        pytest.param("1.95", "has 1.95, not 11.95", id="one is missing"),
        pytest.param("1.95, 11.95", "has 1.95", id="one too many"),
        pytest.param("1.95", "1.95", id="no words"),
        pytest.param("1.95", "not 1.95", id="a part of a number"),
        pytest.param("1.9", "one has 1.9", id="the beginning of one"),
        pytest.param("1.21", "ddp 1.21", id="in a table"),
        pytest.param("1.94", "Loss 1.94", id="in another section"),
        pytest.param("1.97", "Loss 1.97", id="in one below"),
    ],
)
def test_words_that_a_section_does_not_have_are_told(
    figures: str, words: str, root: Path
) -> None:
    assert len(said(f'{figures} <!-- {HERE}: "{words}" -->', root)) == 1


def test_the_anchor_of_a_heading_is_that_of_its_link() -> None:
    text = "# A\n\n## 2026-11-26: is `x=1` 5 %, or not?\na\n```\n# no\n```\n## A\nb\n"
    found = sections(text)
    assert list(found) == ["a", "2026-11-26-is-x1-5--or-not", "a-1"]
    assert found["a-1"] == "\nb\n"


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
