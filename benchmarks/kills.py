"""What the others lose when one of six learners is killed every twenty seconds.

It is started again ten seconds later. The methods are `adpsgd` as islands, `ddp` under
torchrun's agent, which restarts all learners from the last checkpoint, and torchft,
which averages over those present. The control of each is the same without kills. The
others should keep their pace, and the loss should be that without faults.
"""

import itertools
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks import killable, workload
from benchmarks.killable import STEP_S, Killable, Outcome
from benchmarks.killed_methods import ISLANDS, METHODS, SAVE_EVERY, Kind
from benchmarks.plain_loops import peers_missing
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread
from benchmarks.workload import NARROW

LEARNERS, KILL_EVERY_S, ABSENT_S = 6, 20.0, 10.0
SECONDS, QUICK_S = 300.0, 60.0
WINDOW_S, START = 5.0, 3
SLOWEST_WINDOW, WORSE_LOSS = 1.1, 1.02


def measure(quick: bool = False) -> Report:
    """Measures each method undisturbed and with kills, one run after the other."""
    torch.set_num_threads(1)
    seconds = QUICK_S if quick else SECONDS
    report = Report(
        f"{LEARNERS} learners for {seconds:.0f} s, one killed every "
        f"{KILL_EVERY_S:.0f} s and started again {ABSENT_S:.0f} s later; steps are "
        f"waits of {1e3 * STEP_S:.0f} ms around a small gradient.",
        limit="the same method, nobody killed",
        notes=[
            "The value is the steps/s of a learner while it lives, its start left out. "
            f"The slowest window is the mean step in any {WINDOW_S:.0f} s of a life "
            "after its first step, of the median step. The loss is that of the mean of "
            "all weights at the end, on held-out samples.",
            f"`ddp` saves every {SAVE_EVERY} steps. Its agent starts a killed learner "
            "again at once and not after ten seconds. With an agent for each learner, "
            "and agents killed too, torchrun did not come back within a minute.",
        ],
    )
    missing = peers_missing()
    if missing:
        report.skipped["torchft"] = missing
    for method, kind in METHODS.items():
        if not (missing and kind.is_peer):
            report.rows += measure_method(method, seconds, report)
    report.targets += targets(report.rows)
    return report


def measure_method(method: str, seconds: float, report: Report) -> list[Row]:
    """The rows of one method: undisturbed, and with kills."""
    rows: list[Row] = []
    for faults, every in (("none", None), ("kills", KILL_EVERY_S)):
        outcome = run(METHODS[method], seconds, every)
        if len(outcome.weights) == 0 or not steps_per_second(outcome):
            said = (outcome.trouble or ["nobody said why"])[0]
            report.skipped[f"{method}, {faults}"] = f"nobody ended: {said}"
            break
        rows.append(row(method, faults, outcome, rows[0] if rows else None))
        print_row(f"{method}, {faults}", f"{rows[-1].value:.2f} steps/s", *_said(rows))
    return rows


def run(kind: Kind, seconds: float, kill_every_s: float | None) -> Outcome:
    """Makes one run in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        port = 20_000 + 200 * (int.from_bytes(os.urandom(2)) % 50)
        first = Killable(0, LEARNERS, 0, port, Path(folder), 0.0)
        with kind.around(port):
            return killable.run(
                kind.program,
                first,
                seconds,
                kill_every_s,
                ABSENT_S,
                supervised=kind.supervised,
            )


def row(method: str, faults: str, outcome: Outcome, control: Row | None) -> Row:
    value, loss = spread(steps_per_second(outcome)), held_out_loss(outcome)
    details = {
        "slowest window, of the median step": slowest_window(outcome),
        "steps of all learners": float(num_steps(outcome)),
        "held-out loss": loss,
    }
    ratio = None
    if control is not None:
        ratio = value.median / control.value.median
        details["loss, of undisturbed"] = loss / control.details["held-out loss"]
        undisturbed = control.details["steps of all learners"]
        details["steps, of undisturbed"] = num_steps(outcome) / undisturbed
        details["kills"] = float(len(outcome.kills))
    return Row(
        {"method": method, "faults": faults}, value, "steps/s", ratio, "", "", details
    )


def _said(rows: Sequence[Row]) -> Iterator[str]:
    details = rows[-1].details
    yield f"window {details['slowest window, of the median step']:.2f}"
    yield f"loss {details['held-out loss']:.3f}"


def steps_per_second(outcome: Outcome) -> list[float]:
    """The speed of each life that lasted a window."""
    return [
        (len(life) - 1) / (life[-1] - life[0])
        for life in settled(outcome)
        if len(life) > 1 and life[-1] - life[0] >= WINDOW_S
    ]


def settled(outcome: Outcome) -> list[list[float]]:
    """The times of steps between a learner's starts and deaths, without the first ones.

    A learner that was restarted without having been killed counts as one life, because
    the restart is the effect of another's death.
    """
    return [
        stretch[START:]
        for number, lives in outcome.lives.items()
        for stretch in _joined(lives, [t for t, n in outcome.kills if n == number])
    ]


def _joined(lives: Sequence[list[float]], deaths: Sequence[float]) -> list[list[float]]:
    stretches: list[list[float]] = []
    for life in filter(None, lives):
        last = stretches[-1][-1] if stretches else None
        if last is None or any(last <= death <= life[0] for death in deaths):
            stretches.append([])
        stretches[-1].extend(life)
    return stretches


def num_steps(outcome: Outcome) -> int:
    return sum(len(life) for lives in outcome.lives.values() for life in lives)


def slowest_window(outcome: Outcome) -> float:
    """The slowest window of all lives, relative to the median step of all."""
    lives = settled(outcome)
    steps = [b - a for life in lives for a, b in itertools.pairwise(life)]
    worst = max((mean for life in lives for mean in windows(life)), default=0.0)
    return worst / statistics.median(steps)


def windows(life: Sequence[float]) -> Iterator[float]:
    """Mean steps of all stretches of the window's length, in seconds."""
    end = 0
    for begin, stamp in enumerate(life):
        while end < len(life) and life[end] < stamp + WINDOW_S:
            end += 1
        if end < len(life):
            yield (life[end] - stamp) / (end - begin)


@torch.no_grad()
def held_out_loss(outcome: Outcome) -> float:
    """The held-out loss of the mean of the weights."""
    model = workload.make_model(widths=NARROW)
    mean = torch.stack(outcome.weights).mean(0)
    nn.utils.vector_to_parameters(mean, model.parameters())
    batch = next(workload.batches(seed=99, size=workload.HELD_OUT))
    return workload.loss(model, batch).item()


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    for found in rows:
        if found.case == {"method": ISLANDS, "faults": "kills"}:
            window = found.details["slowest window, of the median step"]
            loss = found.details["loss, of undisturbed"]
            yield Target("islands: slowest 5 s", SLOWEST_WINDOW, window, False)
            yield Target("islands: loss, of undisturbed", WORSE_LOSS, loss, False)
