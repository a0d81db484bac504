"""The cost of one slow learner of four to the others.

It takes a second more for each step, or 2, 5 and 10 times as long. All steps are timed
waits of a small model: otherwise the four would share the cores of this machine, and a
waiting learner would make the others faster. One figure is the speed of the learners
that share no super-learner with the straggler, against their speed without one.

The other is the time of an epoch, for which a user waits. An epoch is over when the
last learner has made its last step. The ideal is total work over total speed: the
batches of the epoch over the sum of the learners' own batches per second.
"""

import itertools
from collections.abc import Iterator, Sequence
from statistics import median

import torch

from benchmarks import learners, work_sharing
from benchmarks.feed import Task, Trace
from benchmarks.learners import LearnersFailed
from benchmarks.methods import NEED_PEERS, PROGRAMS
from benchmarks.plain_loops import peers_missing
from benchmarks.results import Report, Row, Target
from benchmarks.timing import Spread, print_row, spread
from benchmarks.workload import NARROW

LEARNERS, STRAGGLER = 4, 3
STEP_S, SECONDS, LIMIT_S = 0.05, 2.5, 60.0
NONE, SLEEPS = "none", "+1 s a step"
SLOWER = {NONE: 0.0, SLEEPS: 1.0} | {f"{k} x": (k - 1) * STEP_S for k in (2, 5, 10)}
ASYNCHRONOUS = ("adpsgd", "adpsgd_random", "hadpsgd")
# It waits for a partner, but never for long.
READY_PAIRS = "rdpsgd"
METHODS = (*ASYNCHRONOUS, READY_PAIRS, "sdpsgd", "d1psgd", "ddp", "Decent-DP ring")
SUPER_LEARNER = {"hadpsgd": 2}
OTHERS, EPOCH = "speed of the others", "time of an epoch"
BATCHES, EPOCHS = 64, 3
WHOLE = (
    work_sharing.EQUAL,
    work_sharing.SHARED,
    work_sharing.DEFAULT,
    work_sharing.READY_PAIRS,
    work_sharing.DDP,
)
"""Settings whose epochs are timed; the first one shows the learners' speeds."""
EPOCH_BOUND = 1.1


def measure(quick: bool = False) -> Report:
    """Measures all methods with each straggler, in turn."""
    torch.set_num_threads(1)
    report = Report(
        f"One straggler of {LEARNERS} learners whose steps take {1e3 * STEP_S:.0f} ms: "
        "steps/s of the others, and the time of an epoch.",
        limit="no straggler",
        notes=[
            "`hadpsgd` has two super-learners of two; the straggler's partner shares "
            "its fate and is not counted.",
            f"An epoch has {BATCHES} batches. Its value is that of later epochs: in "
            "the first one a learner does not know how slow it is.",
        ],
    )
    missing = peers_missing()
    if missing:
        report.skipped["Decent-DP"] = missing
    methods = [name for name in METHODS if not (missing and name in NEED_PEERS)]
    stragglers = (NONE, SLEEPS) if quick else tuple(SLOWER)
    rates = measure_all(methods, stragglers, 1 if quick else 2, report)
    report.rows += rows_of(rates)
    for straggler in stragglers[1:2] if quick else stragglers:
        report.rows += epoch_rows(straggler)
    report.targets += targets(report.rows)
    return report


def measure_all(
    methods: Sequence[str], stragglers: Sequence[str], repetitions: int, report: Report
) -> dict[tuple[str, str], Spread]:
    """Measures the steps/s of the others, by straggler and method."""
    rates: dict[tuple[str, str], list[float]] = {}
    for _, straggler, name in itertools.product(
        range(repetitions), stragglers, methods
    ):
        try:
            found = run(name, SLOWER[straggler])
            rates.setdefault((straggler, name), []).extend(found)
        except LearnersFailed as error:
            report.skipped[f"{name}, {straggler}"] = str(error)[-300:]
    return {key: spread(values) for key, values in rates.items()}


def run(name: str, slower_s: float) -> list[float]:
    """Measures the steps/s of each learner that is not with the straggler."""
    task = Task(
        counts=counts(name, slower_s),
        wait_s=STEP_S,
        widths=NARROW,
        slower={STRAGGLER: slower_s},
    )
    size = SUPER_LEARNER.get(name, 1)
    program, per_host = PROGRAMS[name], size if size > 1 else None
    traces = learners.run(
        lambda place: program(place, task), LEARNERS, LIMIT_S, per_host=per_host
    )
    return [steps_per_second(t) for r, t in enumerate(traces) if not near(r, size)]


def near(rank: int, size: int) -> bool:
    """Whether a learner is in the straggler's super-learner."""
    return rank // size == STRAGGLER // size


def counts(name: str, slower_s: float) -> list[int]:
    """The steps of each learner that take all about equally long."""
    slow = max(5, round(SECONDS / (STEP_S + slower_s)))
    keeps = name in (*ASYNCHRONOUS, READY_PAIRS)
    fast = round(SECONDS / STEP_S) if keeps else slow
    size = SUPER_LEARNER.get(name, 1)
    return [slow if near(rank, size) else fast for rank in range(LEARNERS)]


def steps_per_second(trace: Trace) -> float:
    return (len(trace.stamps) - 1) / (trace.stamps[-1] - trace.stamps[0])


def rows_of(rates: dict[tuple[str, str], Spread]) -> Iterator[Row]:
    for (straggler, name), steps in sorted(rates.items(), key=_as_listed):
        without = rates.get((NONE, name))
        ratio = steps.median / without.median if without else None
        print_row(f"{name}, {straggler}", f"{steps:.2f} steps/s", f"{ratio or 0:.3f}")
        case = {"straggler": straggler, "method": name}
        yield Row(case, steps, "steps/s", ratio, table=OTHERS)


def _as_listed(item: tuple[tuple[str, str], Spread]) -> tuple[int, int]:
    (straggler, name), _ = item
    return list(SLOWER).index(straggler), METHODS.index(name)


def epoch_rows(straggler: str) -> Iterator[Row]:
    """Seconds of an epoch under each setting, against the ideal."""
    ideal = 0.0
    for setting in WHOLE:
        slow_s = STEP_S + SLOWER[straggler]
        epochs = work_sharing.train(setting, BATCHES, EPOCHS, slow_s)
        ideal = ideal or BATCHES / median(epochs.speeds)
        yield epoch_row(straggler, setting, epochs.seconds, ideal)


def epoch_row(
    straggler: str, setting: str, seconds: Sequence[float], ideal: float
) -> Row:
    """The row of one fit; its first epoch stands apart."""
    first, *later = seconds
    found = spread(later)
    ratio = found.median / ideal
    print_row(f"{setting}, {straggler}", f"{found:.2f} s an epoch", f"{ratio:.3f}")
    case = {"straggler": straggler, "method": setting}
    details = {"first epoch, s": first}
    return Row(case, found, "s", ratio, "the ideal", EPOCH, details)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Speed that is kept, or about one step a second."""
    for row in rows:
        name, ratio = row.case["method"], row.ratio
        if row.table == EPOCH and name == work_sharing.DEFAULT:
            claim = f"{name}, straggler {row.case['straggler']}: epoch, of the ideal"
            yield Target(claim, EPOCH_BOUND, ratio or 0.0, at_least=False)
        if row.case["straggler"] != SLEEPS or ratio is None:
            continue
        if name in ASYNCHRONOUS:
            yield Target(f"{name}, others of one at {SLEEPS}: speed kept", 0.95, ratio)
