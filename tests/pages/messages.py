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


def warned() -> Iterator[str]:
    """The texts of warnings, but for those that an exception brings."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _name(node.func) in _WARN and node.args:
                text = _text(node.args[0])
                if text:
                    yield text


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def is_in(quote: str, text: str) -> bool:
    """Whether a text has all parts of a quote, in their order."""
    parts = [re.escape(part.strip()) for part in quote.split(GAP) if part.strip()]
    return bool(parts) and bool(re.search(".*".join(parts), text, re.S))


def is_said(quote: str, paths: Iterator[Path] | None = None) -> bool:
    """Whether one text of the code has all parts of a quote, in their order."""
    found = (text for path in paths or modules() for text in texts(path))
    return any(is_in(quote, text) for text in found)
