"""Where figures go, with Weights & Biases and without."""

import importlib.util
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_adpsgd.asr.scoring.scorer import ScoredSegment, score_lines
from lightning_adpsgd.callbacks.runs import Run, write_run
from recipes.batch_size.panels import best_by_batch
from recipes.batch_size.panels import main as panels
from recipes.hybrid.pipeline.provenance import provenance
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.training import learners
from recipes.hybrid.training.metrics import read_rows
from recipes.hybrid.training.tracking import config_of, make_tracker, offline_runs
from recipes.hybrid.training.word_tables import (
    Sound,
    aligned,
    rates,
    rows,
)
from tests.offline_runs import read_offline_run

STM = """f a s1 0 2 <o> one two three
g a s2 0 2 <o> four"""
CTM = """f a 0.1 0.1 one
f a 0.5 0.1 too
f a 0.6 0.1 three
f a 0.7 0.1 oh
g a 0.1 0.1 four"""


def settings_in(folder: Path) -> Settings:
    return Settings(corpus=folder, out=folder / "corpus", run="run")


def scored() -> list[ScoredSegment]:
    stm, ctm = (list(enumerate(t.split("\n"), 1)) for t in (STM, CTM))
    return list(score_lines(stm, ctm, None).segments)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")


def test_figures_go_to_a_csv_file_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(learners, "make_tracker", lambda *_: None)
    [logger] = learners.make_loggers(settings_in(tmp_path), tmp_path, tmp_path)
    logger.log_metrics({"loss": 0.5}, step=3)
    logger.save()
    assert read_rows(tmp_path / "metrics.csv") == [{"loss": 0.5, "step": 3}]


def test_without_weights_and_biases_the_csv_file_remains(
    tmp_path, monkeypatch, offline
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    made = learners.make_loggers(settings_in(tmp_path), tmp_path, tmp_path)
    assert [type(one) for one in made] == [CSVLogger]


def test_parts_of_a_run_share_its_identifier_group_and_settings(tmp_path, offline):
    settings = settings_in(tmp_path)
    for part in ("first", "second"):
        logger = make_tracker(settings, tmp_path / "trained", tmp_path / part)
        assert logger is not None
        logger.experiment.finish()
    one, other = map(read_offline_run, offline_runs([tmp_path]))
    assert one.id == other.id
    assert one.group == "corpus"
    assert one.tags[:2] == ["hadpsgd", "4 learners"]
    assert one.config["train/batch_size"] == 16
    assert one.config["run/commit"]


def test_the_configuration_has_every_setting_as_a_plain_value(tmp_path):
    config = config_of(settings_in(tmp_path))
    assert config["decode/acoustic_scales"] == [0.05, 0.07, 0.1, 0.15, 0.2, 0.3]
    assert config["out"] == str(tmp_path / "corpus")


def _told(connection: Connection) -> None:
    connection.send(provenance()["command"])


def test_a_learner_tells_the_command_that_the_user_began(monkeypatch):
    main = Path(learners.__file__).parents[3] / "recipes" / "demo" / "__main__.py"
    monkeypatch.setattr(sys, "argv", [str(main), "--out", "runs/demo"])
    here, there = multiprocessing.get_context("fork").Pipe()
    learner = multiprocessing.get_context("fork").Process(target=_told, args=(there,))
    learner.start()
    learner.join(60)
    command = here.recv()
    assert command.endswith(" -m recipes.demo --out runs/demo")
    assert provenance()["command"].split()[1:] == " ".join(sys.orig_argv[1:]).split()


def test_an_interval_is_that_of_the_score_where_it_has_one():
    two = {"wer": 0.2, "wer_low": 0.1, "wer_high": 0.3, "cer": 0.1}
    one = {"wer": 0.2, "wer_low": None, "wer_high": None, "cer": None}
    assert rates({"parts": {"CH": two, "SWB": one}}) == {
        **{"score/wer_CH": 0.2, "score/wer_CH_low": 0.1, "score/wer_CH_high": 0.3},
        **{"score/cer_CH": 0.1, "score/wer_SWB": 0.2},
    }


def test_an_alignment_shows_what_was_said_heard_and_wrong():
    assert aligned(scored()[0].pairs) == (
        "one two three",
        "one too three oh",
        "one two three\none too three oh\n    S         I",
    )


def test_the_table_begins_with_the_utterance_of_most_errors():
    sides = {("f", "a"): Sound("SWB", Path("f"), 0), ("g", "a"): Sound("CH", Path(), 0)}
    table = rows(reversed(scored()), sides)
    assert [row[0] for row in table] == ["SWB", "CH"]
    assert table[0][5:8] == [3, 2, "one two three"]


def run_of(name: str, batch: int, loss: float, diverged: bool = False) -> Run:
    return Run(
        name=name,
        algorithm="adpsgd",
        topology="ring",
        communication="async",
        num_super_learners=4,
        super_learner_size=1,
        global_batch=batch,
        best_loss=loss,
        diverged=diverged,
    )


def test_loss_against_batch_is_the_lowest_of_the_runs_that_learnt():
    runs = [run_of("a", 64, 2.0), run_of("b", 64, 1.5), run_of("c", 256, 1.0)]
    runs += [run_of("d", 512, 0.5, diverged=True)]
    assert best_by_batch(runs, "best_loss") == {"adpsgd": [(64, 1.5), (256, 1.0)]}


def test_loss_against_batch_becomes_a_run_with_a_table_and_a_chart(
    tmp_path, offline, capsys
):
    assert panels([str(tmp_path)]) == 1
    assert "no rows of runs" in capsys.readouterr().err
    for one in (run_of("a", 64, 2.0), run_of("b", 256, 1.5)):
        write_run(one, tmp_path)
    assert panels([str(tmp_path)]) == 0
    assert "2 runs; wandb sync " in capsys.readouterr().out
    [part] = offline_runs([tmp_path])
    written = read_offline_run(part)
    assert written.last("runs/nrows") == 2
    assert any("best_loss_against_batch" in name for name in written.files)
