"""The page: one HTML file with its data, its style and its program."""

import datetime
import html
import json
from importlib.resources import files
from pathlib import Path

from lightning_adpsgd.files import written_whole
from lightning_adpsgd.report.collect import Report
from lightning_adpsgd.report.reading import plain

_PROGRAM = ("marks.js", "curves.js", "chart.js", "lanes.js", "words.js", "page.js")


def write_page(report: Report, path: Path, title: str | None = None) -> None:
    """Writes the page that `page_of` makes, whole or not at all."""
    text = page_of(report, title)
    with written_whole(path) as file:
        file.write(text)


def page_of(report: Report, title: str | None = None) -> str:
    """The HTML page of a report; its default title is that of a `*.page.json`."""
    named = (notes["title"] for notes in report.notes if notes.get("title"))
    heading: str = title or next(named, "Training report")
    written = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    data = {"title": heading, "written": written, **vars(report)}
    content = json.dumps(plain(data), allow_nan=False, separators=(",", ":"))
    parts = {
        "TITLE": html.escape(heading, quote=False),
        "STYLE": _asset("page.css"),
        "PROGRAM": "\n".join(map(_asset, _PROGRAM)),
        # The last one, because the data may contain the other placeholders.
        # It has no "<", which could end its HTML element.
        "DATA": content.replace("<", "\\u003c"),
    }
    text = _asset("page.html")
    for name, part in parts.items():
        before, after = text.split(f"<!--{name}-->", 1)
        text = before + part + after
    return text


def _asset(name: str) -> str:
    return (files(__package__ or "") / "assets" / name).read_text(encoding="utf-8")
