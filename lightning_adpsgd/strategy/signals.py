"""Lightning's handling of SIGTERM, without its collectives over all learners.

Before each training batch, and again inside the signal handler, Lightning broadcasts
from learner 0 whether SIGTERM came. The first broadcast makes asynchronous learners
wait for one another in every step. The second hangs if only one learner gets the
signal. Here the learner that gets the signal stops, and the coordinator tells the
others. The learners of one island step together and stop at the same step, and so do
those of a job that is one super-learner.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_adpsgd.strategy.job import Job
from lightning_adpsgd.strategy.overrides import Overrides


def handle_signals(
    trainer: pl.Trainer, together: Job | None, overrides: Overrides
) -> None:
    """Replaces both broadcasts; learners of `together` agree on their last step."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    check, notify = partial(_stop_if_signalled, trainer), partial(_note, trainer)
    if together is not None:
        notify = partial(_ask_to_leave, trainer, together)
        # The last call in a batch before Lightning checks for a signal.
        end = partial(_agree_at_end, trainer, together)
        overrides.wrap(loop, "_save_loggers_on_train_batch_end", end)
    overrides.replace(loop, "_broadcast_sigterm_tensor", check)
    overrides.replace(connector, "_sigterm_notifier_fn", notify)


def end_alone(trainer: pl.Trainer, overrides: Overrides) -> None:
    """Replaces the broadcast of the handler: a learner ends, and the others hear it."""
    notify = partial(_note, trainer)
    overrides.replace(trainer._signal_connector, "_sigterm_notifier_fn", notify)


@final
class SharedStop:
    """SIGTERM to learners that are one super-learner: all stop at the same step.

    They agree after each batch. A signal after the last one ends nothing, because the
    others come to the end of `fit`, and may wait for this learner there.

    Args:
        together: context that explains why a collective of this name fails.

    Attributes:
        is_told: whether this learner has received SIGTERM.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        overrides: Overrides,
        together: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._trainer, self.is_told = trainer, False
        self._together = together
        loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
        check = partial(_stop_if_signalled, trainer)
        overrides.replace(loop, "_broadcast_sigterm_tensor", check)
        overrides.replace(connector, "_sigterm_notifier_fn", self._note)
        overrides.wrap(loop, "_save_loggers_on_train_batch_end", self._agree_at_end)

    def _note(self, signum: int, frame: object) -> None:
        if not self.is_told:
            _pass_on(self._trainer, signum)
        self.is_told = True

    def _agree_at_end(self, save: Callable[[], None]) -> None:
        save()
        device = self._trainer.strategy.root_device
        told = torch.tensor(int(self.is_told), device=device)
        with self._together("all_reduce"):
            dist.all_reduce(told, dist.ReduceOp.MAX)
        if told.item():
            self._trainer._signal_connector.received_sigterm = True

    def tell_lightning(self) -> None:
        """Notes a signal in the Trainer after the end, when it stops no loop."""
        if self.is_told:
            self._trainer._signal_connector.received_sigterm = True


def _stop_if_signalled(trainer: pl.Trainer) -> None:
    if trainer.received_sigterm:
        raise SIGTERMException


def _agree_at_end(trainer: pl.Trainer, job: Job, save: Callable[[], None]) -> None:
    save()
    if job.island is not None and job.island.engine.leaves:
        trainer._signal_connector.received_sigterm = True


def _ask_to_leave(trainer: pl.Trainer, job: Job, signum: int, frame: object) -> None:
    if job.island is not None:
        _pass_on(trainer, signum)
        job.island.ask_to_leave()
    else:
        _note(trainer, signum, frame)


def _note(trainer: pl.Trainer, signum: int, frame: object) -> None:
    connector = trainer._signal_connector
    if not connector.received_sigterm:
        _pass_on(trainer, signum)
    connector.received_sigterm = True


def _pass_on(trainer: pl.Trainer, signum: int) -> None:
    if (launcher := trainer.strategy.launcher) is not None:
        launcher.kill(signum)  # pyright: ignore[reportArgumentType]
