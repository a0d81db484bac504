"""The logger for Weights & Biases: offline by default, and never in the way."""

import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_adpsgd.callbacks import loggers
from tests.offline_runs import OfflineRun, read_offline_run


@pytest.fixture(autouse=True)
def nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


def test_without_the_package_there_is_no_logger(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert loggers.make_wandb_logger(tmp_path, "run") is None


def test_who_has_switched_it_off_gets_no_logger(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert loggers.make_wandb_logger(tmp_path, "run") is None


class _Logs(BoringModel):
    """Logs a figure of a group at each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"curve/loss": 0.5, "curve/global_samples": 3.0 + batch_idx})
        return super().training_step(batch, batch_idx)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> OfflineRun:
    """The offline run of a training of two steps."""
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.delenv("WANDB_MODE", raising=False)
        patch.setenv("NETRC", str(folder / "none"))
        _train(folder)
    [run] = folder.glob("wandb/offline-run-*")
    return read_offline_run(run)


def _train(folder: Path) -> pl.Trainer:
    logger = loggers.make_wandb_logger(
        folder, "run", id="someid", group="corpus", tags=["a"], config={"x/y": 1}
    )
    assert logger is not None
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[loggers.WandbRun()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        limit_val_batches=0,
    )
    trainer.fit(_Logs())
    return trainer


def test_who_is_not_logged_in_gets_an_offline_run_that_is_closed(written):
    assert (written.id, written.group, written.tags) == ("someid", "corpus", ["a"])
    assert written.last("curve/loss") == 0.5


def test_a_second_fit_and_an_evaluation_continue_the_run(tmp_path):
    pytest.importorskip("wandb")
    trainer = _train(tmp_path)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(_Logs())
    trainer.test(_Logs(), verbose=False)
    runs = map(read_offline_run, sorted(tmp_path.glob("wandb/offline-run-*")))
    parts = {run.last("trainer/global_step"): run.id for run in runs if run.rows}
    assert parts == {1: "someid", 3: "someid"}


def _train_and_end(folder: Path) -> None:
    _train(folder)
    sys.exit("W&B still writes" if "WANDB_SERVICE" in os.environ else 0)


def test_a_forked_learner_ends_when_its_run_is_written(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # of this process, which lasts
    fork = multiprocessing.get_context("fork")
    learner = fork.Process(target=_train_and_end, args=(tmp_path,))
    learner.start()
    learner.join()
    assert learner.exitcode == 0
    [run] = tmp_path.glob("wandb/offline-run-*")
    assert read_offline_run(run, timeout=0).last("curve/loss") == 0.5


def test_figures_have_samples_epochs_and_hours_as_axes(written):
    assert written.axes["curve/*"] == "curve/global_samples"
    assert written.axes["gossip/*"] == "learners/global_samples"
    assert written.axes["wer"] == "wer/global_samples"
    others = {"convergence/global_samples", "convergence/epochs", "convergence/hours"}
    assert others <= written.axes.keys()
    assert written.last("curve/global_samples") == 4.0


def test_the_configuration_names_the_strategy(written):
    assert written.config["x/y"] == 1
    assert written.config["strategy/class"] == "SingleDeviceStrategy"


def test_a_login_that_cannot_be_asked_for_counts_as_none(monkeypatch):
    wandb = pytest.importorskip("wandb")

    def broken(**_):
        raise TypeError("prompt")

    monkeypatch.setattr(wandb, "login", broken)
    assert not loggers._is_logged_in()
