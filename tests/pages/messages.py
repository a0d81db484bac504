"""What the code can say: its texts, with "..." for what is put into them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_adpsgd"
GAP = "..."
# `%s` and the like, of log messages.
_PLACE = re.compile(r"%\.?\d*[a-z]")


@cache
def texts(path: Path) -> tuple[str, ...]:
    """Every text of a module."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(text for node in nodes if (text := _text(node)))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _PLACE.sub(GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or GAP for part in node.values)
    return ""


def modules(folder: Path = PACKAGE) -> Iterator[Path]:
    """The modules whose texts are searched."""
    return (path for path in folder.rglob("*.py") if "asr" not in path.parts)


def is_said(quote: str, paths: Iterator[Path] | None = None) -> bool:
    """Whether one text of the code has all parts of a quote, in their order."""
    parts = [part.strip() for part in quote.split(GAP) if part.strip()]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.S)
    found = (text for path in paths or modules() for text in texts(path))
    return bool(parts) and any(pattern.search(text) for text in found)
