"""Every message that docs/faq.md quotes is one that the code can say."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.pages.messages import is_in, is_said, warned

PAGE = Path(__file__).parents[2] / "docs" / "faq.md"
CODE = re.compile(r"(`+)(.+?)\1(?!`)", re.S)
# What Lightning says, and where.
FOREIGN = {
    "You selected an invalid strategy name": (
        "lightning.pytorch",
        "trainer/connectors/accelerator_connector.py",
    ),
    "is not compatible with an interactive environment": (
        "lightning.pytorch",
        "trainer/connectors/accelerator_connector.py",
    ),
    "process ... terminated with exit code": ("torch.multiprocessing", "spawn.py"),
    "process ... terminated with signal": ("torch.multiprocessing", "spawn.py"),
}


def quotes(page: str) -> list[str]:
    """What headings of messages, and the paragraphs "Also:" below them, quote."""
    found = re.findall(r"^### (.+)$|^Also: ((?:.+\n)+)", page, re.M)
    return [
        " ".join(code.split())
        for heading, also in found
        for _, code in CODE.findall(heading or also)
    ]


QUOTES = quotes(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_quotes_in_headings_and_below_them() -> None:
    text = "### `` a `b` c ``\n\nAlso: `d`,\n`e`\n\nText `f`.\n"
    assert quotes(text) == ["a `b` c", "d", "e"]
    assert len(QUOTES) > 80


def test_no_message_is_explained_twice() -> None:
    assert len(QUOTES) == len(set(QUOTES))


def test_every_quoted_message_is_one_of_the_codes() -> None:
    own = [quote for quote in QUOTES if quote not in FOREIGN]
    assert [quote for quote in own if not is_said(quote)] == []


def test_every_warning_is_explained() -> None:
    told = lambda warning: any(is_in(quote, warning) for quote in QUOTES)  # noqa: E731
    assert [warning for warning in warned() if not told(warning)] == []


def test_a_warning_that_the_page_lacks_would_be_told() -> None:
    assert len(warned()) > 10
    assert not any(is_in(quote, "the moon is full") for quote in QUOTES)


@pytest.mark.parametrize("quote", FOREIGN)
def test_a_message_of_lightnings_is_one_of_its_own(quote: str) -> None:
    package, name = FOREIGN[quote]
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert is_said(quote, iter([Path(spec.origin).parent / name]))


def test_a_text_that_no_module_has_is_not_said() -> None:
    assert not is_said("this sentence is in no module")
    assert not is_said("got ... lost ... zebra")
    assert not is_said("...")
