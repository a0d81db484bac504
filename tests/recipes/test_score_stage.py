import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile

from lightning_adpsgd.asr.corpora.corpus import Utterance, write_utterances
from lightning_adpsgd.asr.scoring import Errors
from lightning_adpsgd.asr.scoring.nist import find_hubscr
from lightning_adpsgd.report import collect
from recipes.hybrid.pipeline.command import parser, settings_from
from recipes.hybrid.pipeline.runner import run_stages
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.recognition import scoring
from recipes.hybrid.recognition.figures import hub5_size
from recipes.hybrid.stages import STAGES
from recipes.hybrid.stages.score import score
from recipes.hybrid.training.word_tables import figures_of
from recipes.kaldi.__main__ import RECIPE as KALDI
from recipes.librispeech.__main__ import RECIPE as LIBRISPEECH
from recipes.switchboard.__main__ import RECIPE as SWITCHBOARD

STM = """;; LABEL "O" "Overall" "Overall"
sw_1 A s1 0.0 2.0 <O,sw,M> SO ((UH)) U S <B_ASIDE> IS LARGE
en_2 2 s2 0.0 2.0 <O,en,F> YES INDEED
en_3 A s3 0.0 2.0 <O,en,F> NOBODY HEARD THIS
"""
SWB = """sw_1 A 0.10 0.10 so
sw_1 A 0.20 0.10 um
sw_1 A 0.40 0.20 u._s.
sw_1 A 0.60 0.20 is
sw_1 A 0.80 0.20 [laughter]
sw_1 A 1.00 0.20 big
"""
CH = "en_2 B 0.10 0.10 yes\n"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(corpus=tmp_path, out=tmp_path)
    prepared, decoded = settings.directory("prepare"), settings.directory("decode")
    for folder in (prepared, decoded, settings.directory("score")):
        folder.mkdir(parents=True)
    for split, stem, channel in (("swb", "SW_1", 0), ("ch", "en_2", 1)):
        path, name = Path(f"{stem}.sph"), f"{stem}-{'AB'[channel]}_000000-000200"
        utterance = Utterance(name, path, channel, 0.0, 2.0, ("x",), split)
        write_utterances(prepared / f"{split}.jsonl", [utterance])
    (prepared / "eval.stm").write_text(STM)
    (decoded / "swb.ctm").write_text(SWB)
    (decoded / "ch.ctm").write_text(CH)
    (decoded / "decode.json").write_text('{"acoustic_scale": 0.1}')
    return settings


EXPECTED = {
    "SWB": Errors(6, 1, 0, 0, 1, 1),  # (UH) so u s is large -> big
    "CH": Errors(2, 0, 1, 0, 1, 1),
    "total": Errors(8, 1, 1, 0, 2, 2),
}


def run(settings: Settings) -> dict:
    score(settings, settings.directory("score"))
    return json.loads((settings.directory("score") / "score.json").read_text())


def errors_of(report: dict) -> dict[str, Errors]:
    return {
        part: Errors(**{name: counts[name] for name in Errors._fields})
        for part, counts in report["parts"].items()
    }


def test_parts_are_counted_without_hubscr(settings, monkeypatch, capsys):
    monkeypatch.setattr(scoring, "find_hubscr", lambda: None)
    report = run(settings)
    assert errors_of(report) == EXPECTED
    assert report["acoustic_scale"] == 0.1
    assert "not installed" in report["scorer"]
    said = capsys.readouterr().out
    assert "1 sides of the reference have no utterance" in said
    assert "en_3 A" in said


def test_a_word_in_another_unicode_form_is_no_error(settings, monkeypatch):
    monkeypatch.setattr(scoring, "find_hubscr", lambda: None)
    prepared, decoded = settings.directory("prepare"), settings.directory("decode")
    apart, joined = "se\u0301", "s\xe9"
    # What the lexicon has in NFC, its reference in NFD, and the other way round.
    (prepared / "eval.stm").write_text(STM.replace("SO", apart))
    (decoded / "swb.ctm").write_text(SWB.replace("so", joined))
    (decoded / "ch.ctm").write_text(CH.replace("yes", "ye\u0301s"))
    stm = (prepared / "eval.stm").read_text().replace("YES", "Y\xe9S")
    (prepared / "eval.stm").write_text(stm)
    (prepared / "eval.glm").write_text(f";;\n{apart} => {joined}\n")
    assert errors_of(run(settings)) == EXPECTED


@pytest.mark.skipif(find_hubscr() is None, reason="NIST's SCTK is not installed")
def test_hubscr_and_the_own_scorer_agree_and_nist_is_named(settings):
    report = run(settings)
    assert errors_of(report) == EXPECTED
    assert report["scorer"] == f"NIST's {find_hubscr()}; our scorer agrees"


def test_a_disagreement_is_said_aloud(settings, monkeypatch, capsys):
    wrong = {("s1", "sw_1"): Errors(6, 2, 0, 0, 1, 1), ("s2", "en_2"): EXPECTED["CH"]}
    monkeypatch.setattr(scoring, "find_hubscr", lambda: Path("hubscr.pl"))
    monkeypatch.setattr(scoring, "run_hubscr", lambda *_: Path("x.sgml"))
    monkeypatch.setattr(scoring, "read_sgml", lambda _: wrong)
    report = run(settings)
    assert report["parts"]["total"]["substitutions"] == 2
    assert "DISAGREES" in report["scorer"]
    assert "hubscr.pl disagree on 1 speakers" in capsys.readouterr().out


def test_speakers_and_alignments_can_be_read(settings, monkeypatch):
    monkeypatch.setattr(scoring, "find_hubscr", lambda: None)
    run(settings)
    folder = settings.directory("score")
    assert "| s2 " in (folder / "speakers.txt").read_text()
    lines = (folder / "alignments.txt").read_text().split("\n")
    assert "REF:  so (uh) u s is LARGE" in [line.rstrip() for line in lines]
    assert "large ==> big" in (folder / "confusions.txt").read_text()


def test_a_reference_that_cannot_be_used_stops_with_its_line(settings):
    path = settings.directory("prepare") / "eval.stm"
    path.write_text("sw_1 A s1 0.0 2.0 <O> (NOT CLOSED\n")
    with pytest.raises(StageError, match=r"reference\.stm:2: parentheses"):
        run(settings)


def test_malformed_lines_of_the_reference_are_left_out_aloud(settings, capsys):
    malformed = "# a remark\nsw_1 A s1 x 4.0 <O,sw,M> AND SO ON\nen_2 2\n"
    path = settings.directory("prepare") / "eval.stm"
    path.write_text(STM + malformed)
    assert errors_of(run(settings)) == EXPECTED
    assert "WARNING: malformed stm line: 2" in capsys.readouterr().out


def test_without_a_test_set_nothing_is_scored(settings, capsys):
    for split in ("swb", "ch"):
        (settings.directory("prepare") / f"{split}.jsonl").unlink()
    output = settings.directory("score")
    score(settings, output)
    assert "no test set: nothing is scored" in capsys.readouterr().out
    assert not (output / "score.json").exists()


def test_an_utterance_that_was_not_decoded_is_left_out_aloud(settings, capsys):
    settings = dataclasses.replace(settings, scoring="plain")
    (settings.directory("prepare") / "eval.stm").unlink()
    decoded = settings.directory("decode")
    (decoded / "swb.txt").write_text("SW_1-A_000000-000200 x\n")
    (decoded / "swb.ctm").write_text("sw_1 A 0.10 0.10 x\n")
    (decoded / "ch.txt").write_text("")
    (decoded / "ch.ctm").write_text("")
    assert errors_of(run(settings))["total"] == Errors(1, 0, 0, 0, 1, 0)
    said = " ".join(capsys.readouterr().out.split())
    told = "WARNING: ch: 1 of 1 utterances have no features, for example en_2-B_000000"
    assert told in said


def test_a_test_set_without_reference_has_that_of_its_utterances(settings):
    name = "1272-128104-A_000000-000200"
    words = ("so", "uh", "[noise]", "large")
    utterance = Utterance(name, Path("x.flac"), 0, 0.0, 2.0, words, "1272")
    write_utterances(settings.directory("prepare") / "test-clean.jsonl", [utterance])
    ctm = "1272-128104 A 0.10 0.10 so\n"
    (settings.directory("decode") / "test-clean.ctm").write_text(ctm)
    errors = errors_of(run(settings))
    assert errors["test-clean"] == Errors(3, 0, 1, 0, 1, 1)
    assert errors["SWB"] == EXPECTED["SWB"]


@pytest.mark.parametrize("hubscr", [None, Path("hubscr.pl")])
def test_words_of_another_language_are_no_hesitations(settings, monkeypatch, hubscr):
    monkeypatch.setattr(scoring, "find_hubscr", lambda: hubscr)
    for split in ("swb", "ch"):
        (settings.directory("prepare") / f"{split}.jsonl").unlink()
    name, words = "anna-A_000000-000200", ("er", "geht", "um", "acht", "[noise]")
    utterance = Utterance(name, Path("anna.wav"), 0, 0.0, 2.0, words, "anna")
    write_utterances(settings.directory("prepare") / "test.jsonl", [utterance])
    ctm = "anna A 0.1 0.1 geht\nanna A 0.3 0.1 acht\nanna A 0.5 0.1 ach\n"
    (settings.directory("decode") / "test.ctm").write_text(ctm)
    report = run(dataclasses.replace(settings, scoring="plain"))
    assert errors_of(report)["test"] == Errors(4, 0, 2, 1, 1, 1)
    assert report["scorer"] == "our scorer; words are compared as they are"


@pytest.mark.parametrize(
    ("recipe", "chosen"),
    [(KALDI, "plain"), (LIBRISPEECH, "plain"), (SWITCHBOARD, "hub5")],
)
def test_hesitations_are_those_of_switchboard_alone(tmp_path, recipe, chosen):
    arguments = ["--corpus", str(tmp_path), "--out", str(tmp_path)]
    options = parser(recipe).parse_args(arguments)
    assert settings_from(recipe, options).scoring == chosen


def test_another_way_to_compare_words_is_another_scale_and_no_other_training(settings):
    corpus = settings.corpus / "discs"
    corpus.mkdir()
    settings = dataclasses.replace(settings, corpus=corpus, out=settings.out / "again")
    stages = [stage._replace(run=lambda *_: None) for stage in STAGES]
    run_stages(settings, stages)
    plain = dataclasses.replace(settings, scoring="plain")
    problem = "`baseline`.*compared was absent, is plain.*--from baseline --to baseline"
    with pytest.raises(StageError, match=problem):
        run_stages(plain, stages)
    for stage in ("baseline", "decode"):
        run_stages(plain, stages, first=stage, last=stage, redo=True)
    run_stages(plain, stages, first="check", last="decode")


def test_rates_have_intervals_and_characters(settings, monkeypatch, capsys):
    monkeypatch.setattr(scoring, "find_hubscr", lambda: None)
    report = run(settings)
    total = report["parts"]["total"]
    # Two speakers, of 1 error in 6 and in 2 words: all draws lie between.
    assert total["wer_low"] == pytest.approx(1 / 6)
    assert total["wer_high"] == pytest.approx(1 / 2)
    assert report["parts"]["SWB"]["wer_low"] is None  # one speaker
    # "so u s is large yes indeed" -> "so u s is big yes"
    assert total["cer"] == pytest.approx((4 + 7) / (15 + 10))
    said = capsys.readouterr().out
    assert "total: WER 25.0% (16.7% to 50.0%, 95 % by a bootstrap" in said
    assert "NOT all of Hub5'00: 2 segments of 4,458 and 8 words of 42,989" in said


def write_heard(settings: Settings, split: str, heard: dict[str, list[str]]) -> None:
    """A test set in which all say yes, each time into a file of its own."""
    spoken, ctm = [], ""
    for speaker, words in heard.items():
        for take, word in enumerate(words):
            name, sound = f"{speaker}_{take}", Path(f"{speaker}_{take}.wav")
            span = f"{name}-A_000000-000200"
            spoken.append(Utterance(span, sound, 0, 0.0, 2.0, ("yes",), speaker))
            ctm += f"{name} A 0.10 0.10 {word}\n"
    write_utterances(settings.directory("prepare") / f"{split}.jsonl", spoken)
    (settings.directory("decode") / f"{split}.ctm").write_text(ctm)


def test_utterances_of_a_speaker_stay_together_where_each_is_a_file(
    settings, monkeypatch
):
    monkeypatch.setattr(scoring, "find_hubscr", lambda: None)
    write_heard(settings, "test", {"anna": ["no"] * 6, "bert": ["yes"] * 4})
    write_heard(settings, "test-clean", {"carl": ["yes", "no"] * 5})
    parts = run(settings)["parts"]
    # A quarter of the draws is of one speaker alone, who is all wrong or all right.
    assert (parts["test"]["wer_low"], parts["test"]["wer_high"]) == (0, 1)
    assert parts["test-clean"]["wer"] == 0.5
    assert parts["test-clean"]["wer_low"] is None


def test_weights_and_biases_gets_the_interval_of_the_score(settings, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setattr(scoring, "find_hubscr", lambda: None)
    total = run(settings)["parts"]["total"]
    shown = figures_of(settings, settings.directory("score"))
    assert shown["score/wer_total_low"] == total["wer_low"]
    assert shown["score/wer_SWB"] == pytest.approx(1 / 6)
    assert "score/wer_SWB_low" not in shown  # one speaker


def test_a_run_is_compared_with_those_scored_before(settings, monkeypatch, capsys):
    monkeypatch.setattr(scoring, "find_hubscr", lambda: None)
    run(settings)
    second = dataclasses.replace(settings, run="other")
    decoded = second.directory("decode")
    decoded.mkdir(parents=True)
    (decoded / "swb.ctm").write_text(SWB.replace(" is", " was"))
    (decoded / "ch.ctm").write_text(CH + "en_2 B 0.30 0.10 deed\nen_2 B 0.40 0.10 x\n")
    (decoded / "decode.json").write_text("{}")
    second.directory("score").mkdir(parents=True)
    compared = run(second)["compared"][settings.run]
    assert compared["num_segments"] == 2
    assert compared["difference"] == pytest.approx(2 / 8)
    said = capsys.readouterr().out
    assert f"against {settings.run}: +25.0% WER" in said


def test_a_run_that_was_scored_on_another_reference_is_said_not_to_be_compared(
    settings, monkeypatch, capsys
):
    monkeypatch.setattr(scoring, "find_hubscr", lambda: None)
    write_heard(settings, "test", {"anna": ["yes"] * 2, "bert": ["no"] * 2})
    run(settings)
    write_heard(settings, "test", {"anna": ["yes"] * 2})
    decoded = dataclasses.replace(settings, run="other").directory("decode")
    shutil.copytree(settings.directory("decode"), decoded)
    second = dataclasses.replace(settings, run="other")
    second.directory("score").mkdir(parents=True)
    assert run(second)["compared"] == {}
    said = capsys.readouterr().out
    assert f"against {settings.run}: not compared: both systems must have" in said


@pytest.mark.parametrize("changed", ["rules", "glm", "words"])
def test_runs_whose_words_were_compared_in_another_way_are_not_compared(
    settings, monkeypatch, capsys, changed
):
    monkeypatch.setattr(scoring, "find_hubscr", lambda: None)
    run(settings)
    second = dataclasses.replace(settings, run="other")
    shutil.copytree(settings.directory("decode"), second.directory("decode"))
    second.directory("score").mkdir(parents=True)
    if changed == "rules":
        second = dataclasses.replace(second, scoring="plain")
    elif changed == "glm":
        with (settings.directory("prepare") / "eval.glm").open("a") as file:
            file.write("NOBODY => SAYS IT / [ ] __ [ ]\n")
    else:
        reference = settings.directory("prepare") / "eval.stm"
        reference.write_text(STM.replace("INDEED", "OF COURSE"))
    assert run(second)["compared"] == {}
    said = capsys.readouterr().out
    assert f"against {settings.run}: not compared: " in said
    assert "has other words for the same segments, or they were compared in" in said


def test_the_lines_of_a_reference_are_in_the_order_of_the_test_sets(settings):
    splits = ("dev-clean", "test-clean", "dev-other", "test-other", "test")
    spoken = {split: [] for split in splits}
    for split in splits:
        name = f"{split}-A_000000-000200"
        one = Utterance(name, Path(f"{split}.wav"), 0, 0.0, 2.0, ("yes",), split)
        spoken[split].append(one)
    written = [*scoring._reference(settings, spoken, None)]
    assert [line.split()[0] for line in written] == [*splits]


def test_the_best_epoch_is_compared_with_the_last_and_with_nothing_unfinished(
    settings, monkeypatch
):
    monkeypatch.setattr(scoring, "find_hubscr", lambda: None)
    decoded, scored = settings.directory("decode"), settings.directory("score")
    shutil.copytree(decoded, decoded.with_name("copy"))
    decoded.with_name("copy").rename(decoded / "best")
    unfinished = scored.with_name(".other.partial")
    run(settings)
    shutil.copytree(scored, unfinished)
    report = json.loads((scored / "best/score.json").read_text())
    assert report["compared"].keys() == {"the last epoch"}
    assert report["compared"]["the last epoch"]["difference"] == 0
    assert run(settings)["compared"] == {}
    again = scored.with_name(f".{scored.name}.partial")  # with `--redo`
    again.mkdir()
    score(settings, again)
    report = json.loads((again / "best/score.json").read_text())
    assert report["compared"].keys() == {"the last epoch"}


def test_the_whole_test_set_is_known():
    said = hub5_size({"num_segments": 4458, "num_words": 42_989})
    assert said == "all of Hub5'00: 4,458 segments, 42,989 words"


def worst_of(settings: Settings) -> list[dict]:
    """One utterance of SWB and one of CH, which have an error each."""
    run(settings)
    text = (settings.directory("score") / "utterances.json").read_text()
    return sorted(json.loads(text), key=lambda one: one["part"], reverse=True)


def test_the_worst_utterances_are_listed_with_their_aligned_words(settings):
    first, second = worst_of(settings)
    assert (first["file"], first["channel"], first["part"]) == ("sw_1", "a", "SWB")
    assert (first["words"], first["errors"]) == (6, 1)
    assert [pair[:3] for pair in second["pairs"]] == [
        ["C", "yes", "yes"],
        ["D", "indeed", ""],
    ]


def test_a_recognised_word_has_its_confidence_also_where_rules_made_two_of_it(settings):
    sure = [f"{line} 0.{place}" for place, line in enumerate(SWB.splitlines(), 1)]
    (settings.directory("decode") / "swb.ctm").write_text("\n".join(sure) + "\n")
    spoken = {pair[2]: pair[3] for pair in worst_of(settings)[0]["pairs"]}
    assert spoken["so"] == 0.1
    assert spoken["u"] == spoken["s"] == 0.3
    assert spoken["big"] == 0.6
    assert worst_of(settings)[1]["pairs"][0][3] is None  # `ch.ctm` tells none


def test_an_utterance_can_be_heard_where_its_recording_is(settings, tmp_path):
    recording = tmp_path / "SW_1.wav"
    samples = np.linspace(-0.5, 0.5, 8000 * 3, dtype=np.float32)
    soundfile.write(recording, samples, 8000)
    utterance = Utterance("SW_1-A_000000-000200", recording, 0, 0.0, 2.0, ("x",), "swb")
    write_utterances(settings.directory("prepare") / "swb.jsonl", [utterance])
    first, second = worst_of(settings)
    heard, rate = soundfile.read(settings.directory("score") / first["audio"])
    assert rate == 8000
    np.testing.assert_allclose(heard, samples[:16000], atol=1e-4)
    assert "audio" not in second  # its recording is gone


def test_the_page_shows_what_the_stage_has_left(settings):
    run(settings)
    report = collect([settings.directory("score")])
    assert report.scores[0]["parts"]["total"]["num_words"] == 8
    assert len(report.words[0]["utterances"]) == 2
