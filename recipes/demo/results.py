"""What the runs of a demo came to, and the table of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.switchboard.metrics import Row, read_rows
from recipes.switchboard.settings import Settings


@dataclass(frozen=True)
class Wer:
    """Word errors of one test part.

    Attributes:
        words: Words of the reference.
        substitutions: Words taken for others.
        deletions: Words missed.
        insertions: Words that nobody said.
    """

    words: int
    substitutions: int
    deletions: int
    insertions: int

    @property
    def rate(self) -> float:
        """Errors per word of the reference."""
        errors = self.substitutions + self.deletions + self.insertions
        return errors / self.words if self.words else float("nan")


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        name: Of the run.
        wer: By test part ("swb", "ch").
        summary: What `summary.json` of the training holds; empty without training.
        rows: The rows of its `metrics.csv`.
    """

    name: str
    wer: Mapping[str, Wer]
    summary: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Row] = ()


def read_result(settings: Settings) -> Result:
    """The result of the run `settings.run`, from its finished stages."""
    trained = settings.directory("train")
    wer = read_wer(settings.directory("score") / "score.json")
    if not (trained / "summary.json").exists():
        return Result(settings.run, wer)
    summary = json.loads((trained / "summary.json").read_text())
    return Result(settings.run, wer, summary, read_rows(trained / "metrics.csv"))


def read_wer(path: Path) -> dict[str, Wer]:
    """Word errors by part, as the stage `score` wrote them."""
    parts = json.loads(path.read_text())
    return {
        part: Wer(
            counts["words"],
            counts["substitutions"],
            counts["deletions"],
            counts["insertions"],
        )
        for part, counts in parts.items()
    }


def table(results: Sequence[Result]) -> list[list[str]]:
    """Header and one line per run, all text; "-" where a run has no such figure."""
    parts = list(dict.fromkeys(part for result in results for part in result.wer))
    header = [
        "run",
        *(f"WER {part.upper()}" for part in parts),
        "frame loss",
        "frame accuracy",
        "samples/s",
        "exposed comm.",
        "consensus dist.",
        "training",
    ]
    return [header, *(_line(result, parts) for result in results)]


def _line(result: Result, parts: Sequence[str]) -> list[str]:
    figures = result.summary
    wers = [_text(result.wer[p].rate, ".2%") if p in result.wer else "-" for p in parts]
    return [
        result.name,
        *wers,
        _text(figures.get("frame_loss"), ".3f"),
        _text(figures.get("frame_accuracy"), ".1%"),
        _text(figures.get("samples_per_second"), ".0f"),
        _text(figures.get("exposed_fraction"), ".1%"),
        _text(figures.get("consensus_distance"), ".3g"),
        _text(figures.get("train_seconds"), ".0f", " s"),
    ]


def _text(value: float | None, style: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{style}}{unit}"


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """The table for a screen; columns as wide as their widest cell."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([padded[0], "-" * len(padded[0]), *padded[1:]])
