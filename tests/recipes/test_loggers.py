"""Where figures go, with Weights & Biases and without."""

import importlib.util

from lightning.pytorch.loggers import CSVLogger

from recipes.hybrid.training import learners
from recipes.hybrid.training.metrics import read_rows


def test_figures_go_to_a_csv_file_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(learners, "make_wandb_logger", lambda *_: None)
    [logger] = learners.make_loggers(tmp_path, "run")
    logger.log_metrics({"loss": 0.5}, step=3)
    logger.save()
    assert read_rows(tmp_path / "metrics.csv") == [{"loss": 0.5, "step": 3}]


def test_without_weights_and_biases_the_csv_file_remains(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [type(x) for x in learners.make_loggers(tmp_path, "run")] == [CSVLogger]
