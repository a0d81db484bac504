"""Exceptions that a learner raises in a hook, and signals that it gets."""

import functools
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lightning_adpsgd.files import written_whole
from tests.programs.program import Fault, Program

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
# Methods of the module; `__getitem__` is the training rows'.
HOOKS = (
    "__getitem__",
    "backward",
    "configure_optimizers",
    "on_before_zero_grad",
    "on_fit_end",
    "on_fit_start",
    "on_sanity_check_start",
    "on_save_checkpoint",
    "on_train_batch_end",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_start",
    "on_validation_epoch_end",
    "on_validation_start",
    "optimizer_step",
    "setup",
    "state_dict",
    "teardown",
    "training_step",
    "validation_step",
)
# When these run, the others may have ended.
LAST_HOOKS = ("on_fit_end", "teardown")
PLANTED = "planted in"
# More than the others may take to notice that a learner is stopped.
LONGEST_STOP_S = 30.0
T = TypeVar("T")


def with_fault(kind: type[T], program: Program, rank: int) -> type[T]:
    """The class, in which a method raises if this learner is to raise there."""
    fault = program.fault
    if fault is None or fault.learner != rank or not hasattr(kind, fault.hook):
        return kind
    raising = _raising(getattr(kind, fault.hook), fault)
    planted: Any = type(kind.__name__, (kind,), {fault.hook: raising})
    return planted


def _raising(method: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    calls = itertools.count()

    @functools.wraps(method)
    def raises(*arguments: Any, **named: Any) -> Any:
        if next(calls) == fault.call:
            raise ValueError(f"{PLANTED} {fault.hook}")
        return method(*arguments, **named)

    return raises


def say_that_fit_begins(rank: int) -> None:
    """Leaves this process's number where the one that sends signals looks for it."""
    with written_whole(Path(f"begins-{rank}")) as file:
        file.write(str(os.getpid()))


def say_that_it_ends(rank: int) -> None:
    """Lets a stopped learner be killed, once all others have ended."""
    Path(f"ends-{rank}").touch()


@contextmanager
def signals(program: Program, folder: Path) -> Iterator[None]:
    """Sends the program's signal from a thread, while the learners run."""
    over = threading.Event()
    thread = threading.Thread(target=_send, args=(program, folder, over))
    if program.fault is not None and program.fault.kind in SIGNALS:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def _send(program: Program, folder: Path, over: threading.Event) -> None:
    fault = program.fault
    assert fault is not None
    begins = folder / f"begins-{fault.learner}"
    if not _come([begins], over) or over.wait(fault.seconds):
        return
    number = int(begins.read_text())
    with suppress(ProcessLookupError):
        os.kill(number, SIGNALS[fault.kind])
        (folder / "sent").write_text(str(time.monotonic()))
        if fault.kind == "stop":
            _come(_others_end(fault, program, folder), over, LONGEST_STOP_S)
            os.kill(number, signal.SIGKILL)


def _others_end(fault: Fault, program: Program, folder: Path) -> list[Path]:
    ranks = set(range(program.num_learners)) - {fault.learner}
    return [folder / f"ends-{rank}" for rank in ranks]


def _come(files: list[Path], over: threading.Event, seconds: float = math.inf) -> bool:
    """Waits for files; returns whether they came before all was over."""
    deadline = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        if over.wait(0.01) or time.monotonic() > deadline:
            return False
    return True
