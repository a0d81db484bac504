"""One learner: it trains as its program says, goes on from there, and reports."""

import hashlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from tests.programs.faults import say_that_it_ends
from tests.programs.loaders import evaluation_arguments, fit_arguments
from tests.programs.modules import Net, net_of
from tests.programs.program import Arguments, Program
from tests.programs.report import Report, Training
from tests.programs.trainers import trainer_of

SAVED = "end.ckpt"
# Their weights after `fit` are not those that were trained last.
AVERAGING = ("moving average", "swa")
OWN_THREADS = "adpsgd"


@dataclass
class Session:
    """What a learner has at hand after `fit`."""

    program: Program
    is_ddp: bool
    report: Report
    net: Net
    trainer: pl.Trainer
    arguments: Arguments = field(default_factory=dict[str, Any])

    def fit(self, name: str, **more: Any) -> None:
        """Trains, and reports the end under a name."""
        self.net.seen.clear()
        self.trainer.fit(self.net, **self.arguments, **more)
        self.report.trainings[name] = training_of(self.net, self.trainer)


def learn(program: Program, folder: Path, is_ddp: bool, rank: int) -> Report:
    """Runs a program as one learner; its output goes into a file of the folder."""
    os.chdir(folder)
    _write_into(f"log{rank}")
    report, net = Report(), net_of(program)
    try:
        _train(program, is_ddp, report, net)
    except BaseException as error:
        traceback.print_exc()
        is_of_arguments = isinstance(error, ValueError | MisconfigurationException)
        notes = " ".join(getattr(error, "__notes__", []))
        error_text = f"{type(error).__name__}: {error}"[:600]
        report.error = f"{error_text} {notes}".strip()[:900]
        report.is_refusal = is_of_arguments and not net.has_stepped
    report.ended = time.monotonic()
    say_that_it_ends(rank)
    return report


def _write_into(name: str) -> None:
    sys.stdout.flush()
    log = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _train(program: Program, is_ddp: bool, report: Report, net: Net) -> None:
    before = set(threading.enumerate())
    trainer = trainer_of(program, is_ddp)
    session = Session(program, is_ddp, report, net, trainer, fit_arguments(program))
    session.fit("fit")
    left = {thread.name for thread in set(threading.enumerate()) - before}
    report.threads = sorted(name for name in left if name.startswith(OWN_THREADS))
    _look_for_best(session)
    program.pick("after", AFTER)(session)


def training_of(net: Net, trainer: pl.Trainer) -> Training:
    """What the judge compares at the end of a training."""
    metrics = {name: float(one) for name, one in trainer.callback_metrics.items()}
    # Not the module's own method, which may be one that raises.
    state = nn.Module.state_dict(net)
    return Training(
        digest(state),
        all(bool(weight.isfinite().all()) for weight in _floats(state).values()),
        trainer.current_epoch,
        trainer.global_step,
        trainer.state.finished,
        metrics,
        tuple(net.seen),
    )


def digest(state: Mapping[str, Tensor]) -> str:
    """A short name of these weights."""
    found = hashlib.sha256()
    for _, weight in sorted(_floats(state).items()):
        found.update(weight.detach().cpu().double().numpy().tobytes())
    return found.hexdigest()[:12]


def _floats(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in state.items() if one.is_floating_point()}


def _look_for_best(session: Session) -> None:
    """The checkpoint that the Trainer calls the best must be there."""
    callback = session.trainer.checkpoint_callback
    best = getattr(callback, "best_model_path", "")
    session.trainer.strategy.barrier()
    if best and not Path(best).exists():
        session.report.lost.append(f"no file {Path(best).name}")


# --- what comes after `fit`


def _nothing(session: Session) -> None:
    pass


def _evaluate(name: str, session: Session) -> None:
    arguments = evaluation_arguments(session.program, session.arguments)
    evaluate = getattr(session.trainer, name)
    result = evaluate(session.net, **arguments, verbose=False)
    session.report.evaluations[name] = result


def _predict(session: Session) -> None:
    arguments = evaluation_arguments(session.program, session.arguments)
    assert session.trainer.predict(session.net, **arguments)


def _save(session: Session) -> None:
    session.trainer.save_checkpoint(SAVED)
    session.trainer.strategy.barrier()
    state = torch.load(SAVED, weights_only=True)["state_dict"]
    averaging = {"callback": AVERAGING, "second callback": AVERAGING}
    is_same = digest(state) == session.report.trainings["fit"].weights
    if not is_same and not session.program.has(averaging):
        session.report.lost.append(f"{SAVED} has other weights than the module")


def _resume(session: Session) -> None:
    _save(session)
    trainer = trainer_of(session.program, session.is_ddp, more_epochs=1)
    replace(session, trainer=trainer).fit("resumed", ckpt_path=SAVED)


def _resume_anew(session: Session) -> None:
    _resume(replace(session, net=net_of(session.program)))


def _fit_again(session: Session) -> None:
    loop = session.trainer.fit_loop
    loop.max_epochs = (loop.max_epochs or 0) + 1
    session.fit("again")


AFTER: dict[str, Callable[[Session], None]] = {
    "nothing": _nothing,
    "validate": partial(_evaluate, "validate"),
    "test": partial(_evaluate, "test"),
    "predict": _predict,
    "save": _save,
    "resume": _resume,
    "resume anew": _resume_anew,
    "fit again": _fit_again,
}
