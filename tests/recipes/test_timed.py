"""Training for a time: its schedule, its slow learner, its copies, what is refused."""

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Timer

from lightning_adpsgd.asr.schedule import GlobalSampleLR, PaperSchedule
from recipes.hybrid.pipeline.fingerprint import fingerprint_of
from recipes.hybrid.pipeline.groups import RaceSettings
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.stages import STAGES
from recipes.hybrid.training import beside, timed
from recipes.hybrid.training.timed import (
    COPIES,
    COPIES_AT,
    Copies,
    Pace,
    TimedSchedule,
    consensus_copies,
    timed_callbacks,
    trainer_options,
)

TRAIN = next(stage for stage in STAGES if stage.name == "train")


def settings(**race: float) -> Settings:
    return Settings(corpus=Path("c"), out=Path("o"), race=RaceSettings(**race))


def begin_batch(callback: Any, trainer: Any, module: Any = None) -> None:
    callback.on_train_batch_start(trainer, module, None, 0)


# --- settings


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("race.pause_s=0.1",), "`pause_s` must be 0 where `seconds` is 0, got 0.1"),
        (("race.step_s=0.1",), "`step_s` must be 0 where `seconds` is 0, got 0.1"),
        (("race.seconds=-1",), "`seconds` must be at least 0, got -1"),
        (
            ("race.seconds=5", "train.validate_every=2"),
            r"`train.validate_every` must be 1 with `race.seconds=5`, got 2",
        ),
        (("race.seconds=5", "train.checkpoint_minutes=1"), "must be 0 with .*got 1"),
        (("race.seconds=5", "train.num_nodes=2"), "must be 1 with .*got 2"),
    ],
)
def test_a_race_that_cannot_be_run_is_refused(changes, problem):
    with pytest.raises(ValueError, match=problem):
        override(settings(), *changes)


def test_only_a_training_for_a_time_depends_on_it(tmp_path):
    """Stamps of trainings by epochs, older than the race, stay valid."""

    def depends_on(**race: float) -> dict[str, Any]:
        stage = TRAIN._replace(inputs=())
        return fingerprint_of(stage, settings(**race))["settings"]

    assert depends_on().keys() == {"seed", "train"}
    assert depends_on(seconds=5)["timed"] == {"seconds": 5, "step_s": 0, "pause_s": 0}
    assert depends_on(seconds=5) != depends_on(seconds=5, pause_s=0.1)


def test_a_training_by_epochs_has_its_epochs_and_no_callbacks_of_a_race():
    by_epochs = trainer_options(settings())
    assert by_epochs == {"max_epochs": 16, "check_val_every_n_epoch": 1}
    assert timed_callbacks(settings(), Path("o")) == []


def test_a_training_for_a_time_never_meets_at_the_end_of_an_epoch():
    options = trainer_options(settings(seconds=5))
    assert options["max_epochs"] == -1
    assert options["check_val_every_n_epoch"] is None
    assert options["val_check_interval"] > 1e9


# --- the schedule


def scheduled(elapsed: float, seconds: float, others: float = 0.0) -> float:
    """The rate of a step at a time; another learner's clock is ahead by `others`."""
    schedule = PaperSchedule(1000, 64, 0.2, 16, warmup_epochs=2, decay=0.8)
    weights = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(weights, lr=0.2)
    scheduler = GlobalSampleLR(optimizer, schedule)
    timer = Timer(timedelta(seconds=seconds))
    timer._offset = elapsed
    trainer = SimpleNamespace(
        lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)],
        strategy=SimpleNamespace(
            root_device=torch.device("cpu"), reduce=lambda share: share + others / 2
        ),
    )
    begin_batch(TimedSchedule(timer, epochs=16), trainer)
    optimizer.step()
    scheduler.step()
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("share", [0.0, 0.06, 0.125, 0.3, 0.5, 0.99, 1.2])
def test_the_rate_is_that_of_the_same_share_of_the_epochs(share):
    schedule = PaperSchedule(1000, 64, 0.2, 16, warmup_epochs=2, decay=0.8)
    epoch = 16 * min(1.0, share)
    assert scheduled(share * 40.0, 40.0) == schedule.rate_at_epoch(epoch + 0.064)


def test_learners_that_allreduce_take_the_mean_of_their_clocks():
    assert scheduled(2.0, 40.0, others=0.3) == scheduled(8.0, 40.0)


# --- the pace


class Sleeper:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("rank", "computed", "backward_at", "ends_at"),
    [(0, 0.02, 0.0, 0.05), (3, 0.02, 0.2, 0.25), (0, 0.07, 0.0, 0.07)],
)
def test_steps_last_as_long_as_those_of_machines_of_other_speeds(
    monkeypatch, rank, computed, backward_at, ends_at
):
    sleeper, pace = Sleeper(), Pace(0.05, 0.2)
    monkeypatch.setattr(timed, "time", sleeper)
    trainer: Any = SimpleNamespace(global_rank=rank, world_size=4)
    begin_batch(pace, trainer)
    pace.on_before_backward(trainer, None, None)  # pyright: ignore
    assert sleeper.now == backward_at
    sleeper.now += computed
    pace.on_after_backward(trainer, None)  # pyright: ignore
    assert sleeper.now == pytest.approx(ends_at)


# --- copies


class Clock:
    """A learner's clock, by hand."""

    def __init__(self, seconds: float, samples: int) -> None:
        self.seconds, self.samples = seconds, samples


def copy_at(folder: Path, rank: int, module: Any, *times: float) -> None:
    copies = Copies(10.0, folder / COPIES)
    for step, seconds in enumerate(times, 1):
        copies.clock = Clock(seconds, 16 * step)  # pyright: ignore
        begin_batch(copies, SimpleNamespace(global_rank=rank, global_step=step), module)


def linear(value: float) -> torch.nn.Linear:
    module = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(module.weight, value)
    return module


def test_a_copy_is_the_mean_of_all_learners_weights_at_that_share_of_the_time(tmp_path):
    copy_at(tmp_path, 0, linear(1.0), 0.5, 1.1, 1.2, 2.5)
    copy_at(tmp_path, 1, linear(4.0), 1.5, 2.1)
    first, second = consensus_copies(tmp_path, num_learners=2)
    assert float(first.weights["weight"]) == float(second.weights["weight"]) == 2.5
    assert (first.steps, first.seconds, first.samples) == (2, (1.1 + 1.5) / 2, 48)
    assert (second.steps, second.samples) == (4, 64 + 32)


def test_a_copy_that_one_learner_lacks_is_left_out(tmp_path):
    copy_at(tmp_path, 0, linear(1.0), *(10 * share for share in COPIES_AT))
    copy_at(tmp_path, 1, linear(1.0), 1.5)
    assert len(list(consensus_copies(tmp_path, num_learners=2))) == 1


def test_a_copy_does_not_hold_the_vector_that_it_is_a_view_of(tmp_path):
    module, vector = linear(1.0), torch.zeros(1_000_000)
    module.weight.data = vector[:1].view(1, 1)
    copy_at(tmp_path, 0, module, 1.5)
    [path] = (tmp_path / COPIES).iterdir()
    assert path.stat().st_size < 100_000


# --- what else ran


def write_stat(path: Path, *ticks: int) -> None:
    path.write_text("cpu  " + " ".join(map(str, ticks)) + " 0 0\ncpu0 1 2 3\n")


def test_cores_that_others_kept_busy_are_those_of_the_machine_less_our_own(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(beside, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(beside.os, "sysconf", lambda _: 100)
    # Not of the whole process, in which other threads look at the clock, too.
    clock = SimpleNamespace(monotonic=iter([0.0, 10.0]).__next__)
    monkeypatch.setattr(beside, "time", clock)
    monkeypatch.setattr(beside, "_own_s", iter([1.0, 7.0]).__next__)
    write_stat(tmp_path / "stat", 1000, 0, 1000, 5000, 50, 0, 0, 0)
    others = beside.others_since_now()
    # 10 s busy (user, system, stolen), 9 s idle or waiting for a disk.
    write_stat(tmp_path / "stat", 1500, 0, 1300, 5850, 100, 0, 0, 200)
    assert others() == pytest.approx((10.0 - 6.0) / 10.0)


def test_where_the_system_does_not_tell_no_speed_can_be_told(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "_STAT", tmp_path / "none")
    assert beside.others_since_now()() is None
    assert not beside.is_quiet(None)


@pytest.mark.parametrize(("others", "quiet"), [(0.0, True), (0.1, True), (0.2, False)])
def test_a_twentieth_of_the_cores_may_be_busy(others, quiet):
    assert beside.is_quiet(others, cores=2) is quiet


def test_the_own_processor_time_grows_with_work():
    others = beside.others_since_now()
    json.dumps(list(range(100_000)))
    found = others()
    assert found is None or found >= 0
