"""The code blocks of a page."""

import re
from pathlib import Path


def section(page: Path, title: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    text = page.read_text(encoding="utf-8")
    begin = re.search(rf"^(#+) {re.escape(title)}$", text, re.M)
    assert begin, f"{page} has no section {title!r}"
    rest = text[begin.end() :]
    end = re.search(rf"^#{{1,{len(begin[1])}}} ", without_code(rest), re.M)
    return rest[: end.start()] if end else rest


def without_code(text: str) -> str:
    """The same text, as long, with what is in code blocks blanked out."""
    blank = lambda found: re.sub(r"[^\n]", " ", found[0])  # noqa: E731
    return re.sub(r"^```.*?^```", blank, text, flags=re.M | re.S)


def programs(
    page: Path, title: str | None = None, language: str = "python"
) -> list[str]:
    """The blocks of a language, of a page or one of its sections."""
    text = section(page, title) if title else page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)
