"""What a learner writes down of its steps, against statistics that are known."""

import csv
from itertools import chain, count, pairwise, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd.callbacks import Timeline, timeline
from lightning_adpsgd.mixing.statistics import Statistics

DATA = DataLoader(TensorDataset(torch.zeros(4, 1)))


class Slope(LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self._fails_at = fails_at

    def training_step(self, batch, batch_idx):
        if batch_idx == self._fails_at:
            raise RuntimeError("the disk\nis full")
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class ScriptedStrategy(SingleDeviceStrategy):
    """One learner whose communication has done what a script says of each step."""

    def __init__(self, script: list[Statistics]) -> None:
        super().__init__(torch.device("cpu"))
        self._script = script

    def gossip_statistics(self):
        assert self.lightning_module is not None
        step = self.lightning_module.trainer.global_step
        return self._script[min(step, len(self._script) - 1)]


def said(exchanges: int, waited: float, ages: dict[int, int], **more: int):
    return Statistics(exchanges, 0, 0, waited, {}, 0, ages, **more)


def fit(
    folder: Path,
    *,
    model: LightningModule | None = None,
    steps: int = 2000,
    **more: Any,
) -> list[dict[str, str]]:
    trainer_of(folder, steps, **more).fit(model or Slope(), DATA, DATA)
    return lines(folder)


def trainer_of(
    folder: Path,
    steps: int = 2000,
    every_s: float = 30.0,
    callbacks: tuple[Callback, ...] = (),
    **more: Any,
) -> Trainer:
    settings: dict[str, Any] = {"devices": 1, **more}
    return Trainer(
        accelerator="cpu",
        callbacks=[Timeline(folder, steps=steps, every_s=every_s), *callbacks],
        logger=False,
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / "0.timeline.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_steps_validations_and_the_end_are_written_in_their_order(tmp_path):
    found = fit(tmp_path)
    assert [one["event"] for one in found] == [*[""] * 4, "validation", "end"]
    times = [float(one[name]) for one in found for name in ("begin", "end")]
    assert all(before <= after for before, after in pairwise(times))


def test_a_step_says_how_long_it_waited_and_with_whom_it_exchanged(tmp_path):
    script = [
        said(0, 0.0, {1: 0, 2: 0}),
        said(1, 0.25, {1: 0, 2: 1}),  # with 1
        said(1, 0.25, {1: 1, 2: 2}),  # with nobody
        said(3, 1.0, {1: 1, 2: 1}),  # with both
        said(3, 1.0, {1: 2, 2: 2}),
    ]
    steps = fit(tmp_path, strategy=ScriptedStrategy(script))[:4]
    assert [one["waited"] for one in steps] == ["0.2500", "0.0000", "0.7500", "0.0000"]
    assert [one["exchanges"] for one in steps] == ["1", "0", "2", "0"]
    assert [one["peers"] for one in steps] == ["1", "", "1 2", ""]


def test_a_step_says_who_is_there_and_who_was_lost(tmp_path):
    script = [said(0, 0, {}, members=3), said(0, 0, {}, members=2, lost=1)]
    steps = fit(tmp_path, strategy=ScriptedStrategy(script))[:4]
    assert [one["members"] for one in steps] == ["2"] * 4
    assert [one["lost"] for one in steps] == ["1", "0", "0", "0"]


def test_only_the_last_steps_are_kept(tmp_path):
    assert [one["event"] for one in fit(tmp_path, steps=3)] == ["", "validation", "end"]


def test_an_error_that_ends_the_learner_is_its_last_line(tmp_path):
    with pytest.raises(RuntimeError, match="full"):
        fit(tmp_path, model=Slope(fails_at=2))
    events = [one["event"] for one in lines(tmp_path)]
    assert events == ["", "", "RuntimeError: the disk is full"]


def test_an_error_that_names_a_file_by_no_text_is_written_too(tmp_path):
    monitor, nobody = Timeline(tmp_path), cast(Any, None)
    trainer: Any = SimpleNamespace(global_rank=0, global_step=0, strategy=None)
    trainer.callbacks = []
    monitor.on_train_start(trainer, nobody)
    monitor.on_exception(trainer, nobody, FileNotFoundError("caf\udce9.wav"))
    assert lines(tmp_path)[-1]["event"] == "FileNotFoundError: caf\\udce9.wav"


def test_an_error_of_a_later_evaluation_is_not_of_the_training(tmp_path):
    trainer, model = trainer_of(tmp_path), Slope()
    trainer.fit(model, DATA, DATA)
    model.validation_step = None  # pyright: ignore
    with pytest.raises(Exception, match=r"No `validation_step\(\)`"):
        trainer.validate(model, DATA, verbose=False)
    assert lines(tmp_path)[-1]["event"] == "end"


def test_a_file_that_cannot_be_written_is_no_reason_for_an_error(tmp_path):
    folder = tmp_path / "folder"
    folder.touch()
    with pytest.warns(UserWarning, match=r"not be written.*/folder'") as told:
        trainer_of(folder, every_s=1e-9).fit(Slope(), DATA, DATA)
    assert sum("could not be written" in str(one.message) for one in told) == 1


def test_a_file_that_cannot_be_written_takes_the_place_of_no_error(tmp_path):
    folder = tmp_path / "folder"
    folder.touch()
    with (
        pytest.warns(UserWarning, match="could not be written"),
        pytest.raises(RuntimeError, match="the disk\nis full"),
    ):
        trainer_of(folder).fit(Slope(fails_at=2), DATA, DATA)


class AfterStep(Callback):
    """Calls a function at the end of each step."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._function(trainer.global_step)


def test_a_file_is_written_as_soon_as_it_can_be(tmp_path):
    folder = tmp_path / "folder"
    folder.touch()
    makes_room = AfterStep(lambda step: folder.unlink() if step == 1 else None)
    with pytest.warns(UserWarning, match="could not be written"):
        found = fit(folder, every_s=1e-9, callbacks=(makes_room,))
    assert [one["event"] for one in found] == [*[""] * 4, "validation", "end"]


def test_a_clock_that_is_set_back_delays_no_write(tmp_path, monkeypatch):
    wall, seconds = chain([1e6], repeat(1e3)), count(5.0)
    clock = SimpleNamespace(time=lambda: next(wall), monotonic=lambda: next(seconds))
    monkeypatch.setattr(timeline, "time", clock)
    num_lines = AfterStep(lambda step: sizes.append(len(lines(tmp_path))))
    sizes: list[int] = []
    found = fit(tmp_path, every_s=0.5, callbacks=(num_lines,))
    assert sizes == [1, 2, 3, 4]
    times = [float(one[name]) for one in found for name in ("begin", "end")]
    assert all(before <= after for before, after in pairwise(times))
    assert 1e6 < times[0] < 1e6 + 10


@pytest.mark.parametrize("argument", ["steps", "every_s"])
def test_a_bound_of_nothing_is_refused(tmp_path, argument):
    settings: dict[str, Any] = {argument: 0}
    with pytest.raises(ValueError, match=f"`{argument}` must be above 0, got 0"):
        Timeline(tmp_path, **settings)
