"""The figures in the file that Weights & Biases writes for a run, offline too.

`run-<id>.wandb` is a log of LevelDB's format: blocks of 32 KiB with records of
``checksum (4 bytes), length (2), kind (1), data``, where a record that does not fit is
continued in the next block. The data are protocol buffers, for which the package itself
is needed. It has no reader of its own: it sends such a file to its server.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 1 << 15
_MAGIC = b":W&B"
_FILE_HEADER = 7
_RECORD_HEADER = 7
_FULL, _FIRST, _LAST = 1, 2, 4


def last_figures(path: Path) -> dict[str, Any]:
    """Settings and last figures of a run, by the names that they were logged under.

    A file whose end is missing, because the run still writes, is read as far as it
    goes.

    Raises:
        ValueError: It is no such file.
        ImportError: Weights & Biases is not installed.
    """
    # Its names are made when it is imported.
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    figures: dict[str, Any] = {}
    for data in _records(path):
        record = messages.Record()
        record.ParseFromString(data)
        for item in _items(record):
            name = item.key or "/".join(item.nested_key)
            figures[name] = json.loads(item.value_json)
    return figures


def _items(record: Any) -> list[Any]:
    return [
        *record.run.config.update,
        *record.config.update,
        *record.history.item,
    ]


def _records(path: Path) -> Iterator[bytes]:
    begun = b""
    for kind, part in _parts(path):
        begun = part if kind in (_FULL, _FIRST) else begun + part
        if kind in (_FULL, _LAST):
            yield begun


def _parts(path: Path) -> Iterator[tuple[int, bytes]]:
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        raise ValueError(f"{path} is no file of Weights & Biases")
    at = _FILE_HEADER
    while at + _RECORD_HEADER <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _RECORD_HEADER:  # too little for a header: zeros
            at += left
            continue
        length = int.from_bytes(content[at + 4 : at + 6], "little")
        end = at + _RECORD_HEADER + length
        if end > len(content):
            return
        yield content[at + 6], content[at + _RECORD_HEADER : end]
        at = end
