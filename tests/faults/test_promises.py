"""Each promise about failures names tests, and the tests that are named are there."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "failures.md"
HEADING = "## Promises, compared with those of others"


@cache
def names_of_tests() -> frozenset[str]:
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return frozenset(n for text in texts for n in re.findall(r"def (test_\w+)", text))


def named_in(text: str) -> list[str]:
    """Names of tests as the page has them; one may end in "…"."""
    return re.findall(r"`(test_\w+…?)`", text)


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def is_there(name: str) -> bool:
    if not name.endswith("…"):
        return name in names_of_tests()
    return any(one.startswith(name[:-1]) for one in names_of_tests())


def test_every_test_that_is_named_is_there() -> None:
    named = set(named_in(PAGE.read_text()))
    assert named
    assert {name for name in named if not is_there(name)} == set()


def test_every_file_of_tests_that_is_named_is_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE.read_text()))
    assert named
    assert {path for path in named if not (ROOT / path).is_file()} == set()


def test_each_promise_names_a_test() -> None:
    _, _, rest = PAGE.read_text().partition(HEADING)
    promises = rows_of(rest.partition("\n## ")[0])[2:]
    assert len(promises) >= 8
    for promise in promises:
        assert named_in(promise), promise


def test_a_name_that_is_nobodys_would_be_found() -> None:
    assert not is_there("test_that_nobody_wrote")
    assert not is_there("test_that_nobody_…")
