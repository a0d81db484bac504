"""Lightning's handling of SIGTERM, without its collectives over all learners.

Before each training batch, and again inside the signal handler, Lightning broadcasts
from learner 0 whether SIGTERM came. The first broadcast makes asynchronous learners
wait for one another in every step. The second hangs if only one learner gets the
signal. Here the learner that gets the signal stops, and the coordinator tells the
others. The learners of one island step together and stop at the same step.
"""

from collections.abc import Callable
from functools import partial

import lightning.pytorch as pl
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
