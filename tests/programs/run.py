"""Runs a program: forks its learners, sends its signal, collects their reports."""

import shutil
import time
from functools import partial
from pathlib import Path

from tests.helpers import Outcome
from tests.learners import learners
from tests.programs.faults import signals
from tests.programs.learner import learn
from tests.programs.program import Program
from tests.programs.report import Report, Run

LONGEST_S = 60.0
_KILLED = -9


def run(program: Program, folder: Path, is_ddp: bool = False) -> Run:
    """Runs a program in an empty folder, with this package's strategy or with DDP."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begin, sent = time.monotonic(), folder / "sent"
    learner = partial(learn, program, folder, is_ddp)
    with signals(program, folder):
        outcomes = learners(program.num_learners, learner, LONGEST_S)
    faulted = float(sent.read_text()) if sent.exists() else None
    reports = [_report(folder / f"log{n}", one) for n, one in enumerate(outcomes)]
    running = _running(program, outcomes)
    return Run(program, reports, running, faulted, time.monotonic() - begin)


def _report(log: Path, outcome: Outcome) -> Report | None:
    """The learner's report; if it has ended itself without one, the log's last line."""
    if outcome.value is not None or outcome.exit_code < 0:
        return outcome.value
    last = log.read_text(errors="replace").splitlines()[-1:]
    age = time.time() - log.stat().st_mtime
    return Report(error="".join(last)[:600], ended=time.monotonic() - age)


def _running(program: Program, outcomes: list[Outcome]) -> tuple[int, ...]:
    fault = program.fault
    is_killed = fault is not None and fault.kind in ("kill", "stop")
    victim = fault.learner if fault is not None and is_killed else None
    killed = (rank for rank, one in enumerate(outcomes) if one.exit_code == _KILLED)
    return tuple(rank for rank in killed if rank != victim)
