"""Every message that the page of speech explains is one that a stage can say."""

import re
from pathlib import Path

from tests.pages.messages import is_said

ROOT = Path(__file__).parents[2]
HEAD = "| message | cause and remedy |\n|---|---|\n"


def test_every_quoted_message_is_one_of_the_stages() -> None:
    page = (ROOT / "docs/speech.md").read_text(encoding="utf-8")
    table = page.partition(HEAD)[2].partition("\n\n")[0]
    quotes = re.findall(r"^\| `(.+?)` \|", table, re.M)
    assert len(quotes) == len(table.splitlines()) > 10
    folders = (ROOT / "lightning_adpsgd/asr", ROOT / "recipes/hybrid")
    modules = [path for folder in folders for path in folder.rglob("*.py")]
    assert [quote for quote in quotes if not is_said(quote, iter(modules))] == []
