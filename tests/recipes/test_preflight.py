"""What is wrong with settings or the machine is said before the first stage."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import torch

from recipes.hybrid.pipeline.groups import TrainSettings
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.preflight import SPEECH, problems
from recipes.hybrid.pipeline.runner import run_stages
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import Stage, StageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(corpus=tmp_path, out=tmp_path)


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("train.strategy=foo", "`strategy` must be one of ddp, .*, got 'foo'"),
        ("train.epochs=0", "`epochs` must be at least 1, got 0"),
        ("train.base_rate=nan", "`base_rate` must be above 0, got nan"),
        ("train.dropout=1.5", r"`dropout` must be in \[0, 1\], got 1.5"),
        ("train.precision=bf17", "`precision` must be one of none, 32-true"),
        ("train.super_learner_size=3", "must divide the 4 learners, got 3"),
        ("lm.order=0", "`order` must be at least 1, got 0"),
        ("lm.prune=-1", "`prune` must be at least 0, got -1"),
        ("features.dtype=int8", "`dtype` must be one of float16, float32"),
        ("decode.acoustic_scales=0.1,0", "`acoustic_scales` must be above 0"),
        ("decode.beam=wide", "'decode.beam=wide': must be a number, .*, got 'wide'"),
        ("align.silence_probability=1", "`silence_probability` must be in"),
        ("triphone.num_leaves=0", "`num_leaves` must be at least 1"),
        ("prepare.dev_fraction=2", "`dev_fraction` must be in"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused(settings, assignment, problem):
    with pytest.raises(ValueError, match=problem):
        override(settings, assignment)


def test_gpus_train_in_bfloat16_and_processors_in_full_precision():
    assert TrainSettings(accelerator="gpu").chosen_precision == "bf16-mixed"
    assert TrainSettings().chosen_precision == "32-true"
    chosen = TrainSettings(accelerator="gpu", precision="32-true")
    assert chosen.chosen_precision == "32-true"


def test_all_packages_of_the_extra_are_looked_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extra = project["project"]["optional-dependencies"]["asr"]
    names = {re.split("[><=]", one)[0].replace("-", "_") for one in extra}
    assert names == {*SPEECH, "espeakng_loader", "torch"}


def test_a_missing_package_is_said_before_the_first_stage(settings, monkeypatch):
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "kaldifst" else known(n)
    )
    ran = []
    stages = [
        Stage(name, "", lambda *_: ran.append(1)) for name in ("check", "features")
    ]
    with pytest.raises(StageError, match=r"missing: kaldifst; pip install '.*\[asr\]'"):
        run_stages(settings, stages)
    assert ran == []
    run_stages(settings, stages, last="check")
    assert ran == [1]


def test_gpus_that_are_not_there_are_said_where_training_will_run(
    settings, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = override(settings, "train.accelerator=gpu")
    assert [*problems(chosen, ["check"])] == []
    [problem] = problems(chosen, ["features", "train"])
    assert "at most the 2 GPUs of this machine, got 4" in problem


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("lexicon.cmudict", "lexicon"),
        ("lm.text", "lm"),
        ("lm.arpa", "lm"),
        ("features.noise_files", "features"),
    ],
)
def test_files_that_are_not_there_are_said_where_their_stage_will_run(
    settings, tmp_path, name: str, stage: str
):
    path = tmp_path / "file"
    chosen = override(settings, f"{name}={path}", "features.noise_share=0.5")
    assert [*problems(chosen, ["check", "prepare", "graph"])] == []
    [problem] = problems(chosen, ["check", stage])
    assert problem == f"`{name}`: {path} does not exist; correct it, or leave it out"
    path.touch()
    assert [*problems(chosen, ["check", stage])] == []


def test_noise_that_no_side_gets_is_not_looked_for(settings, tmp_path):
    chosen = override(settings, f"features.noise_files={tmp_path / 'none'}")
    assert [*problems(chosen, ["features"])] == []


def test_a_file_is_looked_for_where_its_stage_will_run_though_it_is_finished(
    settings: Settings, tmp_path: Path
):
    def run(settings: Settings, output: Path) -> None:
        ran.append(output)

    ran: list[Path] = []
    names = ("check", "lm")
    stages = [Stage(name, "to be tested", run, (), ("seed",)) for name in names]
    text = tmp_path / "text"
    text.touch()
    chosen = override(settings, f"lm.text={text}")
    run_stages(chosen, stages)
    text.unlink()
    run_stages(chosen, stages)
    with pytest.raises(StageError, match=r"^`lm\.text`: .*/text does not exist"):
        run_stages(chosen, stages, redo=True)
    assert len(ran) == 2
