"""Actions of Lightning that are due at a time, for learners at different steps.

With `max_time`, `ModelCheckpoint(train_time_interval=...)` and
`val_check_interval="..."`, Lightning reads a clock after each batch. Learner 0's costs
a collective in every step; with their own, learners act at different steps. Here only
the clock of learner 0 is read, and the others are asked only when an action is due. It
happens at a step boundary of all learners (`agreement`), which comes last in a batch,
after everything that Lightning does at certain steps.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_adpsgd.strategy.agreement import Agreement
from lightning_adpsgd.strategy.compatibility import (
    callbacks_of,
    save_period,
    timers_of,
    validates_by_time,
)
from lightning_adpsgd.strategy.job import END_OF_TRAINING, Job
from lightning_adpsgd.strategy.overrides import Overrides

_Asks = Callable[[_DataFetcher], bool]


class _StopClock:
    """A `Timer` that ends the training.

    After a stop, the learners validate, end the epoch and end the training. The plan
    says which of these have meetings, which may depend on the number of the epoch.
    """

    def __init__(self, trainer: pl.Trainer, timer: Timer) -> None:
        self._trainer, self._timer = trainer, timer

    def due(self) -> bool:
        left = self._timer.time_remaining()
        return left is not None and left <= 0 and not self._trainer.should_stop

    def plan(self) -> str | None:
        loop = self._trainer.fit_loop
        if not loop._can_stop_early:
            return None
        validates = loop.epoch_loop._should_check_val_epoch()
        return f"validate {validates} {_end_of_epoch(self._trainer)}"

    def act(self) -> None:
        self._trainer.should_stop = True
        if self._timer._verbose:
            rank_zero_info(
                f"Time limit reached after {self._timer.time_elapsed():.0f} s: all "
                "learners stop."
            )


class _SaveClock:
    """A `ModelCheckpoint` with `train_time_interval`."""

    def __init__(self, trainer: pl.Trainer, checkpoint: ModelCheckpoint) -> None:
        self._trainer, self.checkpoint = trainer, checkpoint
        self._arguments: tuple[Any, ...] = ()
        self._last = -math.inf

    def hold(self, *arguments: Any) -> None:
        """Stands in for the callback's hook; `act` calls the hook itself."""
        self._arguments = arguments

    def due(self) -> bool:
        interval = save_period(self.checkpoint, "train_time_interval")
        last: Any = self.checkpoint._last_time_checked  # set when training starts
        return time.monotonic() - max(self._last, last) >= interval.total_seconds()

    def plan(self) -> str | None:
        saved = self.checkpoint._should_skip_saving_checkpoint(self._trainer)
        return None if saved or _at_last_batch(self._trainer) else "save"

    def act(self) -> None:
        self._last = time.monotonic()
        hook = type(self.checkpoint).on_train_batch_end
        hook(self.checkpoint, *self._arguments)


class _ValidationClock:
    """A `val_check_interval` that is a time."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, self.wanted = trainer, False

    def due(self) -> bool:
        trainer = vars(self._trainer)
        since = time.monotonic() - trainer["_last_val_time"]
        return since >= trainer["_val_check_time_interval"]

    def plan(self) -> str | None:
        loop = self._trainer.fit_loop.epoch_loop
        here = loop._should_check_val_epoch() and not _at_last_batch(self._trainer)
        return "validate" if here else None

    def act(self) -> None:
        self.wanted = True


_Clock = _StopClock | _SaveClock | _ValidationClock
"""An action that is due at a time.

Learner 0 asks whether it is `due`. `plan` describes what it would lead to at this step
boundary; it is None if the action cannot happen here. `act` performs the action; all
learners call it.
"""


class BatchEnd:
    """The end of each batch, where clocks may act.

    It replaces the loop's check whether to validate, which Lightning makes after
    everything else in a batch.
    """

    def __init__(self, trainer: pl.Trainer, job: Job) -> None:
        self._trainer, self._job = trainer, job
        self.saves = [_SaveClock(trainer, c) for c in _timed_checkpoints(trainer)]
        self._stops = [_StopClock(trainer, timer) for timer in timers_of(trainer)]
        timed = validates_by_time(trainer)
        self._validation = _ValidationClock(trainer) if timed else None
        # In this order: saves that are always due must not keep a stop from its turn.
        found = (*self._stops, *self.saves, self._validation)
        self.clocks: list[_Clock] = [clock for clock in found if clock is not None]
        num_learners = dist.get_world_size()
        self._agreement = Agreement(job.store, num_learners, job.coordinator)
        self._is_learner_0, self._answered_to = dist.get_rank() == 0, -1
        self._is_outside = False
        # A step boundary after which this learner acts as it would after a stop.
        self._stop_here: tuple[tuple[int, ...], str | None] | None = None

    def __call__(self, asks: _Asks, data_fetcher: _DataFetcher) -> bool:
        """Whether to validate here; `asks` is Lightning's own check."""
        self._stop_here = None
        with self._job.failures.named():
            self._propose(self.clocks)
            if self._is_time_to_answer():
                self._answer_all()
        validates = self._validates(partial(asks, data_fetcher))
        self._note_what_a_stop_would_lead_to(validates)
        return validates

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """A context of an epoch of batches, outside of which no batch ends."""
        self._is_outside = False
        self._agreement.note_away(False)
        yield
        self._is_outside = True
        self._agreement.note_away(True)

    def while_waiting(self, meeting: str) -> None:
        """Answers proposals while this learner waits in a meeting."""
        self._agreement.note_away(False)
        plan = self._plan_of_a_stop_in(meeting)
        if plan is not None:
            self._propose(self._stops)
        if (proposal := self._agreement.pending()) is not None:
            self._answered_to = int(proposal)
            stops = isinstance(self.clocks[self._answered_to], _StopClock)
            self._agreement.answer(plan if stops else None)
        self._act_if_agreed()

    def when_met(self) -> None:
        """Acts if the last learner has agreed before it came."""
        self._act_if_agreed()
        self._agreement.give_up()
        self._agreement.note_away(self._is_outside)

    def _act_if_agreed(self) -> None:
        if self._agreement.decided():
            self.clocks[self._answered_to].act()

    def _propose(self, clocks: Sequence[_Clock]) -> None:
        for clock in clocks if self._is_learner_0 else ():
            if clock.due() and clock.plan() is not None:
                self._agreement.propose(str(self.clocks.index(clock)))

    def _is_time_to_answer(self) -> bool:
        """Whether to answer now; equal in all learners of a super-learner."""
        pending = self._agreement.pending() is not None
        group = self._job.groups.gradients
        if group is None:
            return pending
        flag = torch.tensor(int(pending), device=self._trainer.strategy.root_device)
        dist.broadcast(flag, dist.get_global_rank(group, 0), group)
        return bool(flag)

    def _answer_all(self) -> None:
        while (proposal := self._agreement.pending(at_once=True)) is not None:
            clock = self.clocks[int(proposal)]
            plan = clock.plan()
            if plan is None:
                return
            if self._agreement.agree(plan):
                clock.act()

    def _validates(self, asks: Callable[[], bool]) -> bool:
        if self._validation is None:
            return asks()
        trainer = vars(self._trainer)
        last = trainer["_last_val_time"]
        wanted, self._validation.wanted = self._validation.wanted, False
        trainer["_last_val_time"] = -math.inf if wanted else math.inf
        try:
            return asks()
        finally:
            trainer["_last_val_time"] = last

    def _note_what_a_stop_would_lead_to(self, validates: bool) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        same = validates == loop._should_check_val_epoch()
        if self._stops and same and (validates or loop._is_training_done):
            self._stop_here = self._place(), self._stops[0].plan()

    def _plan_of_a_stop_in(self, meeting: str) -> str | None:
        if self._stop_here is None:
            return None
        (*before, epochs), plan = self._stop_here
        *now, epochs_now = self._place()
        # A further batch, epoch or reload of data makes the plan void.
        ends = meeting == END_OF_TRAINING
        return plan if before == now and (ends or epochs == epochs_now) else None

    def _place(self) -> tuple[int, ...]:
        loop = self._trainer.fit_loop
        batches = loop.epoch_loop.batch_progress.total.ready
        epochs = loop.epoch_progress.current.completed
        return self._agreement.position, batches, epochs


def follow_clocks(
    trainer: pl.Trainer, job: Job, overrides: Overrides
) -> BatchEnd | None:
    """Makes a Trainer's clocks act in all learners at once; returns work for waits."""
    loop = trainer.fit_loop.epoch_loop
    if not job.asynchronous:
        # In lockstep, Lightning itself asks learner 0, except about validation.
        if validates_by_time(trainer):
            ask = partial(_ask_learner_0, trainer)
            overrides.wrap(loop, "_should_check_val_fx", ask)
        return None
    batch_end = BatchEnd(trainer, job)
    if not batch_end.clocks:
        return None
    overrides.wrap(loop, "_should_check_val_fx", batch_end)
    for timer in timers_of(trainer):
        # The hook of the base class does nothing.
        hook = partial(Callback.on_train_batch_end, timer)
        overrides.replace(timer, "on_train_batch_end", hook)
    for clock in batch_end.saves:
        overrides.replace(clock.checkpoint, "on_train_batch_end", clock.hold)
    return batch_end


def describe_clocks(trainer: pl.Trainer) -> str:
    """This learner's timed callbacks and options, in their order.

    Learners with different ones would wait for an answer that never comes.
    """
    found = [
        type(one).__name__
        for one in callbacks_of(trainer, Callback)
        if isinstance(one, Timer) or one in _timed_checkpoints(trainer)
    ]
    found += ["val_check_interval"] if validates_by_time(trainer) else []
    return ", ".join(found) or "none"


def _ask_learner_0(trainer: pl.Trainer, asks: _Asks, fetcher: _DataFetcher) -> bool:
    return trainer.strategy.broadcast(asks(fetcher))


def _timed_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    savers = callbacks_of(trainer, ModelCheckpoint)
    return [one for one in savers if save_period(one, "train_time_interval")]


def _at_last_batch(trainer: pl.Trainer) -> bool:
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def _end_of_epoch(trainer: pl.Trainer) -> list[Any]:
    """What happens at the end of this epoch and not at the end of every epoch."""
    epoch, saves = trainer.current_epoch, list[Any]()
    for one in callbacks_of(trainer, ModelCheckpoint):
        if every := save_period(one, "every_n_epochs"):
            # It saves no step twice, and none before the first.
            is_saved = one._last_global_step_saved == trainer.global_step
            saves.append((epoch + 1) % every == 0 and not is_saved)
    averages = callbacks_of(trainer, StochasticWeightAveraging)
    return [*saves, epoch] if averages else saves
