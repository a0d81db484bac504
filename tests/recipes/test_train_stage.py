"""The stage `train`: its strategies, its failures, the figures of several attempts."""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.files import write_json
from lightning_adpsgd.registration import NAMES
from recipes.hybrid.pipeline.crew import Crew, FinishedError
from recipes.hybrid.pipeline.groups import RaceSettings, TrainSettings
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.stages.train import train
from recipes.hybrid.training.learners import make_strategy
from recipes.hybrid.training.metrics import gather_figures, write_rows
from recipes.hybrid.training.saving import best_epoch, last_checkpoint, make_savers
from tests.recipes.experiments import write_frames


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_package_becomes_its_strategy(name):
    assert isinstance(make_strategy(TrainSettings(strategy=name)), HADPSGDStrategy)


def test_ddp_is_lightnings_own():
    assert type(make_strategy(TrainSettings(strategy="ddp"))) is DDPStrategy


def test_checkpoints_of_ddp_do_not_come_from_a_folder_on_another_disk(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    path = tmp_path / "last.ckpt"
    files = make_strategy(TrainSettings(strategy="ddp")).checkpoint_io
    files.save_checkpoint({"epoch": 1}, path)
    assert files.load_checkpoint(path) == {"epoch": 1}


def test_ddp_that_is_saved_within_epochs_is_one_super_learner_and_keeps_its_place():
    train = TrainSettings(strategy="ddp", checkpoint_minutes=30, num_nodes=2)
    strategy = make_strategy(train)
    assert isinstance(strategy, HADPSGDStrategy)
    assert strategy.super_learner_size == train.all_learners == 8
    assert strategy.dials.save_learners


def test_a_name_that_is_no_strategy_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"`strategy` must be one of ddp, .*got 'dpd'"):
        make_strategy(TrainSettings(strategy="dpd"))


@pytest.mark.parametrize(("name", "size"), [("hadpsgd", 2), ("adpsgd", 1)])
def test_only_the_hierarchical_strategy_has_super_learners(name, size):
    strategy = make_strategy(TrainSettings(strategy=name, super_learner_size=2))
    assert isinstance(strategy, HADPSGDStrategy)
    assert strategy.super_learner_size == size


def test_a_training_that_cannot_start_fails_its_stage(tmp_path, capfd):
    with pytest.raises(StageError, match="`hadpsgd` ended with status 1"):
        train(Settings(corpus=tmp_path, out=tmp_path), tmp_path / "output")
    assert "frames.npy: expected an array" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_ddp_that_was_stopped_ends_with_the_weights_of_one_that_was_not(
    tmp_path, num_workers
):
    training = _ready_to_train(tmp_path, num_workers)
    learn = sys.modules[train.__module__]._train_in_process
    ends = {"whole": [3], "stopped": [1, 3]}
    for name, epochs in ends.items():
        for end in epochs:
            chosen = replace(training.train, epochs=end)
            learn(replace(training, train=chosen), tmp_path / name)
    whole, stopped = (
        torch.load(last_checkpoint(tmp_path / name), weights_only=True) for name in ends
    )
    assert stopped["global_step"] == whole["global_step"]
    for name, weight in whole["state_dict"].items():
        assert torch.equal(weight, stopped["state_dict"][name]), name


def _ready_to_train(folder: Path, num_workers: int) -> Settings:
    """Settings of a small `ddp` with all that draws, and what it reads."""
    varied = {"dropout": 0.3, "max_stretch": 0.1, "mask_bands": 4, "mask_frames": 3}
    sizes = {"num_layers": 2, "hidden_size": 4, "bottleneck_size": 3, "batch_size": 2}
    learners = {"strategy": "ddp", "num_learners": 2, "wer_utterances": 0}
    learners["num_workers"] = num_workers
    chosen = TrainSettings(**learners, **sizes, **varied)  # pyright: ignore
    settings = Settings(corpus=folder, out=folder / "out", train=chosen)
    dice, states = np.random.default_rng(0), settings.directory("states")
    for split in ("train", "dev"):
        frames = {f"{split}{n}": dice.normal(size=(60, 40)) for n in range(4)}
        write_frames(settings.directory("features") / split, frames)
        labels = states / split
        labels.mkdir(parents=True)
        np.save(labels / "labels.npy", dice.integers(5, size=240).astype(np.int32))
        np.save(labels / "labels.present.npy", np.ones(4, bool))
    write_json(states / "states.json", {"num_states": 5, "counts": [48] * 5})
    return settings


class Losing(BoringModel):
    """Its loss of validation is given for each epoch."""

    def __init__(self, losses: Sequence[float]) -> None:
        super().__init__()
        self.losses = losses

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.losses[self.current_epoch])


def fit_in(folder: Path, *losses: float) -> None:
    """Trains from the last checkpoint in a folder, if any, for an epoch per loss."""
    last = last_checkpoint(folder)
    Trainer(
        accelerator="cpu",
        max_epochs=len(losses),
        limit_train_batches=1,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=make_savers(TrainSettings(strategy="ddp"), last.parent),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Losing(losses), ckpt_path=last if last.exists() else None)


def test_a_folder_that_is_moved_during_a_training_keeps_its_best_weights(tmp_path):
    fit_in(tmp_path / "before", 1.0)
    (tmp_path / "before").rename(tmp_path / "after")
    fit_in(tmp_path / "after", 1.0, 2.0)
    assert best_epoch(tmp_path / "after") == {"best_epoch": 1}
    fit_in(tmp_path / "after", 1.0, 2.0, 0.5)
    assert best_epoch(tmp_path / "after") == {"best_epoch": 3}
    assert not (tmp_path / "before").exists()


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_moved_folder_without_the_best_weights_takes_those_that_come(tmp_path):
    fit_in(tmp_path / "before", 1.0)
    (tmp_path / "before").rename(tmp_path / "after")
    last_checkpoint(tmp_path / "after").with_name("best.ckpt").unlink()
    fit_in(tmp_path / "after", 1.0, 2.0)
    assert best_epoch(tmp_path / "after") == {"best_epoch": 2}


def test_epochs_after_the_last_validation_are_said_to_be_lost(tmp_path, capsys):
    for every, is_said in ((3, True), (4, False)):
        chosen = TrainSettings(epochs=4, validate_every=every)
        settings = Settings(corpus=tmp_path, out=tmp_path, train=chosen)
        sys.modules[train.__module__]._warn_of_lost_epochs(settings)
        assert (
            "the model of epoch 3 will be left" in capsys.readouterr().out
        ) == is_said


def test_a_training_for_a_time_begins_anew_if_it_was_interrupted(tmp_path, monkeypatch):
    module = sys.modules[train.__module__]
    left: list[str] = []

    def fail(_: Settings, output: Path) -> None:
        left.extend(sorted(path.name for path in output.iterdir()))
        raise StageError("no learner in this test")

    monkeypatch.setattr(module, "_train_in_process", fail)
    for seconds in (0.0, 5.0):
        for name in ("logs", "checkpoints"):
            (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / ".fingerprint").touch()
        race = RaceSettings(seconds=seconds)
        with pytest.raises(StageError, match="no learner"):
            train(Settings(corpus=tmp_path, out=tmp_path, race=race), tmp_path)
    assert left == [".fingerprint", "checkpoints", "logs", ".fingerprint"]


def test_a_training_that_has_ended_is_not_begun_anew_if_its_stage_was_cut_off(
    tmp_path, monkeypatch
):
    module, calls = sys.modules[train.__module__], list[str]()
    settings = Settings(corpus=tmp_path, out=tmp_path)

    def learn(_: Settings, output: Path) -> None:
        calls.append("learn")
        (output / "checkpoints").mkdir(exist_ok=True)
        for name in ("last", "best"):
            torch.save({"epoch": 3}, output / "checkpoints" / f"{name}.ckpt")

    monkeypatch.setattr(module, "_train_in_process", learn)
    for _ in range(2):
        train(settings, tmp_path)
    assert calls == ["learn"]
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {
        "model.ckpt",
        "best.ckpt",
    }
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["best_epoch"], summary["other_cores"]) == (4, None)


def test_a_process_does_not_learn_once_the_leader_has_finished_the_stage(
    tmp_path, monkeypatch
):
    def learn(*_: object) -> None:
        raise AssertionError("the leader would not come")

    monkeypatch.setattr(sys.modules[train.__module__], "_train_here", learn)
    settings = Settings(corpus=tmp_path, out=tmp_path, crew=Crew(1, 2))
    output = tmp_path / ".train.partial"  # the leader has given it its name meanwhile
    with pytest.raises(FinishedError):
        train(settings, output)
    assert not output.exists()


def test_a_training_for_a_time_takes_no_model_of_an_attempt_before(
    tmp_path, monkeypatch
):
    def fail(_: Settings, output: Path) -> None:
        assert not list(output.glob("*.ckpt"))
        raise StageError("no learner in this test")

    monkeypatch.setattr(sys.modules[train.__module__], "_train_in_process", fail)
    (tmp_path / "model.ckpt").touch()
    settings = Settings(corpus=tmp_path, out=tmp_path, race=RaceSettings(seconds=5.0))
    with pytest.raises(StageError, match="no learner"):
        train(settings, tmp_path)


def test_figures_of_all_attempts_become_one_table_in_order_of_steps(tmp_path):
    for attempt, steps in enumerate(([9, 19], [29, 39])):
        folder = tmp_path / "logs" / f"attempt_{attempt}"
        folder.mkdir(parents=True)
        write_rows(folder / "metrics.csv", [{"step": step} for step in steps])
    (tmp_path / "logs" / "attempt_2").mkdir()
    assert [row["step"] for row in gather_figures(Path(tmp_path))] == [9, 19, 29, 39]


@pytest.mark.parametrize("end", ["19,0.1", "19,1e-", "\0\0\0\0", "\0\0\n"])
def test_a_line_that_a_full_disk_or_a_power_failure_cut_off_is_left_out(tmp_path, end):
    folder = tmp_path / "logs/attempt_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(f"step,loss\r\n9,0.25\r\n{end}")
    assert gather_figures(tmp_path) == [{"step": 9, "loss": 0.25}]
