"""What a learner tells of its program, and all of them together."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.programs.program import Program


@dataclass(frozen=True)
class Training:
    """A learner at the end of a call of `fit`.

    Args:
        weights: digest of all weights and buffers that are not whole numbers.
        is_finite: whether all of them are.
        epochs: complete epochs.
        steps: optimizer steps.
        has_finished: whether Lightning says so.
        metrics: the Trainer's.
        seen: for each batch, its epoch and the places of its rows.
    """

    weights: str
    is_finite: bool = True
    epochs: int = 2
    steps: int = 0
    has_finished: bool = True
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    seen: tuple[tuple[int, list[int]], ...] = ()


@dataclass
class Report:
    """What one learner tells; filled while it runs.

    Attributes:
        trainings: its trainings by name.
        evaluations: what `validate` and `test` have returned.
        lost: what is wrong with files that the Trainer has written.
        threads: names of threads of this package that `fit` has left.
        error: the exception that ended it; empty if none did.
        is_refusal: whether that came before the first step, as an argument's error.
        ended: when it ended, on the machine's monotonic clock.
    """

    trainings: dict[str, Training] = field(default_factory=dict[str, Training])
    evaluations: dict[str, Any] = field(default_factory=dict[str, Any])
    lost: list[str] = field(default_factory=list[str])
    threads: list[str] = field(default_factory=list[str])
    error: str = ""
    is_refusal: bool = False
    ended: float = 0.0


class Run(NamedTuple):
    """A program that has run.

    Args:
        program: what ran.
        reports: of all learners; None for one that ended without a report.
        running: learners that had to be ended, as they did not end themselves.
        faulted: when the fault's signal was sent, on the machine's monotonic clock.
        seconds: how long all of it took.
    """

    program: Program
    reports: list[Report | None]
    running: tuple[int, ...] = ()
    faulted: float | None = None
    seconds: float = 0.0
