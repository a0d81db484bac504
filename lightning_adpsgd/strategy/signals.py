"""Keeps Lightning's handling of SIGTERM from tying all learners together.

Lightning broadcasts from learner 0 before each training batch whether a SIGTERM came,
and once more inside the signal handler. The first makes asynchronous learners wait for
one another in every step; the second hangs when one learner alone gets the signal. Here
the learner that gets the signal stops, and the coordinator tells the others. The
learners of one island, who make each step together, stop at the same one.
"""

from functools import partial
from pathlib import Path
from typing import Protocol

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException


def handle_locally(trainer: pl.Trainer) -> None:
    """Replaces both broadcasts, until `restore`."""
    # Partial functions of this module and not lambdas: a Trainer may be pickled.
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    vars(loop)["_broadcast_sigterm_tensor"] = partial(_stop_if_signalled, trainer)
    vars(connector)["_sigterm_notifier_fn"] = partial(_note_signal, trainer)


class Leaving(Protocol):
    """Where learners agree on the step after which they end; see `job.Job`."""

    @property
    def running(self) -> bool:
        """Whether there is anything to leave."""
        ...

    @property
    def leaves(self) -> bool:
        """Whether they have come to that step."""
        ...

    def ask_to_leave(self) -> None:
        """Some step is to be the last one."""


def handle_together(trainer: pl.Trainer, job: Leaving) -> None:
    """Replaces them where learners make their steps together, until `restore`."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    vars(loop)["_broadcast_sigterm_tensor"] = partial(_stop_if_agreed, trainer, job)
    vars(connector)["_sigterm_notifier_fn"] = partial(_ask_to_leave, trainer, job)


def restore(trainer: pl.Trainer) -> None:
    """Brings Lightning's own handling back."""
    vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
    vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)


def save(trainer: pl.Trainer, name: str) -> Path:
    """Writes a checkpoint beside those of the Trainer; returns its path."""
    chosen = getattr(trainer.checkpoint_callback, "dirpath", None)
    path = Path(chosen or trainer.default_root_dir) / f"{name}.ckpt"
    trainer.save_checkpoint(path)
    return path


def _stop_if_signalled(trainer: pl.Trainer) -> None:
    if trainer.received_sigterm:
        raise SIGTERMException


def _stop_if_agreed(trainer: pl.Trainer, job: Leaving) -> None:
    trainer._signal_connector.received_sigterm |= job.leaves
    _stop_if_signalled(trainer)


def _ask_to_leave(
    trainer: pl.Trainer, job: Leaving, signum: int, frame: object
) -> None:
    if job.running:
        _pass_on(trainer, signum)
        job.ask_to_leave()
    else:
        _note_signal(trainer, signum, frame)


def _note_signal(trainer: pl.Trainer, signum: int, frame: object) -> None:
    connector = trainer._signal_connector
    if not connector.received_sigterm:
        _pass_on(trainer, signum)
    connector.received_sigterm = True


def _pass_on(trainer: pl.Trainer, signum: int) -> None:
    if (launcher := trainer.strategy.launcher) is not None:
        launcher.kill(signum)  # pyright: ignore[reportArgumentType]
