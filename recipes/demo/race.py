"""The race: the same seconds for two methods, while one of four learners is slow.

Machines are emulated. Every step lasts at least as long as a step of `ddp` took in the
same demo without a slow learner; one of the last learner lasts five times as long. So
no learner gains from the cores that the slow one leaves to the others.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_adpsgd.files import bytes_written_whole
from recipes.demo.lanes import Step, read_lanes, window_of
from recipes.demo.plots import STYLES, png
from recipes.demo.results import Result, rate_in_words, read_result, words_compared
from recipes.hybrid.pipeline.groups import RaceSettings
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.training.held_out import (
    HELD_OUT,
    HeldOut,
    difference_interval,
    loss_interval,
    read_held_out,
)
from recipes.hybrid.training.metrics import last_figures

METHODS = ("ddp", "adpsgd")
TIMES_SLOWER = 5
_PREFIX = "race-"
_SHOWN_S = 3.0
_COMPUTING, _WAITING, _EXCHANGE = "#0072B2", "#E69F00", "#222222"


@dataclass(frozen=True)
class Entrant:
    """One method of the race.

    Attributes:
        method: name of the strategy.
        result: its figures, as in the first table.
        held_out: its loss on held-out speech.
        lanes: last steps of each learner.
    """

    method: str
    result: Result
    held_out: HeldOut
    lanes: Sequence[Sequence[Step]]


def race_of(control: Settings, seconds: float) -> list[Settings]:
    """The runs of the race.

    Args:
        control: settings of the finished `ddp` without a slow learner.
        seconds: training time of each run; 0 for no race.

    Raises:
        ValueError: `seconds` is negative.
    """
    if seconds == 0:
        return []
    step_s = _step_s(control)
    pause_s = round((TIMES_SLOWER - 1) * step_s, 4)
    race = RaceSettings(seconds=seconds, step_s=step_s, pause_s=pause_s)
    return [_entrant(control, race, method) for method in METHODS]


def _step_s(control: Settings) -> float:
    path = control.directory("train") / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    return max(0.001, round(summary["train_seconds"] / summary["steps"], 4))


def _entrant(control: Settings, race: RaceSettings, method: str) -> Settings:
    train = dataclasses.replace(
        control.train,
        strategy=method,
        validate_every=1,
        checkpoint_minutes=0.0,
        # It would run beside the training, and not for all learners alike.
        wer_utterances=0,
    )
    return dataclasses.replace(control, run=_PREFIX + method, train=train, race=race)


def read_entrant(settings: Settings) -> Entrant:
    """What a run of the race has left, from its finished stages."""
    trained = settings.directory("train")
    return Entrant(
        settings.train.strategy,
        read_result(settings),
        read_held_out(trained / HELD_OUT),
        read_lanes(trained / "timeline"),
    )


# --- in words


def race_in_words(race: Sequence[Entrant]) -> str:
    """What was done, for a reader who wants to do it again."""
    summary = race[0].result.summary
    step_s = summary["step_s"]
    return (
        f"The same {summary['seconds']:g} seconds for each method, with one slow "
        f"machine. Machines are emulated: every step lasts at least {step_s:.3f} s, as "
        f"long as one of ddp in the first table, and each step of learner "
        f"{summary['num_learners'] - 1} lasts {step_s + summary['pause_s']:.3f} s. "
        "Start and model are those of the first table. The learning rate passes "
        "through the same values, as a function of elapsed time instead of epochs."
    )


def race_table(race: Sequence[Entrant]) -> list[list[str]]:
    """Header and one line per method, all text; intervals hold 95 %."""
    header = [
        "method",
        "training",
        "samples",
        "steps, fast",
        "steps, slow",
        "waited",
        "frame loss",
        "WER total",
        "others' cores",
    ]
    return [header, *map(_line, race)]


def _line(entrant: Entrant) -> list[str]:
    summary, steps = entrant.result.summary, _steps(entrant)
    low, high = loss_interval(entrant.held_out.utterances)
    others = summary.get("other_cores")
    return [
        entrant.method,
        f"{summary['train_seconds']:.1f} s",
        f"{summary['global_samples']:,.0f}",
        f"{max(steps):,}",
        f"{steps[-1]:,}",
        f"{summary['exposed_fraction']:.0%}",
        f"{summary['frame_loss']:.3f} ({low:.3f} to {high:.3f})",
        rate_in_words(entrant.result.words),
        "?" if others is None else f"{others:.2f}",
    ]


def _steps(entrant: Entrant) -> list[int]:
    """The steps of each learner."""
    last, summary = last_figures(entrant.result.rows), entrant.result.summary
    rates = (f"learners/steps_per_second_{n}" for n in range(summary["num_learners"]))
    return [round(last[rate] * summary["train_seconds"]) for rate in rates]


def comparison(first: Entrant, second: Entrant) -> str:
    """The difference of two methods, on the same utterances."""
    mine, theirs = (e.held_out.utterances for e in (second, first))
    low, high = difference_interval(theirs, mine)
    losses = [e.result.summary["frame_loss"] for e in (first, second)]
    return (
        f"{second.method} less {first.method}: frame loss {losses[1] - losses[0]:+.3f} "
        f"({low:+.3f} to {high:+.3f}), {words_compared(first.result, second.result)}."
    )


# --- in pictures


def draw_race(race: Sequence[Entrant], path: Path) -> None:
    """Writes the picture, whole or not at all."""
    with bytes_written_whole(path) as file:
        file.write(png(race_figure(race)))


def race_figure(race: Sequence[Entrant]) -> Figure:
    """Loss against time, and what learners did in the last seconds.

    Left is the loss of the mean of all learners on held-out speakers. Right are the
    steps of each learner, the slow one lowest: blue, with its waits in orange. Lines
    join learners that have exchanged weights.
    """
    figure = Figure(figsize=(10.0, 4.4), layout="constrained")
    names = [entrant.method for entrant in race]
    axes: dict[str, Any] = figure.subplot_mosaic([["loss", name] for name in names])
    _draw_losses(axes["loss"], race)
    for entrant in race:
        _draw_lanes(axes[entrant.method], entrant)
    return figure


def _draw_losses(axes: Axes, race: Sequence[Entrant]) -> None:
    for entrant, (colour, dash) in zip(race, STYLES, strict=False):
        curve = entrant.held_out.curve
        seconds, losses = [p.seconds for p in curve], [p.loss for p in curve]
        axes.plot(
            *(seconds, losses),
            color=colour,
            linestyle=dash,
            marker="o",
            markersize=3,
            label=entrant.method,
        )
    axes.set(xlabel="training time (s)", ylabel="held-out loss (nats per frame)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _draw_lanes(axes: Axes, entrant: Entrant) -> None:
    begin, end = window_of(entrant.lanes, _SHOWN_S)
    for learner, steps in enumerate(entrant.lanes):
        shown = [step for step in steps if begin < step.end and step.begin < end]
        for step in shown:
            _draw_step(axes, learner, step, begin)
    axes.set(title=entrant.method, xlabel="seconds", ylabel="learner")
    axes.set_xlim(0, end - begin)
    names = [*map(str, range(len(entrant.lanes) - 1)), "slow"]
    axes.set_yticks(range(len(names)), labels=names)
    axes.invert_yaxis()


def _draw_step(axes: Axes, learner: int, step: Step, origin: float) -> None:
    computed = step.end - step.begin - step.waited
    blue, orange = (
        (step.begin - origin, computed),
        (step.end - origin - step.waited, step.waited),
    )
    axes.broken_barh(
        [blue, orange],
        (learner - 0.35, 0.7),
        facecolors=[_COMPUTING, _WAITING],
        edgecolor="white",
        linewidth=0.4,
    )
    for peer in step.peers:
        at = step.end - origin
        axes.plot([at, at], [learner, peer], color=_EXCHANGE, linewidth=0.6, alpha=0.6)
