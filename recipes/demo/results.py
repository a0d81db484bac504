"""The results of a demo's runs, and their table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_adpsgd.asr.scoring import Errors
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.training.beside import is_quiet
from recipes.hybrid.training.metrics import Row, read_rows

_Figures = Mapping[str, float | None]
_RATES = ("wer", "wer_low", "wer_high")
_SPEEDS = ("samples_per_second", "exposed_fraction", "train_seconds")


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        name: name of the run.
        errors: errors by test part ("SWB", "CH", "total").
        frame_accuracy: share of right frames in whole utterances of held-out speakers.
        summary: contents of the training's `summary.json`; empty without training.
        rows: rows of its `metrics.csv`.
        words: rates of all test words: `wer`, and the ends of the interval that holds
            95 % of a bootstrap over speakers, `wer_low` and `wer_high`.
        against: matched-pairs tests against other runs, by their names.
    """

    name: str
    errors: Mapping[str, Errors]
    frame_accuracy: float
    summary: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Row] = ()
    words: _Figures = field(default_factory=dict)
    against: Mapping[str, _Figures] = field(default_factory=dict)


def read_baseline(settings: Settings) -> Result:
    """The result of the model that made the alignment."""
    score = _read(settings.directory("baseline") / "score.json")
    accuracy = score["frame_accuracy"]
    return Result("gmm", _errors(score), accuracy, words=_words(score))


def read_result(settings: Settings) -> Result:
    """The result of the training run `settings.run`, from its finished stages."""
    score = _read(settings.directory("score") / "score.json")
    trained = settings.directory("train")
    return Result(
        settings.run,
        _errors(score),
        score["frame_accuracy"],
        _read(trained / "summary.json"),
        read_rows(trained / "metrics.csv"),
        _words(score),
        score["compared"],
    )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _errors(score: dict[str, Any]) -> dict[str, Errors]:
    return {
        part: Errors(**{name: counts[name] for name in Errors._fields})
        for part, counts in score["parts"].items()
    }


def _words(score: dict[str, Any]) -> _Figures:
    return {name: score["parts"]["total"][name] for name in _RATES}


def table(results: Sequence[Result]) -> list[list[str]]:
    """Header and one line per run, all text; "-" where a run has no such figure.

    The rate of all words has an interval that holds 95 %.
    """
    parts = list(dict.fromkeys(part for result in results for part in result.errors))
    header = [
        "run",
        *(f"WER {part}" for part in parts),
        "frame loss",
        "frame accuracy",
        "samples/s",
        "exposed comm.",
        "mean consensus dist.",
        "training",
    ]
    return [header, *(_line(result, parts) for result in results)]


def speeds_in_words(results: Sequence[Result]) -> str:
    """Why the table has speeds, or lacks them."""
    others = _others(results)
    known = [busy for busy in others if busy is not None]
    if len(known) < len(others):
        return "Speeds are left out: it is not known what else ran on this machine."
    if not all(map(is_quiet, known)):
        return (
            "Speeds are left out where other programs ran: they kept "
            f"{', '.join(f'{busy:.2f}' for busy in known)} cores busy."
        )
    return "Speeds: nothing else ran on this machine."


def were_alone(results: Sequence[Result]) -> bool:
    """Whether it is known that nothing else ran beside any of the trainings."""
    return all(map(is_quiet, _others(results)))


def _others(results: Sequence[Result]) -> list[float | None]:
    return [one.summary.get("other_cores") for one in results if one.summary]


def _line(result: Result, parts: Sequence[str]) -> list[str]:
    figures = dict(result.summary)
    if not is_quiet(figures.get("other_cores")):
        figures = {k: v for k, v in figures.items() if k not in _SPEEDS}
    return [
        result.name,
        *(_rate_of(result, part) for part in parts),
        _text(figures.get("frame_loss"), ".3f"),
        f"{result.frame_accuracy:.1%}",
        _text(figures.get("samples_per_second"), ".0f"),
        _text(figures.get("exposed_fraction"), ".1%"),
        _text(figures.get("relative_consensus_distance"), ".2%"),
        _text(figures.get("train_seconds"), ".0f", " s"),
    ]


def _rate_of(result: Result, part: str) -> str:
    if part == "total":
        return rate_in_words(result.words)
    counts = result.errors.get(part)
    return "-" if counts is None else f"{counts.wer:.2%}"


def rate_in_words(words: _Figures) -> str:
    """The rate of all test words, with its interval where it has one."""
    low, high = words["wer_low"], words["wer_high"]
    if low is None or high is None:
        return f"{words['wer']:.2%}"
    return f"{words['wer']:.2%} ({low:.2%} to {high:.2%})"


def words_compared(first: Result, second: Result) -> str:
    """How the words of two runs differ, and how sure it is."""
    found = second.against[first.name]
    p = found["p"]
    sure = "" if p is None else f", p = {p:.2g} by matched pairs"
    return f"WER {found['difference']:+.2%}{sure}"


def trainings_compared(results: Sequence[Result]) -> str:
    """How the words of later trainings differ from those of the first."""
    first, *others = (one for one in results if one.summary)
    found = (f"{o.name} less {first.name}: {words_compared(first, o)}." for o in others)
    return " ".join(found)


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
