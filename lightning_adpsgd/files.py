"""Files that are never seen half written."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def written_whole(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """A file to write text into, UTF-8, that becomes `path` at the end.

    After an error or a kill `path` is what it was before. Several processes may write
    the same one; the last stays.

    Args:
        path: In a folder that exists.
        newline: As for `open`; "" for CSV.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w", newline=newline, encoding="utf-8") as file:
        yield file
    os.replace(partial, path)


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, whole or not at all."""
    with written_whole(path) as file:
        json.dump(value, file, indent=1)
