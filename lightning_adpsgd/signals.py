"""Keeps Lightning's handling of SIGTERM from tying all learners together.

Lightning broadcasts from learner 0 before each training batch whether a SIGTERM came,
and once more inside the signal handler. The first makes asynchronous learners wait for
one another in every step; the second hangs when one learner alone gets the signal. Here
the learner that gets the signal stops, and the coordinator tells the others.
"""

from functools import partial
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException


def handle_locally(trainer: pl.Trainer) -> None:
    """Replaces both broadcasts, until `restore`."""
    # Partial functions of this module and not lambdas: a Trainer may be pickled.
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    vars(loop)["_broadcast_sigterm_tensor"] = partial(_stop_if_signalled, trainer)
    vars(connector)["_sigterm_notifier_fn"] = partial(_note_signal, trainer)


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


def _note_signal(trainer: pl.Trainer, signum: int, frame: object) -> None:
    connector, launcher = trainer._signal_connector, trainer.strategy.launcher
    if not connector.received_sigterm and launcher is not None:
        launcher.kill(signum)  # pyright: ignore[reportArgumentType]
    connector.received_sigterm = True
