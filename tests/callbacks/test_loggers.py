"""The logger for Weights & Biases: offline by default, and never in the way."""

import importlib.util

import pytest

from lightning_adpsgd.callbacks import loggers


def test_without_the_package_there_is_no_logger(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert loggers.make_wandb_logger(tmp_path, "run") is None


def test_who_is_not_logged_in_gets_an_offline_run_that_is_closed(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
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
