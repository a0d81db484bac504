"""The report of a benchmark, and its file in `results/`.

A benchmark is a module of this folder with `measure`, which returns a `Report` or, in
simple cases, a dictionary of figures. The file has that result with the date, commit,
machine and command. It is written whole or not at all.
"""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Spread
from lightning_adpsgd.files import written_whole

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        case: What was measured, from the general to the particular; the same keys in
            every row of a table.
        value: Median and quartiles.
        unit: Unit of the value.
        ratio: Ratio to a physical limit or a control, if any.
        ratio_to: Reference of `ratio`, if not the report's `limit`.
        table: Rows of one table stand together on the page.
        details: Further figures of the same measurement, by name with unit.
    """

    case: Mapping[str, str | float]
    value: Spread
    unit: str
    ratio: float | None = None
    ratio_to: str = ""
    table: str = ""
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A bound that was set beforehand, and its result."""

    claim: str
    bound: float
    value: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Whether the value keeps the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass(frozen=True)
class Curve:
    """Loss against time.

    Args:
        panel: Panel that the curve is drawn in.
        label: Label of the curve.
        seconds: Times from the start.
        losses: Losses at these times; None where one was not finite.
    """

    panel: str
    label: str
    seconds: Sequence[float]
    losses: Sequence[float | None]


@dataclass
class Report:
    """The findings of a benchmark.

    Args:
        question: What it measures, in a sentence.
        limit: Reference of the ratios.
        rows: The figures.
        targets: Bounds set beforehand.
        skipped: Missing measurements, with their reasons.
        notes: How to read the figures.
        curves: Curves for a plot.
    """

    question: str
    limit: str
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The content of the file, in plain values."""
        rows = [
            {**asdict(row), "value": row.value._asdict(), "details": {**row.details}}
            for row in self.rows
        ]
        targets = [{**asdict(target), "met": target.met} for target in self.targets]
        return {**asdict(self), "rows": rows, "targets": targets}


def write(
    name: str, report: Report | Mapping[str, Any], command: str, seconds: float
) -> Path:
    """Writes `results/<name>.json`, whole or not at all, and returns its path."""
    found = report.as_dict() if isinstance(report, Report) else dict(report)
    content = {"benchmark": name, **circumstances(command, seconds), **found}
    path = RESULTS / f"{name}.json"
    with written_whole(path) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    return path


def circumstances(command: str, seconds: float) -> dict[str, Any]:
    """Date, commit, machine and command; no name of a machine and no path."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": machine(),
        "command": command,
        "seconds": round(seconds, 1),
    }


def machine() -> dict[str, Any]:
    """The properties of the machine that the figures depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "gpu": gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    models = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return models[0].strip() if models else platform.machine()


def commit() -> str:
    """The short name of the commit, with "+" if files were changed since."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":!*.json")
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + (
        "+" if changed else ""
    )


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
