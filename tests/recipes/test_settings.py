"""Settings are changed by name, with values of their own type."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import CorpusError
from lightning_adpsgd.asr.frames.front_end import FrontEnd
from recipes.hybrid.pipeline.command import Recipe, parser, settings_from, status_of
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import NUM_CEPSTRA, Settings
from recipes.kaldi.__main__ import RECIPE as KALDI
from recipes.librispeech.__main__ import RECIPE as LIBRISPEECH
from recipes.switchboard.__main__ import RECIPE, main
from tests.asr.tiny import write_corpus


@pytest.mark.parametrize("recipe", [KALDI, LIBRISPEECH], ids=lambda one: one.name)
@pytest.mark.parametrize("name", ["dev_utterances", "max_repeats", "extend_s"])
def test_what_a_recipe_does_not_read_is_refused(recipe: Recipe, name: str):
    arguments = ["--corpus", "data", "--out", "run", "--set", f"prepare.{name}=1"]
    problem = f"recipes.{recipe.name} does not read `prepare.{name}`"
    with pytest.raises(ValueError, match=problem):
        settings_from(recipe, parser(recipe).parse_args(arguments))


@dataclass(frozen=True, kw_only=True)
class _Group:
    rates: tuple[float, ...] = (0.1,)
    size: int | None = None
    fast: bool = False


@dataclass(frozen=True, kw_only=True)
class _Extended(Settings):
    group: _Group = field(default_factory=_Group)


@pytest.fixture
def settings(tmp_path: Path) -> _Extended:
    return _Extended(corpus=tmp_path, out=tmp_path)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("group.rates=0.2,0.3", "rates", (0.2, 0.3)),
        ("group.size=3", "size", 3),
        ("group.size=none", "size", None),
        ("group.fast=true", "fast", True),
    ],
)
def test_a_value_takes_the_type_of_its_setting(
    settings: _Extended, text: str, name: str, value: object
):
    changed = override(settings, text)
    assert isinstance(changed, _Extended)
    assert getattr(changed.group, name) == value
    assert settings.group == _Group()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lm.order", "is written group.name=value"),
        ("lm.ordre=2", "no setting 'ordre'; there are order"),
        ("lmm.order=2", "no setting 'lmm'"),
        ("lm.order=two", r"'lm\.order=two': must be a whole number, .*, got 'two'"),
        ("lm.order=2.5", r"'lm\.order=2\.5': must be a whole number, .*, got '2\.5'"),
        ("lm.order=", r"'lm\.order=': must be a whole number, such as 16, got ''"),
        ("lm.prune=little", "must be a number, such as 0.5, got 'little'"),
        ("decode.acoustic_scales=0.1,", "must be a number, such as 0.5, got ''"),
        ("group.fast=yes", "must be true or false, got 'yes'"),
        ("lm=2", "this is a group"),
        ("seed.x=2", "'seed' is a value, not a group"),
    ],
)
def test_a_wrong_assignment_is_refused(settings: _Extended, text: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        override(settings, text)


def test_settings_are_looked_at_together_in_whatever_order_they_stand(
    settings: _Extended,
):
    """Each of the two is refused without the other."""
    both = ["decode.export_likelihoods=true", "kaldi.experiment=exp/tri4_ali"]
    for assignments in (both, both[::-1]):
        changed = override(settings, *assignments)
        assert changed.decode.export_likelihoods
        assert changed.uses_kaldi
    with pytest.raises(ValueError, match=r"needs `kaldi\.experiment`"):
        override(settings, both[0])
    with pytest.raises(ValueError, match=r"`out` must have no comma.*got /a,b"):
        override(settings, *both, "out=/a,b")


def test_the_last_of_several_values_holds(settings: _Extended):
    changed = override(settings, "lm.order=2", "seed=5", "lm.order=4", "lm.prune=0.1")
    assert (changed.lm.order, changed.lm.prune, changed.seed) == (4, 0.1, 5)


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (
            "decode.nbest=20 lm.large_order=4 decode.lattice_beam=15",
            "`lattice_beam` must be at most `beam` 13 with `nbest=20`, got 15",
        ),
        ("prepare.min_utterance_s=0.02", "must be at least 0.06, got 0.02"),
        ("decode.nbest=20", "`decode.nbest=20` needs a larger model"),
        ("decode.max_active=1", "`max_active` must be at least 2, got 1"),
        ("align.beam=50", "`beam` must be at most `retry_beam` 40, got 50"),
        ("graph.silence_probability=1.5", r"must be in \[0, 0.999\], got 1.5"),
        ("graph.silence_probability=0", "`silence_probability` must be above 0"),
        ("features.num_mels=10", r"`features.num_mels` must be at least 13.*got 10"),
        ("adapt.ivector_period=-3", "`ivector_period` must be at least 0, got -3"),
        ("adapt.frame_weight=0", "`frame_weight` must be above 0, got 0"),
        ("adapt.frame_weight=2", r"`frame_weight` must be in \[0, 1\], got 2"),
        ("adapt.passes=0", "`passes` must be at least 1, got 0"),
        ("adapt.min_frames=50", "`min_offset_frames` must be at most `min_frames` 50"),
        ("kaldi.ivector_period=-1", "`ivector_period` must be at least 0, got -1"),
        ("train.decay=1.5", r"`decay` must be in \[0, 1\], got 1.5"),
        ("triphone.num_iterations=0", "`num_iterations` must be at least 1, got 0"),
        ("triphone.lda_reach=0", "`lda_dimension` must be at most 13, 13 cepstra of 1"),
        ("features.noise_decibels=25,10", "the lower one first, got 25.0,10.0"),
        ("features.noise_decibels=nan,10", "two finite numbers, .* got nan,10.0"),
        ("features.noise_decibels=10", "two finite numbers, .* got 10.0"),
        ("features.noise_seed=-1", "`noise_seed` must be at least 0, got -1"),
        ("prepare.min_dev_sides=0", "`min_dev_sides` must be at least 1, got 0"),
        ("train.epochs=4 train.validate_every=8", "at most the 4 epochs.* got 8"),
        ("seed=-1", r"`seed` must be in \[0, 1073741824\], got -1"),
        ("seed=3000000000", r"`seed` must be in \[0, 1073741824\], got 3000000000"),
    ],
)
def test_what_a_late_stage_would_refuse_is_refused_before_the_first(
    settings: _Extended, texts: str, problem: str
):
    with pytest.raises(ValueError, match=problem):
        override(settings, *texts.split())


def test_widths_of_the_search_for_lists_matter_only_where_lists_are_asked_for(
    settings: _Extended,
):
    assert override(settings, "decode.lattice_beam=15").decode.lattice_beam == 15
    assert override(settings, "decode.beam=5").decode.beam == 5
    kaldi = ("kaldi.experiment=exp/tri3", "features.num_mels=10")
    assert override(settings, *kaldi).features.num_mels == 10


def test_the_fewest_bands_are_those_that_the_mixtures_need():
    assert FrontEnd().num_cepstra == NUM_CEPSTRA


@pytest.mark.parametrize(
    ("speeds", "problem"),
    [
        ("0", r"`speeds` must be from 0\.5 to 2\.0 in steps of 0\.01, got 0\.0"),
        ("-1.1", r"got -1\.1; 0\.9,1\.1 is usual"),
        ("nan", "got nan"),
        ("inf", "got inf"),
        ("0.9,2.5", r"got 2\.5"),
        ("0.905", r"in steps of 0\.01, got 0\.905"),
        ("1", r"copy's speed once, without the recorded speed 1, got 1\.0"),
        ("0.9,1.1,0.9", r"speed once.*got 0\.9,1\.1,0\.9"),
    ],
)
def test_speeds_at_which_there_are_no_copies_are_refused(
    settings: _Extended, speeds: str, problem: str
):
    with pytest.raises(ValueError, match=problem):
        override(settings, f"features.speeds={speeds}")


@pytest.mark.parametrize("run", ["", "a/b", ".hidden"])
def test_a_run_must_be_a_folder_name(tmp_path: Path, run: str):
    with pytest.raises(ValueError, match="`run` must be a plain folder name"):
        Settings(corpus=tmp_path, out=tmp_path, run=run)


def test_the_run_that_realigns_is_another_one(tmp_path: Path):
    first = Settings(corpus=tmp_path, out=tmp_path, run="first")
    with pytest.raises(ValueError, match=r"`realign\.run` must be another run"):
        override(first, "realign.run=first")
    with pytest.raises(ValueError, match=r"`realign\.run` must be a plain folder"):
        override(first, "realign.run=a/b")


def test_states_are_those_of_the_last_stage_that_is_asked_for(tmp_path: Path):
    settings = Settings(corpus=tmp_path, out=tmp_path, run="second")
    exp = tmp_path / "exp"
    assert settings.directory("states") == settings.directory("mixtures")
    assert settings.directory("states") == exp / "align"
    settings = override(settings, "states=triphone")
    assert settings.directory("states") == exp / "triphone"
    settings = override(settings, "realign.run=first")
    assert settings.directory("states") == exp / "realign" / "first"
    assert settings.directory("mixtures") == exp / "triphone"
    assert settings.directory("aligner") == exp / "train" / "first"
    with pytest.raises(ValueError, match="`states` must be one of"):
        override(settings, "states=quinphone")


def test_labels_of_adapted_mixtures_need_mixtures_behind_fmllr(tmp_path: Path):
    settings = Settings(corpus=tmp_path, out=tmp_path, run="second")
    asked = override(settings, "realign.adapted=true", "adapt.streams=both")
    assert asked.directory("states") == tmp_path / "exp" / "adapted_align"
    assert asked.directory("mixtures") == tmp_path / "exp" / "align"
    wrong = {
        "adapt.streams=ivectors": r"`realign\.adapted` needs .* `adapt.streams=ivec",
        "kaldi.fmllr=a.scp": r"without `kaldi\.fmllr`, got .*`kaldi\.fmllr=a\.scp`",
        "realign.run=first": r"`adapted` must be false with `run=first`",
    }
    for assignment, problem in wrong.items():
        with pytest.raises(ValueError, match=problem):
            override(asked, assignment)


def test_a_tree_is_not_grown_again_on_labels_that_stay(tmp_path: Path):
    settings = Settings(corpus=tmp_path, out=tmp_path)
    with pytest.raises(
        ValueError, match="`rounds` must be 1 with `keep_labels`, got 2"
    ):
        override(settings, "triphone.keep_labels=true", "triphone.rounds=2")


def test_the_command_line_becomes_settings(tmp_path: Path):
    words = f"--corpus {tmp_path} --out {tmp_path} --seed 3 --set lm.order=2 --cores 1"
    settings = settings_from(RECIPE, parser(RECIPE).parse_args(words.split()))
    assert (settings.seed, settings.lm.order, settings.cores) == (3, 2, 1)


def test_a_corpus_that_is_not_there_ends_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--corpus", str(tmp_path / "gone"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    assert "expected the folder of a corpus" in capsys.readouterr().err


def test_results_in_the_corpus_are_refused_unless_they_are_hidden_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    corpus = write_corpus(tmp_path / "corpus")
    arguments = ["--corpus", str(corpus), "--to", "check", "--cores", "1", "--out"]
    for out in (corpus, corpus / "runs/swb"):
        with pytest.raises(SystemExit):
            main([*arguments, str(out)])
        assert f"`out` must not lie in the corpus {corpus}" in capsys.readouterr().err
    for _ in range(2):  # what the first call has left is no change for the second
        assert main([*arguments, str(corpus / ".runs/swb")]) == 0


def test_a_damaged_corpus_ends_a_command_with_its_message_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stages read a lexicon that one of them has written, and somebody has edited."""

    def fails() -> None:
        raise CorpusError("lexicon.txt:3: a word needs phones, got none")

    assert status_of(fails) == 1
    told = capsys.readouterr().err
    assert told == "error: lexicon.txt:3: a word needs phones, got none\n"
