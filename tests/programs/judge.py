"""What must hold when a program has run: invariants with names.

An invariant is a function of a run that yields what is wrong. A new one is a function
and a line of its table.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tests.programs import loaders, trainers
from tests.programs.faults import LAST_HOOKS, PLANTED
from tests.programs.program import Fault
from tests.programs.report import Report, Run, Training

# After a signal or an exception, and longer where no connection closes.
END_S, STOPPED_END_S = 15.0, 25.0
FAILED, FOLLOWS = "LearnerFailed", "LearnerFollows"
_STOPPING = ("early stopping", "stops later")
# Their epochs are not those of `max_epochs`.
SHORT: Mapping[str, tuple[str, ...]] = {
    "limit": ("steps", "steps alone"),
    "extra": ("fast run",),
    "callback": _STOPPING,
    "second callback": _STOPPING,
}
_DEALT = ("stream", "own sampler", "distributed sampler")
# With these, an epoch need not have each row once.
UNEVEN: Mapping[str, tuple[str, ...]] = {
    **SHORT,
    "data": (*_DEALT, "combined", "cycled", "list"),
    "limit": ("steps", "steps alone", "batches", "part of batches", "overfit"),
    "extra": ("no sampler", "fast run"),
}


class Finding(NamedTuple):
    """Something that must not be.

    Args:
        name: of the invariant.
        what: tells findings of one invariant apart: DDP may do the same.
        detail: what was found.
    """

    name: str
    what: str
    detail: str = ""

    def __str__(self) -> str:
        what = "" if self.detail.startswith(self.what) else self.what
        return ": ".join(filter(None, (self.name, what, self.detail)))


def judge(run: Run) -> list[Finding]:
    """All that is wrong; of learners that fail, only that they do."""
    if run.program.fault is not None:
        return _found(FAULTY, run)
    return _found(ENDING, run) or _found(INVARIANTS, run)


def refusal(run: Run) -> str:
    """The message with which all learners have refused the program at set-up."""
    reports = _reports(run)
    is_refused = len(reports) == len(run.reports) and all(r.is_refusal for r in reports)
    return reports[0].error if is_refused else ""


def beyond(found: list[Finding], reference: list[Finding]) -> list[Finding]:
    """The findings that the reference has not."""
    known = {(one.name, one.what) for one in reference}
    return [one for one in found if (one.name, one.what) not in known]


Wrong = Iterator[tuple[str, str]]
Invariants = Mapping[str, Callable[[Run], Wrong]]


def _found(invariants: Invariants, run: Run) -> list[Finding]:
    return [
        Finding(name, what, detail)
        for name, invariant in invariants.items()
        for what, detail in invariant(run)
    ]


def _reports(run: Run) -> list[Report]:
    return [report for report in run.reports if report is not None]


def _trainings(run: Run) -> Iterator[tuple[str, list[Training]]]:
    reports = _reports(run)
    names = dict.fromkeys(name for report in reports for name in report.trainings)
    for name in names:
        yield name, [r.trainings[name] for r in reports if name in r.trainings]


# --- how learners end


def _all_end(run: Run) -> Wrong:
    if run.running:
        yield "", f"learners {', '.join(map(str, run.running))} had to be killed"


def _all_report(run: Run) -> Wrong:
    if not run.running and None in run.reports:
        yield "", f"learner {run.reports.index(None)} ended without a word"


def _nobody_fails(run: Run) -> Wrong:
    errors = dict.fromkeys(report.error for report in _reports(run) if report.error)
    own = [error for error in errors if not error.startswith((FAILED, FOLLOWS))]
    for error in own or list(errors)[:1]:
        yield error[:60], error


# --- what training has done


def _equal(fact: Callable[[Training], object]) -> Callable[[Run], Wrong]:
    """The invariant that something is the same in all learners."""

    def invariant(run: Run) -> Wrong:
        for name, ends in _trainings(run):
            if len({str(fact(end)) for end in ends}) > 1:
                yield name, ", ".join(str(fact(end)) for end in ends)

    return invariant


def _true(fact: Callable[[Training], bool]) -> Callable[[Run], Wrong]:
    """The invariant that something is true of all learners."""

    def invariant(run: Run) -> Wrong:
        for name, ends in _trainings(run):
            if not all(map(fact, ends)):
                yield name, ""

    return invariant


def _validation(end: Training) -> list[float]:
    metrics = ("val_loss", "val_loss1", "validate_accuracy")
    return [round(end.metrics[one], 5) for one in metrics if one in end.metrics]


def _epochs_are_as_many(run: Run) -> Wrong:
    wanted = run.program.pick("epochs", trainers.TRAINER["epochs"])["max_epochs"]
    for name, ends in _trainings(run):
        expected = wanted + (name != "fit")
        if ends[0].epochs != expected and not run.program.has(SHORT):
            yield name, f"{ends[0].epochs} instead of {expected}"


def _each_row_is_seen(run: Run) -> Wrong:
    """Once an epoch; a batch of each learner may be filled up, or dropped."""
    if run.program.has(UNEVEN):
        return
    num_rows = run.program.pick("rows", loaders.ROWS)
    is_dropping = run.program.has({"last batch": ("dropped",)})
    for name, ends in _trainings(run):
        for epoch, rows in _rows_by_epoch(ends).items():
            missing, twice = num_rows - len(rows), rows.total() - len(rows)
            most = _rows_of_a_step(run)
            if missing > most * is_dropping or twice > most:
                told = f"{missing} of {num_rows} rows missing, {twice} twice"
                yield name, f"epoch {epoch}: {told}"


def _rows_by_epoch(ends: list[Training]) -> dict[int, Counter[int]]:
    rows: dict[int, Counter[int]] = {}
    for epoch, places in (batch for end in ends for batch in end.seen):
        rows.setdefault(epoch, Counter()).update(places)
    return rows


def _rows_of_a_step(run: Run) -> int:
    batch = run.program.pick("batch", loaders.LOADER["batch"])["batch_size"]
    return run.program.num_learners * batch


def _evaluations_are_equal(run: Run) -> Wrong:
    reports = _reports(run)
    for name, result in reports[0].evaluations.items():
        if any(report.evaluations[name] != result for report in reports):
            yield name, ", ".join(str(report.evaluations[name]) for report in reports)


def _files_hold_what_was_trained(run: Run) -> Wrong:
    for report in _reports(run):
        yield from ((lost, "") for lost in report.lost)


def _no_threads_are_left(run: Run) -> Wrong:
    for report in _reports(run):
        yield from ((thread, "") for thread in report.threads)


# --- faults


def _others_end_in_time(run: Run) -> Wrong:
    fault = _fault(run)
    victim = run.reports[fault.learner]
    begin = run.faulted or (victim.ended if victim is not None else None)
    longest = STOPPED_END_S if fault.kind == "stop" else END_S
    for rank, report in enumerate(run.reports):
        if report is not None and begin is not None and report.ended - begin > longest:
            yield f"learner {rank}", f"{report.ended - begin:.0f} s later"


def _others_say_who_failed(run: Run) -> Wrong:
    fault = _fault(run)
    words = [f"learner {fault.learner}", FOLLOWS]
    # A hook of all may have raised in several. The end of a process may come through
    # a connection that does not tell whose end it was.
    words += [PLANTED] if fault.kind == "raise" else [FAILED]
    for rank, report in enumerate(run.reports):
        error = report.error if report is not None else "no report"
        if _must_be_told(run) and rank != fault.learner and not _has(error, words):
            yield f"learner {rank}", error


def _has(error: str, words: list[str]) -> bool:
    return any(word in error for word in words)


def _must_be_told(run: Run) -> bool:
    """Whether a learner has failed while the others could not do without it."""
    fault = _fault(run)
    victim = run.reports[fault.learner]
    if fault.kind == "raise":
        has_raised = victim is not None and PLANTED in victim.error
        return has_raised and fault.hook not in LAST_HOOKS
    return fault.kind != "term" and run.faulted is not None and victim is None


def _fault(run: Run) -> Fault:
    assert run.program.fault is not None
    return run.program.fault


ENDING: Invariants = {
    "a learner does not end": _all_end,
    "a learner ends without a word": _all_report,
    "a learner fails": _nobody_fails,
}
INVARIANTS: Invariants = {
    "weights differ": _equal(lambda end: end.weights),
    "weights are not finite": _true(lambda end: end.is_finite),
    "training has not finished": _true(lambda end: end.has_finished),
    "epochs differ": _equal(lambda end: end.epochs),
    "epochs are not as many as asked for": _epochs_are_as_many,
    "rows are not seen once": _each_row_is_seen,
    "validation differs": _equal(_validation),
    "evaluations differ": _evaluations_are_equal,
    "a file is wrong": _files_hold_what_was_trained,
    "a thread is left": _no_threads_are_left,
}
FAULTY: Invariants = {
    "a learner does not end": _all_end,
    "a learner ends late": _others_end_in_time,
    "a learner does not say who failed": _others_say_who_failed,
}
