"""The whole way from audio to word error rate, on a corpus of half a minute."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.demo import seeds
from recipes.demo.__main__ import main
from recipes.demo.lanes import read_lanes
from recipes.demo.race import METHODS
from recipes.demo.results import read_result
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.stages.train import train
from recipes.hybrid.training.held_out import HELD_OUT, read_held_out
from recipes.hybrid.training.learners import make_model
from recipes.hybrid.training.metrics import read_rows
from recipes.hybrid.training.timed import COPIES_AT
from recipes.hybrid.training.tracking import parts_of
from tests.offline_runs import read_offline_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RACE_SECONDS = 1.0
RACE = [f"race-{method}" for method in METHODS]
SMALL = {
    "train.epochs": 2,
    "train.hidden_size": 16,
    "train.num_layers": 1,
    "train.batch_size": 8,
    "align.num_iterations": 2,
    "align.num_gaussians": 150,
    "train.wer_utterances": 2,
    "lm.prune": 1e-6,
    "lm.large_order": 4,
    "decode.nbest": 3,
    "decode.beam": 5.0,
    "decode.lattice_beam": 2.0,
    "decode.max_active": 200,
}


def run(folder: Path) -> int:
    changes = [f"--set={name}={value}" for name, value in SMALL.items()]
    minutes = ["--minutes", "0.5", "--test-minutes", "0.2"]
    race = ["--race-seconds", str(RACE_SECONDS)]
    # A forked process costs more than its share of so little speech.
    return main(["--out", str(folder), "--cores", "1", *minutes, *race, *changes])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        assert run(folder) == 0
    return folder


def settings(folder: Path, run: str, **changes: Any) -> Settings:
    chosen = Settings(corpus=folder / "corpus", out=folder, run=run)
    values = SMALL | {"train.strategy": run.removeprefix("race-")} | changes
    return override(chosen, *(f"{name}={value}" for name, value in values.items()))


def test_a_finished_demo_is_only_reported_again(finished, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    runs = ["ddp", "hadpsgd", *RACE]
    models = [settings(finished, run).directory("train") for run in runs]
    before = [(model / "model.ckpt").stat().st_mtime_ns for model in models]
    (finished / "report.html").unlink()
    assert run(finished) == 0
    assert "wandb sync " in capsys.readouterr().out
    assert [(m / "model.ckpt").stat().st_mtime_ns for m in models] == before
    assert (finished / "report.html").exists()


def test_figures_over_seeds_are_those_of_their_demos(finished, capsys):
    seeds.main([str(finished), str(finished)])
    found = json.loads(capsys.readouterr().out)
    loss = [read_result(settings(finished, run)) for run in ("ddp", "hadpsgd")]
    expected = loss[1].summary["frame_loss"] / loss[0].summary["frame_loss"]
    assert [row["loss_ratio"] for row in found["rows"]] == [expected, expected]
    assert found["loss_ratio"] == pytest.approx(
        dict.fromkeys(("mean", "low", "high"), expected)
    )
    wrong = [result.errors["total"].num_errors for result in loss]
    row = found["rows"][0]
    assert [row[run]["words_wrong"] for run in ("ddp", "hadpsgd")] == wrong
    points = 100 * (wrong[1] - wrong[0]) / row["ddp"]["words"]
    assert found["points"]["mean"] == pytest.approx(points)


def test_all_words_of_the_test_sets_are_scored_in_every_run(finished):
    results = [read_result(settings(finished, run)) for run in ("ddp", "hadpsgd")]
    words = [{p: e.num_words for p, e in r.errors.items()} for r in results]
    assert words[0] == words[1]
    assert words[0]["SWB"] + words[0]["CH"] == words[0]["total"] > 0


def test_both_trainings_see_the_same_number_of_samples(finished):
    results = [read_result(settings(finished, run)) for run in ("ddp", "hadpsgd")]
    samples = [result.summary["global_samples"] for result in results]
    assert samples[0] == samples[1] > 0


def test_both_trainings_start_from_the_same_weights(finished):
    first, second = (
        make_model(settings(finished, run), corpus_chunks=10).state_dict()
        for run in ("ddp", "hadpsgd")
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_an_interrupted_training_goes_on_from_its_last_checkpoint(finished, tmp_path):
    """With gossip it does in `test_many_machines.py`."""
    shorter = settings(finished, "ddp").directory("train")
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(shorter / "model.ckpt", tmp_path / "checkpoints" / "last.ckpt")
    train(settings(finished, "ddp", **{"train.epochs": 3}), tmp_path)
    before = json.loads((shorter / "summary.json").read_text())
    after = json.loads((tmp_path / "summary.json").read_text())
    assert read_rows(tmp_path / "metrics.csv")[0]["step"] >= before["steps"]
    assert after["global_samples"] == pytest.approx(1.5 * before["global_samples"])


@pytest.mark.parametrize("run", ["ddp", "hadpsgd"])
def test_held_out_utterances_are_recognised_while_training_goes_on(finished, run):
    folder = settings(finished, run).directory("train")
    rates = [
        float(row["wer"]) for row in read_rows(folder / "metrics.csv") if "wer" in row
    ]
    assert 1 <= len(rates) <= SMALL["train.epochs"]
    assert all(0 <= rate < 3 for rate in rates)


@pytest.mark.parametrize("run", ["ddp", "hadpsgd"])
def test_weights_and_biases_gets_curves_words_and_report_in_one_run(finished, run):
    chosen = settings(finished, run)
    parts = [read_offline_run(part) for part in parts_of(chosen)]
    assert len(parts) == 3  # of the training, the score and the report
    assert len({part.id for part in parts}) == 1
    train, score, report = parts
    rates = {"score/wer_SWB", "score/wer_CH", "score/wer_total"}
    logged = {name for row in score.rows for name in row}
    assert rates | {f"{name}_low" for name in rates} <= logged
    errors = read_result(chosen).errors["total"]
    assert score.last("score/wer_total") == errors.wer
    assert score.last("score/utterances/nrows") > 1
    assert any(name.endswith(".wav") for name in score.files)
    assert any("score/page" in name for name in score.files)
    assert any("report" in name for name in report.files)
    assert 0 <= train.last("wer") < 3
    assert train.axes["wer"] == "wer/global_samples"
    assert train.config["lm/prune"] == SMALL["lm.prune"]
    assert train.config["corpus/train_hours"] > 0


def test_only_the_run_that_gossips_has_exchanges(finished):
    ddp, hadpsgd = (read_result(settings(finished, r)) for r in ("ddp", "hadpsgd"))
    assert ddp.summary["staleness"] == {}
    assert sum(hadpsgd.summary["staleness"].values()) > 0


def test_the_model_of_a_run_opens_without_this_package(finished):
    path = settings(finished, "hadpsgd").directory("train") / "model.ckpt"
    weights = torch.load(path, weights_only=True)["state_dict"]
    assert all(value.isfinite().all() for value in weights.values())


def test_language_model_weights_are_chosen_on_dev(finished):
    folder = settings(finished, "ddp").directory("decode")
    report = json.loads((folder / "decode.json").read_text())
    plain, rescored = report["dev_wer"], report["rescored"]
    assert rescored["dev_wer"] <= min(plain.values()) + 0.05
    assert rescored["large"] in settings(finished, "ddp").decode.lm_weights
    assert (finished / "exp/lm/large.arpa").exists()


def page_data(finished: Path) -> Any:
    """What the page of the demo draws."""
    page = (finished / "report.html").read_text()
    [data] = re.findall(r'id="data">(.*?)</script>', page)
    return json.loads(data)


def test_the_report_tells_the_word_error_rate_of_every_run(finished):
    told = {one["name"]: one["parts"]["total"] for one in page_data(finished)["scores"]}
    for name in ("ddp", "hadpsgd", *RACE):
        errors = read_result(settings(finished, name)).errors["total"]
        assert told[name]["wer"] == pytest.approx(errors.wer)
        assert told[name]["num_words"] == errors.num_words
    assert len(told) > 4  # and that of the Gaussian mixtures


def test_the_report_has_curves_lanes_and_sound(finished):
    data = page_data(finished)
    losses = {run["name"]: run["series"]["val_loss"] for run in data["runs"]}
    assert losses.keys() == {"ddp", "hadpsgd", *RACE}
    lanes = {one["name"]: one["learners"] for one in data["lanes"]}
    assert {len(lanes[name]) for name in RACE} == {4}
    heard = [one.get("audio") for words in data["words"] for one in words["utterances"]]
    assert any(heard)


# --- the race


def race_folder(finished: Path, run: str) -> Path:
    return settings(finished, run).directory("train")


@pytest.mark.parametrize("run", RACE)
def test_every_method_of_the_race_trains_for_the_same_time(finished, run):
    summary = read_result(settings(finished, run)).summary
    assert summary["seconds"] == RACE_SECONDS
    assert summary["train_seconds"] >= RACE_SECONDS
    assert summary["pause_s"] == pytest.approx(4 * summary["step_s"])
    held_out = read_held_out(race_folder(finished, run) / HELD_OUT)
    # A learner that was held up lacks some of the copies on the way.
    assert len(held_out.curve) <= len(COPIES_AT) + 1
    seconds = [point.seconds for point in held_out.curve]
    assert seconds == sorted(seconds)
    assert seconds[-1] == summary["train_seconds"]


@pytest.mark.parametrize("run", RACE)
def test_losses_of_the_utterances_are_those_of_the_validation(finished, run):
    """But for the chunks that validation repeats so that learners have equally many."""
    utterances = read_held_out(race_folder(finished, run) / HELD_OUT).utterances
    frames = sum(one.frames for one in utterances.values())
    loss = sum(one.loss for one in utterances.values()) / frames
    summary = read_result(settings(finished, run)).summary
    assert loss == pytest.approx(summary["frame_loss"], rel=0.05)


def test_with_ddp_all_make_the_steps_of_the_slow_learner(finished):
    lanes = {run: read_lanes(race_folder(finished, run) / "timeline") for run in RACE}
    assert len({len(steps) for steps in lanes["race-ddp"]}) == 1
    assert not any(step.peers for steps in lanes["race-ddp"] for step in steps)
    assert any(step.peers for steps in lanes["race-adpsgd"] for step in steps)


def test_the_race_is_told_with_the_difference_of_its_methods(finished):
    page = (finished / "report.html").read_text()
    assert "adpsgd less ddp: frame loss " in page
    assert (finished / "race.png").stat().st_size > 10_000
