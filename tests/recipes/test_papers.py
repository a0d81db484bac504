"""The recipes of the papers: thin choices over the stages of recipes/hybrid."""

import dataclasses
from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import read_utterances
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.training.learners import make_strategy
from recipes.swb300.__main__ import RECIPE as SWB300
from recipes.swb300.__main__ import main
from recipes.swb2000.__main__ import RECIPE as SWB2000
from recipes.switchboard.command import Recipe, parser, settings_from
from recipes.switchboard.papers import GLOBAL_BATCH, RUNS, SINGLE
from tests.asr.tiny import write_callhome_call, write_corpus, write_fisher_call


def _settings(recipe: Recipe, *more: str) -> Settings:
    options = parser(recipe).parse_args(["--corpus", "discs", "--out", "x", *more])
    return settings_from(recipe, options)


@pytest.mark.parametrize("recipe", [SWB300, SWB2000], ids=lambda recipe: recipe.name)
def test_runs_differ_in_the_strategy_alone(recipe: Recipe):
    plain = _settings(recipe, "--run", "ddp")
    for name in RUNS.keys() - {SINGLE}:
        settings = _settings(recipe, "--run", name)
        make_strategy(settings.train)
        assert settings.train.strategy == RUNS[name].strategy
        train = dataclasses.replace(settings.train, strategy="ddp")
        assert dataclasses.replace(settings, run="ddp", train=train) == plain


def test_the_command_of_the_page_for_users_of_kaldi_is_accepted():
    page = (Path(__file__).parents[2] / "docs/from-kaldi.md").read_text("utf-8")
    block = page.partition("    python -m recipes.swb300 --corpus TREE --out DIR \\\n")[
        2
    ]
    options = block.partition("\n\n")[0].replace("\\\n", " ").split()
    settings = _settings(SWB300, *options)
    assert settings.uses_kaldi
    _settings(SWB300, *options, "--set", "decode.nbest=100", "--set", "kaldi.arpa=lm")


@pytest.mark.parametrize("learners", [1, 8, 64])
def test_the_batch_and_its_rate_are_the_papers(learners: int):
    options = ("--learners", str(learners), "--super-learners", "1")
    train = _settings(SWB300, *options).train
    assert train.batch_size * train.num_learners == GLOBAL_BATCH == 8192
    peak = train.base_rate * GLOBAL_BATCH / train.base_batch
    assert peak == pytest.approx(3.2)
    # after epoch 16 the rate has fallen by sqrt(1/2) six times
    steps = train.epochs - train.warmup_epochs
    assert peak * train.decay**steps == pytest.approx(peak / 8)


def test_the_baseline_is_one_learner_with_batch_256():
    train = _settings(SWB300, "--run", SINGLE).train
    assert (train.num_learners, train.batch_size, train.strategy) == (1, 256, "ddp")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--learners", "3"), "must divide the batch 8192, got 3"),
        (("--super-learners", "3"), "must divide 8, got 3"),
        (("--set", "lm.ordre=4"), "no setting 'ordre'"),
    ],
)
def test_what_does_not_fit_is_refused(options: tuple[str, ...], problem: str):
    with pytest.raises(ValueError, match=problem):
        _settings(SWB300, *options)


def test_sources_and_folders_are_those_of_the_recipe():
    settings = _settings(SWB2000, "--fisher", "a", "b", "--callhome", "c")
    assert settings.sources == ("switchboard", "fisher", "callhome")
    assert [folder.name for folder in settings.roots] == ["discs", "a", "b", "c"]
    assert settings.prepare.dev_utterances == 4000
    assert settings.lexicon.synthesise
    assert not _settings(SWB300).lexicon.synthesise


def test_the_command_goes_from_discs_to_the_lexicon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from recipes.swb2000.__main__ import main as swb2000

    write_corpus(tmp_path / "swb")
    write_fisher_call(tmp_path / "fisher", 1, ["0.5 2.5 A: yes i._b._m."])
    write_callhome_call(tmp_path / "ch", 4065, ["0.5 2.5 A: %ah &no."])
    arguments = ["--corpus", str(tmp_path / "swb"), "--out", str(tmp_path / "out")]
    arguments += ["--fisher", str(tmp_path / "fisher"), "--to", "lexicon"]
    arguments += ["--set", "prepare.dev_utterances=2", "--cores", "1"]
    assert swb2000(arguments) == 1
    assert "leave callhome out of `sources`" in capsys.readouterr().err
    assert swb2000([*arguments, "--callhome", str(tmp_path / "ch")]) == 0
    train = read_utterances(tmp_path / "out/exp/prepare/train.jsonl")
    assert {u.id.split("-")[0] for u in train} == {
        *("sw02001", "sw02002", "sw02003"),
        *("fe_03_00001", "en_4065"),
    }
    assert "1 of 2 missing words are spelled out" in capsys.readouterr().out


def test_a_wrong_folder_is_said_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--corpus", str(tmp_path / "gone"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--to", "check"]) == 1
    assert "gone: expected the folder of a corpus" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    corpus, file = write_corpus(tmp_path / "swb"), tmp_path / "file"
    file.touch()
    assert main(["--corpus", str(corpus), "--out", str(file), "--to", "check"]) == 1
    assert f"error: [Errno 20] Not a directory: '{file}" in capsys.readouterr().err


def test_the_input_and_the_states_are_the_papers():
    settings = _settings(SWB300)
    log_mel = 3 * settings.features.num_mels
    fmllr = settings.triphone.lda_dimension
    assert log_mel + fmllr + settings.adapt.ivector_dims == 260
    assert settings.adapt.fmllr
    assert settings.adapt.ivectors
    assert (settings.states, settings.triphone.num_leaves) == ("triphone", 32_000)
