"""Offline runs of Weights & Biases, read by the format and messages of its package."""

import importlib
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HEAD, _BLOCK = 7, 32768
_WHOLE, _FIRST, _LAST = 1, 2, 4


class OfflineRun(NamedTuple):
    """What one offline run would send to the server.

    Attributes:
        id: Identifier, shared by the parts of one run.
        group: Group of runs.
        tags: Tags.
        config: Configuration.
        rows: Figures that were logged together.
        axes: X axis of each figure or group of figures, "" for one that is an axis.
        files: Names of tables, pages and sounds in its folder.
    """

    id: str
    group: str
    tags: list[str]
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    axes: dict[str, str]
    files: list[str]

    def last(self, name: str) -> Any:
        """The last value of a figure."""
        return [row[name] for row in self.rows if name in row][-1]


def read_offline_run(folder: Path, timeout: float = 30) -> OfflineRun:
    """The run in a folder `offline-run-*`, which is finished within `timeout` s."""
    records = _finished(folder, timeout)
    run = next(record.run for record in records if record.HasField("run"))
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    for record in records:
        changed = [*record.config.update]
        config |= {_name(item): json.loads(item.value_json) for item in changed}
    rows = [
        {_name(item): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    metrics = [record.metric for record in records if record.HasField("metric")]
    axes = {one.name or one.glob_name: one.step_metric for one in metrics}
    files = [p.relative_to(folder).as_posix() for p in folder.rglob("media/**/*.*")]
    return OfflineRun(
        run.run_id, run.run_group, [*run.tags], config, rows, axes, sorted(files)
    )


def _finished(folder: Path, timeout: float) -> list[Any]:
    """The messages of a run, when a process of wandb has written the last one."""
    # Its types are made when it is imported.
    Record: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    deadline = time.monotonic() + timeout
    while True:
        contents = [path.read_bytes() for path in folder.glob("*.wandb")]
        records = [Record.FromString(r) for c in contents for r in _records(c)]
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < deadline, f"{folder}: {len(records)} messages"
        time.sleep(0.2)


def _name(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _records(content: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, of which blocks hold whole or cut ones."""
    assert content[:4] == b":W&B"[: len(content)]
    at, parts = _HEAD, bytearray()
    while at + _HEAD <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + _HEAD])
        begin = at + _HEAD
        at = begin + length
        if at > len(content):
            return  # being written
        parts += content[begin:at]
        if kind in (_WHOLE, _LAST):
            yield bytes(parts)
            parts.clear()
