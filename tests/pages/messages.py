"""What the code can say: its texts, with "..." for what is put into them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_adpsgd"
GAP = "..."
_WARN = ("warn", "rank_zero_warn")
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


@cache
def warned() -> tuple[str, ...]:
    """The texts of warnings, but for those that an exception brings."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in modules())
    calls = (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call))
    texts = (_text(c.args[0]) for c in calls if _name(c.func) in _WARN and c.args)
    return tuple(filter(None, texts))


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def is_in(quote: str, text: str) -> bool:
    """Whether a text has all parts of a quote, in their order."""
    parts = [part.strip() for part in quote.split(GAP) if part.strip()]
    # Nearly all texts lack the first part, which is cheaper to see than a pattern.
    if not parts or parts[0] not in text:
        return False
    return bool(re.search(".*".join(map(re.escape, parts)), text, re.S))


def is_said(quote: str, paths: Iterator[Path] | None = None) -> bool:
    """Whether one text of the code has all parts of a quote, in their order."""
    found = (text for path in paths or modules() for text in texts(path))
    return any(is_in(quote, text) for text in found)
