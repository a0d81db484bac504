"""Where figures go, with Weights & Biases and without."""

import importlib.util

import pytest
from lightning.pytorch.loggers import CSVLogger

from recipes.switchboard import loggers
from recipes.switchboard.metrics import read_rows


def test_figures_go_to_a_csv_file_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "make_wandb_logger", lambda *_: None)
    [logger] = loggers.make_loggers(tmp_path, "run")
    logger.log_metrics({"loss": 0.5}, step=3)
    logger.save()
    assert read_rows(tmp_path / "metrics.csv") == [{"loss": 0.5, "step": 3}]


def test_without_weights_and_biases_the_csv_file_remains(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [type(x) for x in loggers.make_loggers(tmp_path, "run")] == [CSVLogger]


def test_who_is_not_logged_in_gets_an_offline_run_that_is_closed(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setattr(loggers, "_is_logged_in", lambda: False)
    logger = loggers.make_wandb_logger(tmp_path, "run")
    assert logger is not None
    logger.log_metrics({"loss": 0.5}, step=3)
    loggers._finish(logger)
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert file.stat().st_size > 0


def test_a_login_that_cannot_be_asked_for_counts_as_none(monkeypatch):
    wandb = pytest.importorskip("wandb")

    def broken(**_):
        raise TypeError("prompt")

    monkeypatch.setattr(wandb, "login", broken)
    assert not loggers._is_logged_in()
