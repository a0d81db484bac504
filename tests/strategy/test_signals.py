"""What a learner does that is told to end, and who else hears of it."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_adpsgd.strategy.overrides import Overrides
from lightning_adpsgd.strategy.signals import handle_signals


class Signalled:
    """The parts of a Trainer that a signal reaches, and the processes that it began."""

    def __init__(self, island: Any = None, together: bool = False) -> None:
        self.passed_on, self.asked = list[int](), list[str]()
        launcher = SimpleNamespace(kill=self.passed_on.append)
        self.strategy = SimpleNamespace(launcher=launcher)
        self._signal_connector = _Connector()
        self.fit_loop: Any = SimpleNamespace(epoch_loop=_EpochLoop())
        self.island = island
        job: Any = self if together else None
        trainer: Any = self
        handle_signals(trainer, job, Overrides())

    @property
    def received_sigterm(self) -> bool:
        return self._signal_connector.received_sigterm

    def signal(self) -> None:
        self._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)

    def begin_batch(self) -> None:
        self.fit_loop.epoch_loop._broadcast_sigterm_tensor()

    def end_batch(self) -> None:
        self.fit_loop.epoch_loop._save_loggers_on_train_batch_end()


class _Connector:
    received_sigterm = False

    def _sigterm_notifier_fn(self, *_: Any) -> None:
        raise AssertionError("a collective")


class _EpochLoop:
    num_saved = 0

    def _broadcast_sigterm_tensor(self) -> None:
        raise AssertionError("a collective")

    def _save_loggers_on_train_batch_end(self) -> None:
        self.num_saved += 1


def test_a_learner_ends_at_its_next_batch_and_tells_those_it_began_once() -> None:
    learner = Signalled()
    learner.begin_batch()
    learner.signal()
    learner.signal()
    assert learner.passed_on == [signal.SIGTERM]
    with pytest.raises(SIGTERMException):
        learner.begin_batch()


def island(leaves: bool) -> Any:
    asked = list[bool]()
    return SimpleNamespace(
        asked=asked,
        ask_to_leave=lambda: asked.append(True),
        engine=SimpleNamespace(leaves=leaves),
    )


def test_learners_of_an_island_leave_at_the_batch_that_they_agree_on() -> None:
    learner = Signalled(island(leaves=False), together=True)
    learner.signal()
    assert learner.island.asked == [True]
    assert learner.passed_on == [signal.SIGTERM]
    learner.end_batch()
    learner.begin_batch()  # the others are not as far
    learner.island.engine.leaves = True
    learner.end_batch()
    assert learner.fit_loop.epoch_loop.num_saved == 2
    with pytest.raises(SIGTERMException):
        learner.begin_batch()


def test_a_learner_that_is_no_island_yet_ends_by_itself() -> None:
    learner = Signalled(None, together=True)
    learner.signal()
    learner.end_batch()
    assert learner.received_sigterm
