"""What monitors count after a resume, with as many learners as before or others."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_adpsgd.callbacks.clock import Counts, Monitor, dealt

MODULE: Any = LightningModule()
FAST, SLOW = Counts(166, 9.0), Counts(34, 8.0)


class Gathers:
    """The part of a strategy that monitors ask, with given counts of all learners."""

    root_device = torch.device("cpu")

    def __init__(self, rows: list[Counts], gossips: bool = True) -> None:
        self.rows, self._gossips = rows, gossips

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.rows, dtype=mine.dtype)

    def gossip_statistics(self) -> Any:
        return SimpleNamespace() if self._gossips else None


def trainer_of(rank: int, num_learners: int, strategy: Any = None) -> Any:
    state = SimpleNamespace(status=TrainerStatus.RUNNING, fn="fit")
    return SimpleNamespace(
        global_rank=rank,
        world_size=num_learners,
        global_step=0,
        strategy=strategy,
        state=state,
        sanity_checking=False,
    )


def begun(trainer: Any, checkpoint: dict[str, Any] | None = None) -> Monitor:
    """A monitor at the start of a training, as Lightning calls it."""
    monitor = Monitor()
    monitor.setup(trainer, MODULE, "fit")
    if checkpoint is not None:
        monitor.on_load_checkpoint(trainer, MODULE, copy.deepcopy(checkpoint))
    monitor.on_train_start(trainer, MODULE)
    return monitor


def set_to(monitor: Monitor, counts: Counts) -> None:
    clock = monitor.clock
    clock.stop()
    clock.samples, clock._seconds = counts


def saved(monitor: Monitor, trainer: Any) -> dict[str, Any]:
    checkpoint: dict[str, Any] = {}
    monitor.on_save_checkpoint(trainer, MODULE, checkpoint)
    return checkpoint


def of_unequal_learners() -> dict[str, Any]:
    """What learner 0 saves, the faster of two."""
    trainer = trainer_of(0, 2, Gathers([FAST, SLOW]))
    monitor = begun(trainer)
    set_to(monitor, FAST)
    return saved(monitor, trainer)


def resumed(checkpoint: dict[str, Any], num_learners: int) -> list[Counts]:
    """The counts with which each learner continues."""
    trainers = [trainer_of(rank, num_learners) for rank in range(num_learners)]
    return [begun(one, checkpoint).clock._begun for one in trainers]


def test_as_many_learners_continue_each_from_its_own_counts() -> None:
    assert resumed(of_unequal_learners(), 2) == [FAST, SLOW]


def test_steps_that_an_older_file_holds_are_left_out() -> None:
    [key] = of_unequal_learners()
    assert resumed({key: [(83, *FAST), (17, *SLOW)]}, 2) == [FAST, SLOW]


@pytest.mark.parametrize("num_learners", [1, 2, 3, 4, 7])
def test_any_number_of_learners_keeps_the_sums(num_learners: int) -> None:
    counts = resumed(of_unequal_learners(), num_learners)
    assert sum(one.samples for one in counts) == 200
    assert max(one.seconds for one in counts) == 9.0


def test_other_learners_continue_from_equal_shares() -> None:
    assert dealt([FAST, SLOW], 3) == [
        Counts(67, 9.0),
        Counts(67, 9.0),
        Counts(66, 9.0),
    ]


def test_a_second_resume_keeps_the_sums_too() -> None:
    once = resumed(of_unequal_learners(), 3)
    trainer = trainer_of(0, 3, Gathers([Counts(100, 10.0), *once[1:]]))
    checkpoint = saved(begun(trainer, of_unequal_learners()), trainer)
    counts = resumed(checkpoint, 2)
    assert sum(one.samples for one in counts) == 100 + once[1].samples + once[2].samples


@pytest.mark.parametrize("gossips", [True, False])
def test_a_save_to_which_not_all_come_gathers_nothing(gossips: bool) -> None:
    """Learners that gossip are asked unless one has failed; others never."""
    strategy = Gathers([FAST, SLOW], gossips)
    trainer = trainer_of(0, 2, strategy)
    monitor = begun(trainer)
    set_to(monitor, FAST)
    monitor.on_validation_end(trainer, MODULE)
    set_to(monitor, Counts(168, 9.5))
    strategy.rows = []
    if gossips:
        trainer.state.status = TrainerStatus.INTERRUPTED
    counts = resumed(saved(monitor, trainer), 2)
    assert counts == [Counts(168, 9.5), Counts(36, 8.5)]


def test_without_counts_in_a_checkpoint_all_count_from_zero() -> None:
    assert resumed({}, 2) == [Counts(), Counts()]


def test_what_this_fit_did_is_told_from_what_a_checkpoint_brought() -> None:
    monitor = begun(trainer_of(1, 2), of_unequal_learners())
    set_to(monitor, Counts(40, 9.0))
    assert monitor.clock.fit_seconds == 1.0


def test_a_save_before_the_training_begins_keeps_what_was_loaded() -> None:
    trainer, monitor = trainer_of(0, 2, Gathers([], gossips=False)), Monitor()
    monitor.on_load_checkpoint(trainer, MODULE, of_unequal_learners())
    assert resumed(saved(monitor, trainer), 2) == [FAST, SLOW]


def test_an_evaluation_that_loads_a_checkpoint_leaves_the_counts() -> None:
    trainer = trainer_of(0, 2, Gathers([FAST, SLOW]))
    monitor = begun(trainer)
    set_to(monitor, FAST)
    saved: dict[str, Any] = {}
    monitor.on_save_checkpoint(trainer, MODULE, saved)
    set_to(monitor, Counts(180, 10.0))
    monitor.setup(trainer, MODULE, "test")
    monitor.on_load_checkpoint(trainer, MODULE, saved)
    assert (monitor.clock.samples, monitor.clock.seconds) == (180, 10.0)
