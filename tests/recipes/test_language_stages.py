"""Stages `lm` and `graph`: further texts and models, and graphs that do not fit."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import Utterance, write_utterances
from lightning_adpsgd.asr.hmm.states import Topology, write_topology
from lightning_adpsgd.asr.language.lexicon import write_lexicon
from lightning_adpsgd.asr.language.ngram import estimate, read_arpa, write_arpa
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.planning.graph_size import (
    free_memory,
    ngrams_that_fit,
    problem,
    projected,
)
from recipes.hybrid.stages import graph as graphs
from recipes.hybrid.stages.lm import lm
from tests.recipes.experiments import digits_and_noises, run_stage

SPOKEN = {"train": ["one two", "two one", "one one two"], "dev": ["six six", "one two"]}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """An experiment with a lexicon of digits and a few sentences."""
    found = Settings(corpus=tmp_path, out=tmp_path)
    lexicon = digits_and_noises()
    found.directory("lexicon").mkdir(parents=True)
    write_lexicon(found.directory("lexicon"), lexicon)
    for split, texts in SPOKEN.items():
        some = [
            Utterance(f"{split}{n}", tmp_path, 0, n, n + 1, tuple(text.split()), "s")
            for n, text in enumerate(texts)
        ]
        found.directory("prepare").mkdir(parents=True, exist_ok=True)
        write_utterances(found.directory("prepare") / f"{split}.jsonl", some)
    found.directory("align").mkdir(parents=True)
    write_topology(found.directory("align") / "tree.json", Topology.of(lexicon))
    return found


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text("six six six\nSIX seven unheard\n\nsix six\n")
    return tmp_path / "text"


def probability_of_six(settings: Settings, *changes: str) -> float:
    output = run_stage(lm, override(settings, *changes), "lm")
    model = read_arpa(output / "lm.arpa")
    return 10 ** model.log10_probability("six", ("six",))


def test_a_model_in_capitals_is_that_of_the_same_words(settings, tmp_path, capsys):
    said = ["six six seven", "one six"]
    for name, texts in (("lower", said), ("upper", [text.upper() for text in said])):
        model = estimate([text.split() for text in texts], 2)
        write_arpa(tmp_path / f"{name}.arpa", model)
    lower = probability_of_six(settings, f"lm.arpa={tmp_path / 'lower.arpa'}")
    shutil.rmtree(settings.directory("lm"))
    upper = probability_of_six(settings, f"lm.arpa={tmp_path / 'upper.arpa'}")
    assert upper == pytest.approx(lower)
    assert "upper.arpa: its words are taken in lower case" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("neuf dix", r"x\.arpa has none of the lexicon's \d+ words, such as \w+; it"),
        ("SIX Six", r"x\.arpa: its words S\w+ and S\w+ differ in case alone"),
    ],
)
def test_a_model_without_a_word_of_the_lexicon_is_named(
    settings, tmp_path, words: str, problem: str
):
    write_arpa(tmp_path / "x.arpa", estimate([words.split()], 2))
    with pytest.raises(StageError, match=problem):
        probability_of_six(settings, f"lm.arpa={tmp_path / 'x.arpa'}")


def test_a_model_with_both_forms_of_a_word_is_refused_if_the_lexicon_has_it(
    settings, tmp_path
):
    path, lexicon = tmp_path / "x.arpa", settings.directory("lexicon") / "lexicon.txt"
    write_arpa(path, estimate([["six", "\u00e9", "e\u0301"]], 2))
    assert probability_of_six(settings, f"lm.arpa={path}") > 0
    shutil.rmtree(settings.directory("lm"))
    words = lexicon.read_text()
    lexicon.write_text(words + words.splitlines()[-1].replace("nine", "\u00e9") + "\n")
    with pytest.raises(
        StageError, match=r"x\.arpa: its words .* differ in their Unicode form \(N"
    ):
        probability_of_six(settings, f"lm.arpa={path}")


def test_a_text_without_audio_is_mixed_in(settings, text, capsys):
    without = probability_of_six(settings)
    settings.directory("lm").rename(settings.directory("lm").with_name("before"))
    capsys.readouterr()
    with_text = probability_of_six(settings, f"lm.text={text}")
    out = capsys.readouterr().out
    assert "transcripts, weight 0." in out
    assert f"{text}, weight 0." in out
    assert with_text > 2 * without


def test_a_model_from_elsewhere_is_mixed_in_with_a_given_weight(settings, tmp_path):
    write_arpa(tmp_path / "x.arpa", estimate([["six", "six", "elsewhere"]] * 9, 4))
    few = ("lm.weights=0.99,0.01", f"lm.arpa={tmp_path / 'x.arpa'}")
    many = ("lm.weights=0.2,0.8", f"lm.arpa={tmp_path / 'x.arpa'}")
    elsewhere = replace(settings, out=tmp_path)
    rare = probability_of_six(elsewhere, *few)
    (tmp_path / "exp/lm").rename(tmp_path / "exp/before")
    assert probability_of_six(elsewhere, *many) > rare
    words = {
        w for n in read_arpa(tmp_path / "exp/lm/lm.arpa").log10_probabilities for w in n
    }
    assert "elsewhere" not in words


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has no sentence"),
        (b"a\n<s> b </s>\n", ":2: must not have <s>"),
        (b"a\n\ngr\xfcn\n", ":3: expected UTF-8"),
    ],
)
def test_a_text_that_cannot_be_used_is_said(settings, tmp_path, content, reason):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(StageError, match=reason):
        probability_of_six(settings, f"lm.text={tmp_path / 'text'}")


def test_weights_must_fit_what_there_is(settings):
    with pytest.raises(ValueError, match="`weights` must be 1 numbers that sum to 1"):
        override(settings, "lm.weights=0.5,0.5")


def test_a_bound_on_the_number_of_ngrams_is_kept_to(settings):
    output = run_stage(lm, override(settings, "lm.max_ngrams=1"), "lm")
    lengths = {len(n) for n in read_arpa(output / "lm.arpa").log10_probabilities}
    assert lengths == {1}


def test_projections_are_those_of_graphs_that_were_measured():
    for ngrams, arcs, seconds, gigabytes in (
        (100_000, 4.2e6, 34, 1.3),
        (200_000, 6.8e6, 64, 2.5),
        (863_000, 22.3e6, 262, 6.8),
    ):
        found = projected({1: 30_000, 2: ngrams}, in_context=True)
        assert found.arcs == pytest.approx(arcs, rel=0.12)
        assert found.seconds == pytest.approx(seconds, rel=0.2)
        assert found.bytes / 1e9 == pytest.approx(gigabytes, rel=0.25)


def test_the_number_that_is_named_fits():
    counts = {1: 30_000, 2: 2_000_000, 3: 2_000_000}
    reason = problem(counts, True, memory=16e9)
    assert reason is not None
    assert "GB are free; set lm.max_ngrams=" in reason
    fits = ngrams_that_fit(16e9, 30_000, in_context=True)
    assert problem({1: 30_000, 2: fits - 30_000}, True, memory=16e9) is None
    assert problem({1: 30_000, 2: fits}, True, memory=16e9) is not None
    assert problem(counts, True, memory=None) is None


def test_a_graph_that_does_not_fit_is_not_composed(settings, monkeypatch):
    run_stage(lm, settings, "lm")
    monkeypatch.setattr(graphs, "free_memory", lambda: 1e3)
    with pytest.raises(StageError, match=r"0\.000001 GB are free|1e-06 GB are free"):
        run_stage(graphs.graph, settings, "graph")


def test_a_damaged_lexicon_ends_the_stage_with_its_line(settings):
    run_stage(lm, settings, "lm")
    path = settings.directory("lexicon") / "lexicon.txt"
    path.write_text("\n" + path.read_text())
    with pytest.raises(StageError, match=r"lexicon\.txt:1: expected a word and phones"):
        run_stage(graphs.graph, settings, "graph")


def test_memory_is_that_of_the_machine_or_of_the_group(tmp_path):
    (tmp_path / "proc").mkdir()
    assert free_memory(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    assert free_memory(tmp_path) == 4096
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.stat").write_text("anon 1000\nfile 9000\n")
    assert free_memory(tmp_path) == 4096
    (group / "memory.max").write_text("3000\n")
    assert free_memory(tmp_path) == 2000
    job = group / "system.slice/slurmstepd.scope/job_7"
    (job / "step_0").mkdir(parents=True)
    (job / "memory.max").write_text("1500\n")
    (job / "memory.stat").write_text("anon 700\nfile 1\n")
    (tmp_path / "proc/self").mkdir()
    own = "/system.slice/slurmstepd.scope/job_7/step_0"
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/\n0::{own}\n")
    assert free_memory(tmp_path) == 800
