"""When the clocks of a Trainer act, and in which of its meetings they may."""

import math
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.strategy.clocks import BatchEnd, describe_clocks
from lightning_adpsgd.strategy.compatibility import timers_of
from lightning_adpsgd.strategy.job import END_OF_TRAINING

HOUR = timedelta(hours=1)


class Played:
    """A Trainer between two batches, and the job of its only learner."""

    def __init__(self, *callbacks: Any, by_time: bool = False) -> None:
        self.is_last = self.should_stop = self.training_done = False
        self.validates, self.can_stop = True, True
        self.callbacks, self.current_epoch, self.global_step = callbacks, 2, 7
        self._val_check_time_interval = 60.0 if by_time else None
        self._last_val_time = time.monotonic()
        batches = SimpleNamespace(total=SimpleNamespace(ready=7))
        epochs = SimpleNamespace(current=SimpleNamespace(completed=2))
        self.batches, self.epochs = batches.total, epochs.current
        self.fit_loop: Any = SimpleNamespace(epoch_progress=epochs)
        self.fit_loop.epoch_loop = SimpleNamespace(
            batch_progress=batches, _should_check_val_epoch=lambda: self.validates
        )
        self.coordinator: Any = SimpleNamespace(
            num_meetings=4, wait_until=lambda condition: condition()
        )
        self.job: Any = SimpleNamespace(
            store=HashStore(),
            coordinator=self.coordinator,
            groups=SimpleNamespace(gradients=None),
            failures=SimpleNamespace(named=nullcontext),
        )

    def end(self) -> BatchEnd:
        return BatchEnd(self._so_far(), self.job)

    def _so_far(self) -> Any:
        loop = self.fit_loop
        loop._can_stop_early = self.can_stop
        loop.epoch_loop._is_training_done = self.training_done
        loop.epoch_loop.batch_progress.is_last_batch = self.is_last
        return self

    def finish_batch(self, end: BatchEnd, asks: Any = lambda fetcher: False) -> bool:
        self._so_far()
        return end(asks, None)  # pyright: ignore


@pytest.fixture(autouse=True)
def only_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


def timed_checkpoint(age_s: float) -> Any:
    """A callback that last saved so many seconds ago, and notes that it is called."""

    class Noted(ModelCheckpoint):
        saves = 0

        def _should_skip_saving_checkpoint(self, trainer: Any) -> bool:
            return False

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            self.saves += 1

    saver = Noted(train_time_interval=HOUR)
    saver._last_time_checked = time.monotonic() - age_s
    return saver


@pytest.mark.parametrize(("age_s", "saves"), [(1.0, 0), (3601.0, 1)])
def test_a_timed_checkpoint_saves_once_an_interval(age_s: float, saves: int) -> None:
    saver = timed_checkpoint(age_s)
    played = Played(saver)
    end = played.end()
    for _ in range(3):
        played.finish_batch(end)
    assert saver.saves == saves


def test_at_the_last_batch_no_clock_but_that_of_the_end_acts() -> None:
    """A save or a validation follows anyway, with meetings of its own."""
    saver = timed_checkpoint(3601.0)
    played = Played(saver, by_time=True)
    played._last_val_time, played.is_last = -math.inf, True
    end = played.end()
    validates = played.finish_batch(end, lambda _: played._last_val_time == -math.inf)
    assert (validates, saver.saves) == (False, 0)
    played.is_last = False
    played.finish_batch(end)
    assert saver.saves == 1


def test_a_validation_by_time_comes_once_and_leaves_lightnings_time() -> None:
    played = Played(by_time=True)
    last = played._last_val_time = time.monotonic() - 61.0
    end, seen = played.end(), list[float]()

    def asks(fetcher: Any) -> bool:
        seen.append(played._last_val_time)
        return seen[-1] == -math.inf

    assert played.finish_batch(end, asks)
    assert played._last_val_time == last
    played._last_val_time = time.monotonic()  # as Lightning does after a validation
    assert not played.finish_batch(end, asks)
    assert seen == [-math.inf, math.inf]


def ended_timer() -> Timer:
    timer: Any = Timer(timedelta(seconds=1), verbose=False)
    timer.time_remaining = lambda *_: -1.0
    return timer


def test_a_timer_stops_as_soon_as_the_training_may_end() -> None:
    played = Played(ended_timer())
    played.can_stop = False  # `min_steps` is not reached
    end = played.end()
    played.finish_batch(end)
    assert not played.should_stop
    played.can_stop = True
    played.finish_batch(end)
    assert played.should_stop


def test_a_plan_to_stop_tells_what_the_end_of_the_epoch_saves() -> None:
    every = [ModelCheckpoint(every_n_epochs=n) for n in (1, 2, 3)]
    played = Played(ended_timer(), *every)
    (clock,) = played.end().clocks
    assert clock.plan() == "validate True [True, False, True]"  # in the third epoch


def test_a_plan_to_stop_leaves_out_a_checkpoint_that_is_there() -> None:
    played = Played(ended_timer(), saver := ModelCheckpoint(every_n_epochs=1))
    (clock,) = played.end().clocks
    saver._last_global_step_saved = played.global_step
    assert clock.plan() == "validate True [False]"


def test_a_learner_that_waits_is_busy_but_for_a_stop_that_leads_there() -> None:
    played = Played(timed_checkpoint(1.0), ended_timer())
    played.should_stop = True  # nothing is due
    end = played.end()
    played.finish_batch(end, lambda fetcher: True)
    answers = list[Any]()
    end._agreement.answer = answers.append  # pyright: ignore
    for number in "10":  # of the checkpoint, and of the timer
        end._agreement.pending = lambda number=number: number  # pyright: ignore
        end.while_waiting(END_OF_TRAINING)
    assert answers == [None, "validate True []"]
    played.batches.ready += 1  # a later batch leads elsewhere
    end.while_waiting(END_OF_TRAINING)
    assert answers[-1] is None


def test_in_a_later_epoch_a_stop_leads_to_the_end_of_the_training_alone() -> None:
    played = Played(ended_timer())
    played.should_stop = True
    end = played.end()
    played.finish_batch(end, lambda fetcher: True)
    played.epochs.completed += 1
    assert end._plan_of_a_stop_in("validation") is None
    assert end._plan_of_a_stop_in(END_OF_TRAINING) == "validate True []"


def test_what_a_meeting_has_interrupted_is_proposed_again_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    played = Played(timed_checkpoint(3601.0))
    end = played.end()
    end._agreement.propose("0")
    end._agreement.answer("save")  # the other has not answered
    end.when_met()
    end._agreement.propose("0")
    assert end._agreement._proposal is None
    played.coordinator.num_meetings += 1
    end._agreement.propose("0")
    assert end._agreement.pending() == "0"


def test_clocks_are_named_as_they_are_found() -> None:
    trainer: Any = Played(Timer(HOUR), ModelCheckpoint(), timed_checkpoint(1.0))
    assert describe_clocks(trainer) == "Timer, Noted"
    trainer = Played(by_time=True)
    assert describe_clocks(trainer) == "val_check_interval"
    assert describe_clocks(Played()._so_far()) == "none"


def test_timers_by_epochs_and_without_a_limit_are_lightnings_own() -> None:
    timers = Timer(HOUR, interval="epoch"), Timer(), Timer(HOUR)
    trainer: Any = Played(*timers)
    assert timers_of(trainer) == [timers[2]]
