"""The data stages on a tiny corpus: nothing is lost without being counted."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torchaudio.functional import resample

from lightning_adpsgd.asr.corpora.corpus import (
    Skipped,
    Utterance,
    read_utterances,
    write_utterances,
)
from lightning_adpsgd.asr.frames import writing
from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.frames.writing import FrameWriter
from lightning_adpsgd.asr.language.lexicon import read_lexicon
from lightning_adpsgd.asr.sound.channels import read_facts
from lightning_adpsgd.asr.sound.features import log_mel, normalise_side
from lightning_adpsgd.asr.sound.sphere import read_channel
from recipes.hybrid.data.selection import (
    first_utterances,
    hold_out,
    limit_repeats,
)
from recipes.hybrid.pipeline.groups import PrepareSettings
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.runner import run_stages
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.stages import STAGES
from recipes.hybrid.stages import features as feature_stage
from tests.asr.small_disk import on_a_small_disk
from tests.asr.tiny import (
    noise,
    write_corpus,
    write_fisher_call,
    write_sphere,
    write_transcript,
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    corpus = write_corpus(tmp_path / "corpus")
    return Settings(corpus=corpus, out=tmp_path / "run", cores=1)


def _run(settings: Settings, last: str) -> None:
    run_stages(settings, STAGES, last=last)


def _split(settings: Settings, split: str) -> list[Utterance]:
    return read_utterances(settings.directory("prepare") / f"{split}.jsonl")


def _skipped(settings: Settings) -> dict[str, int]:
    summary = json.loads((settings.directory("prepare") / "summary.json").read_text())
    return summary["skipped"]["counts"]


def test_the_splits_are_data_directories_of_kaldi_too(settings: Settings):
    _run(settings, "prepare")
    folder = settings.directory("prepare") / "kaldi"
    assert {path.name for path in folder.iterdir()} == {"train", "dev", "eval2000"}
    tested = {path.name for path in (folder / "eval2000").iterdir()}
    needed = {"wav.scp", "segments", "utt2spk", "spk2utt", "text", "stm", "glm"}
    assert needed | {"reco2file_and_channel"} == tested
    spoken = sorted(utterance.id for utterance in _split(settings, "train"))
    segments = (folder / "train" / "segments").read_text().splitlines()
    assert [line.split()[0] for line in segments] == spoken
    both = sorted(u.id for part in ("swb", "ch") for u in _split(settings, part))
    text = (folder / "eval2000" / "text").read_text().splitlines()
    assert [line.split()[0] for line in text] == both


def test_every_utterance_reaches_the_features(settings: Settings):
    _run(settings, "features")
    for split in ("train", "dev", "swb", "ch"):
        spoken = _split(settings, split)
        store = FrameStore(settings.directory("features") / split)
        assert list(store.ids) == [utterance.id for utterance in spoken]
        for position, utterance in enumerate(spoken):
            frames = store.frames(position)
            assert len(frames) == round(utterance.duration_s * 100)
    assert len(_split(settings, "train")) == 8
    assert len(_split(settings, "dev")) == 4
    assert [u.words for u in _split(settings, "swb")] == [("yes", "no")]


def test_features_of_a_side_are_normalised(settings: Settings):
    _run(settings, "features")
    store = FrameStore(settings.directory("features") / "train")
    side = torch.cat([store.frames(0), store.frames(1)]).double()
    torch.testing.assert_close(
        side.mean(0), torch.zeros(40).double(), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(
        side.std(0, correction=0), torch.ones(40).double(), atol=1e-3, rtol=0
    )


def test_several_processes_give_the_same_frames(settings: Settings):
    _run(settings, "features")
    store = FrameStore(settings.directory("features") / "train")
    other = dataclasses.replace(settings, out=settings.out / "two", cores=2)
    _run(other, "features")
    parallel = FrameStore(other.directory("features") / "train")
    n = store.num_frames
    assert torch.equal(store.frame_range(0, n), parallel.frame_range(0, n))


def _sides_read_with_a_break(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, after: int
) -> list[tuple[str, int]]:
    """What the feature stage reads if it is interrupted after so many, and resumed."""
    read: list[tuple[str, int]] = []

    def noted(path: Path, channel: int) -> np.ndarray:
        if len(read) == after and not resumed:
            raise KeyboardInterrupt
        read.append((path.stem, channel))
        return read_channel(path, channel)

    monkeypatch.setattr(feature_stage, "read_channel", noted)
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        _run(settings, "features")
    assert not settings.directory("features").exists()
    resumed = True
    _run(settings, "features")
    return read


def test_an_interrupted_feature_stage_goes_on_where_it_was(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    read = _sides_read_with_a_break(settings, monkeypatch, 3)
    # no side twice: four of train, two of dev, one of each test part
    assert len(read) == len(set(read)) == 8


def test_a_folder_whose_name_is_no_text_is_read_and_goes_on_where_it_was(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    folder = next(settings.corpus.rglob("sw02001.sph")).parent
    folder.rename(folder.with_name(b"disc\xff".decode(errors="surrogateescape")))
    read = _sides_read_with_a_break(settings, monkeypatch, 3)
    assert len(read) == len(set(read)) == 8


def test_training_speech_is_there_at_other_speeds_too(
    settings: Settings, capsys: pytest.CaptureFixture[str]
):
    settings = override(settings, "features.speeds=0.9,1.1")
    _run(settings, "features")
    ids = [utterance.id for utterance in _split(settings, "train")]
    store = FrameStore(settings.directory("features") / "train")
    copies = [f"sp{speed}-{name}" for speed in (0.9, 1.1) for name in ids]
    assert store.ids.tolist() == [*ids, *copies]
    for position, utterance in enumerate(_split(settings, "train")):
        for place, speed in enumerate((1, 0.9, 1.1)):
            frames = store.frames(position + place * len(ids))
            assert abs(len(frames) - 100 * utterance.duration_s / speed) <= 1
    for split in ("dev", "swb", "ch"):
        store = FrameStore(settings.directory("features") / split)
        assert store.ids.tolist() == [u.id for u in _split(settings, split)]
    said = "train: 0.01 h as recorded and 0.01 h of copies at speeds 0.9, 1.1"
    assert said in capsys.readouterr().out


def test_frames_of_copies_are_those_of_resampled_sound(settings: Settings):
    """Normalised as a side of their own."""
    settings = override(settings, "features.speeds=0.9", "features.dtype=float32")
    _run(settings, "features")
    spoken = [u for u in _split(settings, "train") if u.id.startswith("sw02001-A")]
    sound = read_channel(spoken[0].recording, 0)
    spans = [(round(8000 * u.start_s), round(8000 * u.end_s)) for u in spoken]
    cuts = [torch.from_numpy(sound[start:end].copy()) for start, end in spans]
    slow = [resample(cut, 9, 10)[: len(cut) * 10 // 9].numpy() for cut in cuts]
    store = FrameStore(settings.directory("features") / "train")
    for utterance, expected in zip(
        spoken, normalise_side([log_mel(cut) for cut in slow]), strict=True
    ):
        found = store.frames(store.position(f"sp0.9-{utterance.id}"))
        torch.testing.assert_close(found, expected[: len(found)], atol=1e-2, rtol=0)


def test_copies_go_on_where_they_were_interrupted(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    settings = override(settings, "features.speeds=0.9")
    whole = dataclasses.replace(settings, out=settings.out / "whole")
    _run(whole, "features")
    read = _sides_read_with_a_break(settings, monkeypatch, 6)
    # of train four sides and their copies, the others once
    assert len(read) == 2 * 4 + 4
    assert set(Counter(read).values()) == {1, 2}
    one, other = (
        FrameStore(s.directory("features") / "train") for s in (settings, whole)
    )
    n = one.num_frames
    assert torch.equal(one.frame_range(0, n), other.frame_range(0, n))


def test_other_speeds_ask_for_the_features_anew(settings: Settings):
    _run(settings, "features")
    with pytest.raises(StageError, match=r"`features`.*speeds was \[\], is \[0\.9\]"):
        _run(override(settings, "features.speeds=0.9"), "features")


def test_a_truncated_recording_is_left_out_with_its_hours(
    settings: Settings, capsys: pytest.CaptureFixture[str]
):
    path = settings.corpus / "LDC97S62/swb1_d1/data/sw02002.sph"
    path.write_bytes(path.read_bytes()[:9000])
    _run(settings, "prepare")
    assert all("sw02002" not in utterance.id for utterance in _split(settings, "train"))
    assert _skipped(settings) == {"no usable recording for the transcript": 4}
    printed = capsys.readouterr().out
    assert "unusable recording: 1" in printed
    assert "sw02002.sph: truncated: the header says 48000" in printed


def test_a_recording_that_breaks_after_the_check_is_counted(
    settings: Settings, capsys: pytest.CaptureFixture[str]
):
    _run(settings, "prepare")
    path = settings.corpus / "LDC97S62/swb1_d1/data/sw02001.sph"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"")
    with pytest.raises(StageError, match="corpus"):
        _run(settings, "features")
    run_stages(settings, STAGES, first="features", last="features")
    store = FrameStore(settings.directory("features") / "train")
    assert [name[:7] for name in store.ids] == ["sw02002"] * 4
    assert "train: left out: unreadable conversation side: 2" in capsys.readouterr().out


def test_a_side_without_any_sound_is_left_out_and_counted(
    settings: Settings, capsys: pytest.CaptureFixture[str]
):
    samples = noise(6.0)
    samples[:, 1] = 0
    path = settings.corpus / "LDC97S62/swb1_d1/data/sw02001.sph"
    write_sphere(path, samples, coding="PCM_16")
    _run(settings, "features")
    store = FrameStore(settings.directory("features") / "train")
    assert {name[:9] for name in store.ids} == {"sw02001-A", "sw02002-A", "sw02002-B"}
    said = capsys.readouterr().out
    assert "left out: unreadable conversation side: 1" in said
    assert "sw02001.sph B: nothing but digital silence where words are" in said


@pytest.mark.parametrize("cores", [1, 2])
def test_a_recording_that_is_gone_after_the_check_stops_the_features(
    settings: Settings, cores: int
):
    settings = dataclasses.replace(settings, cores=cores)
    _run(settings, "prepare")
    path = settings.corpus / "LDC97S62/swb1_d1/data/sw02001.sph"
    path.rename(path.with_suffix(".away"))
    with pytest.raises(OSError, match=r"sw02001\.sph: .*No such file.* continues"):
        run_stages(settings, STAGES, first="features", last="features")
    path.with_suffix(".away").rename(path)
    _run(settings, "features")
    store = FrameStore(settings.directory("features") / "train")
    assert store.ids.tolist() == [u.id for u in _split(settings, "train")]


def test_without_the_program_that_the_check_had_the_features_stop(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = settings.corpus / "LDC97S62/swb1_d1/data/sw02001.sph"
    header = path.read_bytes()[:1024].replace(
        b"-s4 ulaw", b"-s26 ulaw,embedded-shorten-v2.00"
    )
    path.write_bytes(header[:1024] + path.read_bytes()[1024:])
    program = tmp_path / "bin/sph2pipe"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(program.parent))
        _run(settings, "prepare")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="needs the program sph2pipe on PATH"):
        _run(settings, "features")


@pytest.mark.parametrize("cores", [1, 2])
def test_a_full_disk_stops_the_features_and_leaves_out_no_side(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, cores: int
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    settings = dataclasses.replace(settings, cores=cores)
    _run(settings, "lm")
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_rows", full)
        with pytest.raises(OSError, match="No space left"):
            _run(settings, "features")
    _run(settings, "features")
    store = FrameStore(settings.directory("features") / "train")
    assert store.ids.tolist() == [u.id for u in _split(settings, "train")]


def test_a_transcript_beyond_its_audio_is_counted_or_clipped(settings: Settings):
    lines = ["1.0 2.0 yes", "4.0 6.05 no", "5.0 7.0 yes", "9.0 9.5 no"]
    write_transcript(settings.corpus, 2001, "A", lines)
    _run(settings, "prepare")
    kept = [u for u in _split(settings, "train") if u.id.startswith("sw02001-A")]
    assert [(u.start_s, u.end_s) for u in kept] == [(1.0, 2.0), (4.0, 6.0)]
    assert _skipped(settings) == {"transcript beyond the end of its audio": 2}


def test_a_line_that_is_there_twice_is_used_once(settings: Settings):
    write_transcript(settings.corpus, 2001, "A", ["1.0 2.0 yes", "1.0 2.0 yes no"])
    _run(settings, "features")
    kept = [u for u in _split(settings, "train") if u.id.startswith("sw02001-A")]
    assert [u.words for u in kept] == [("yes",)]
    assert _skipped(settings) == {"transcribed a second time": 1}


def test_malformed_lines_are_counted(settings: Settings):
    write_transcript(settings.corpus, 2001, "A", ["1.0 2.0 yes", "oops", "3.0 x no"])
    _run(settings, "prepare")
    assert _skipped(settings) == {"malformed transcript line": 2}


def test_a_missing_test_set_is_said_and_training_goes_on(
    settings: Settings, capsys: pytest.CaptureFixture[str]
):
    shutil.rmtree(settings.corpus / "LDC2002S09")
    shutil.rmtree(settings.corpus / "LDC2002T43")
    _run(settings, "features")
    assert settings.splits() == ("train", "dev")
    printed = capsys.readouterr().out
    assert "CallHome part of the test set: MISSING" in printed
    assert "no test utterances for ch, swb" in printed


def test_a_missing_part_of_the_test_set_leaves_the_other(settings: Settings):
    (settings.corpus / "LDC2002S09/english/en_4156.sph").unlink()
    _run(settings, "prepare")
    assert settings.splits() == ("train", "dev", "swb")
    assert _skipped(settings) == {"no usable recording for the transcript": 1}


def test_missing_training_audio_stops_with_a_reason(settings: Settings):
    shutil.rmtree(settings.corpus / "LDC97S62/swb1_d1")
    with pytest.raises(
        StageError, match="of 3 transcribed conversations none has a usable"
    ):
        _run(settings, "prepare")


def test_a_missing_dictionary_stops_with_a_reason(settings: Settings):
    name = "LDC97S62/swb_ms98_transcriptions/sw-ms98-dict.text"
    (settings.corpus / name).unlink()
    with pytest.raises(StageError, match=r"expected the dictionary sw-ms98-dict\.text"):
        _run(settings, "check")


def test_an_empty_corpus_stops_with_a_reason(tmp_path: Path):
    settings = Settings(corpus=tmp_path, out=tmp_path / "run")
    with pytest.raises(StageError, match="there is nothing to train on"):
        _run(settings, "check")


def test_too_few_speakers_to_hold_some_out_are_refused(tmp_path: Path):
    corpus = write_corpus(tmp_path / "corpus", conversations=1)
    settings = Settings(corpus=corpus, out=tmp_path / "run")
    said = "found 2 sides of 2 speakers in all; lower `prepare.min_dev_sides`, or hold "
    with pytest.raises(StageError, match=said + "out .* by `prepare.dev_utterances`$"):
        _run(settings, "prepare")


@pytest.mark.parametrize(
    ("speakers", "other_way", "remedy"),
    [
        ("ab", "", "of 2 speakers in all; lower `prepare.min_dev_sides`"),
        ("ab", "write", "in all; lower `prepare.min_dev_sides`, or write"),
        ("a", "write", "of 1 speakers in all; write"),
        ("a", "", "of 1 speakers in all; add speakers"),
    ],
)
def test_where_none_can_be_held_out_only_what_helps_is_advised(
    speakers: str, other_way: str, remedy: str
):
    with pytest.raises(StageError, match=f"{remedy}$"):
        hold_out([*map(_spoken, speakers)], PrepareSettings(), other_way=other_way)


def test_an_unknown_word_is_said_with_file_and_line(
    settings: Settings, capsys: pytest.CaptureFixture[str]
):
    path = write_transcript(settings.corpus, 2001, "A", ["1.0 2.0 yes zebra zu-"])
    _run(settings, "lexicon")
    printed = capsys.readouterr().out
    assert f"out-of-vocabulary words: 1, for example 'zebra' at {path}:1" in printed
    assert f"broken-off words: 1, for example 'zu-' at {path}:1" in printed


def test_the_language_model_knows_all_words_and_maps_unknown_ones(settings: Settings):
    write_transcript(settings.corpus, 2001, "A", ["1.0 2.0 yes zebra"])
    dictionary = next(settings.corpus.rglob("sw-ms98-dict.text"))
    dictionary.write_text(dictionary.read_text() + "maybe m ey b iy\n")
    _run(settings, "lm")
    text = (settings.directory("lm") / "lm.arpa").read_text()
    words = {line.split("\t")[1] for line in text.splitlines() if "\t" in line}
    assert {"yes", "no", "maybe", "[noise]", "<unk>", "yes <unk>"} <= words
    assert "zebra" not in words
    assert "maybe" in read_lexicon(settings.directory("lexicon"))


def _spoken(speaker: str, words: str = "yes", channel: int = 0) -> Utterance:
    recording = Path(f"{speaker}.sph")
    return Utterance(
        speaker, recording, channel, 0.0, 1.0, tuple(words.split()), speaker
    )


@pytest.mark.parametrize(("speakers", "held_out"), [(3, 2), (10, 2), (100, 8)])
def test_the_last_speakers_are_held_out(speakers: int, held_out: int):
    spoken = [_spoken(f"s{i:03d}") for i in range(speakers)] * 3
    train, dev = hold_out(spoken, PrepareSettings())
    assert {u.speaker for u in dev} == {
        f"s{i:03d}" for i in range(speakers - held_out, speakers)
    }
    assert not {u.speaker for u in train} & {u.speaker for u in dev}
    assert len(train) + len(dev) == len(spoken)


def test_all_sides_of_a_held_out_speaker_are_held_out():
    spoken = [_spoken("a"), _spoken("b"), _spoken("z"), _spoken("z", channel=1)]
    train, dev = hold_out(spoken, PrepareSettings())
    assert [u.speaker for u in train] == ["a", "b"]
    assert [u.channel for u in dev] == [0, 1]


def test_repeats_are_thinned_by_the_draws_of_kaldis_script():
    spoken = [_spoken(f"{i:03d}", "uh-huh") for i in range(900)]
    spoken = [*spoken[:450], _spoken("x", "no"), *spoken[450:]]
    skipped = Skipped()
    kept = list(limit_repeats(spoken, 300, skipped))
    k, wanted = 0, []
    for utterance in spoken:
        if utterance.words == ("uh-huh",):
            k = (k + 103349) % 71147
            if k / 71147 >= 300 / 900:
                continue
        wanted.append(utterance)
    assert kept == wanted
    assert 250 < len(kept) < 350
    thinned = {"same words heard more than 300 times": 901 - len(kept)}
    assert skipped.counts == thinned
    assert len(list(limit_repeats(spoken, 0, Skipped()))) == 901


def test_a_text_heard_less_often_than_the_limit_stays_whole():
    spoken = [_spoken("a", "uh-huh")] * 299
    assert list(limit_repeats(spoken, 300, Skipped())) == spoken


def test_the_first_utterances_are_held_out_as_in_kaldis_recipe(settings: Settings):
    settings = override(settings, "prepare.dev_utterances=3")
    _run(settings, "prepare")
    dev = [utterance.id for utterance in _split(settings, "dev")]
    train = [utterance.id for utterance in _split(settings, "train")]
    assert [*dev, *train] == sorted([*dev, *train])
    assert len(dev) == 3
    with pytest.raises(StageError, match=r"must be below the 12 utterances.*got 12"):
        first_utterances([*map(_spoken, "abcdefghijkl")], 12)


def test_dev_is_of_the_first_source_and_its_speakers_of_no_other(tmp_path: Path):
    corpus = write_corpus(tmp_path / "corpus")
    write_fisher_call(corpus, 1, ["0.5 2.5 A: yes", "3.0 4.0 B: no"])
    sources = ("switchboard", "fisher")
    settings = Settings(corpus=corpus, out=tmp_path / "run", sources=sources, cores=1)
    _run(settings, "prepare")
    assert {u.speaker for u in _split(settings, "dev")} == {"sw02003-A", "sw02003-B"}
    speakers = {u.speaker for u in _split(settings, "train")}
    assert {"fe1", "fe2"} < speakers
    sexes = settings.directory("prepare") / "sexes.txt"
    assert sexes.read_text() == "fe1 f\nfe2 m\n"


def test_several_folders_of_discs_are_one_corpus(tmp_path: Path):
    corpus = write_corpus(tmp_path / "corpus")
    apart = tmp_path / "apart"
    shutil.move(corpus / "LDC2002S09", apart / "LDC2002S09")
    settings = Settings(
        corpus=corpus, discs=(apart, corpus), out=tmp_path / "run", cores=1
    )
    _run(settings, "prepare")
    assert settings.splits() == ("train", "dev", "swb", "ch")


def test_test_segments_are_extended_and_keep_their_names(settings: Settings):
    settings = override(settings, "prepare.extend_s=0.1")
    _run(settings, "prepare")
    (utterance,) = _split(settings, "swb")
    assert utterance.id == "sw_4390-A_000050-000250"
    assert utterance.start_s == pytest.approx(0.4)
    assert utterance.end_s == pytest.approx(2.6)


@pytest.mark.parametrize(("late_s", "is_used"), [(0.02, True), (0.2, False)])
@pytest.mark.parametrize("extend_s", [0, 0.1, 0.3])
def test_a_test_segment_that_ends_just_after_its_audio_is_clipped(
    settings: Settings, late_s: float, is_used: bool, extend_s: float
):
    settings = override(settings, f"prepare.extend_s={extend_s}")
    sound = next(settings.corpus.rglob("sw_4390.sph"))
    seconds = read_facts(sound).seconds
    for name in ("*.pem", "*.stm"):
        path = next(settings.corpus.rglob(name))
        path.write_text(path.read_text().replace(" 2.50", f" {seconds + late_s:.2f}"))
    _run(settings, "prepare")
    if not is_used:
        assert "swb" not in settings.splits()
        return
    (utterance,) = _split(settings, "swb")
    assert utterance.end_s == seconds
    assert utterance.start_s == pytest.approx(0.5 - extend_s)


def test_the_reference_is_repaired(settings: Settings):
    stm = next(settings.corpus.rglob("*.stm"))
    stm.write_text(stm.read_text().replace("YES", "((YES) <B_ASIDE> NO <E_ASIDE>"))
    _run(settings, "prepare")
    text = (settings.directory("prepare") / "eval.stm").read_text()
    assert "<O,sw,M,sw-M> (YES)  NO  NO\n" in text


def test_acronyms_are_told_by_capitals_and_pronunciation(settings: Settings):
    dictionary = next(settings.corpus.rglob("sw-ms98-dict.text"))
    more = "US y uw eh s\nus ah s\nNASA n ae s ax\n"
    dictionary.write_text(dictionary.read_text() + more)
    write_transcript(settings.corpus, 2001, "A", ["1.0 2.0 us US NASA U S"])
    _run(settings, "lexicon")
    (utterance,) = [u for u in _split(settings, "train") if "sw02001-A" in u.id]
    assert utterance.words == ("us", "u._s.", "nasa", "u.", "s.")
    lexicon = read_lexicon(settings.directory("lexicon"))
    assert lexicon.pronunciations["u._s."] == (("y", "uw", "eh", "s"),)
    assert lexicon.pronunciations["us"] == (("ah", "s"),)
    assert lexicon.pronunciations["s."] == (("eh", "s"),)


@pytest.mark.parametrize("repair", ["true", "false"])
def test_an_acronym_whose_pronunciation_is_repaired_has_one(
    settings: Settings, repair: str
):
    dictionary = next(settings.corpus.rglob("sw-ms98-dict.text"))
    wrong = "NAACP eh ey ey s iy p iy\n"  # without its N, as MS-State writes it
    dictionary.write_text(dictionary.read_text() + wrong)
    write_transcript(settings.corpus, 2001, "A", ["1.0 2.0 the NAACP"])
    _run(override(settings, f"lexicon.repair={repair}"), "lexicon")
    (utterance,) = [u for u in _split(settings, "train") if "sw02001-A" in u.id]
    assert utterance.words == ("the", "n._a._a._c._p.")
    lexicon = read_lexicon(settings.directory("lexicon"))
    letters = ("eh", "n", "ey", "ey", "s", "iy", "p", "iy")
    assert lexicon.pronunciations["n._a._a._c._p."] == (letters,)


def test_words_that_the_dictionary_lacks_are_looked_up_elsewhere(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = tmp_path / "cmudict"
    other.write_text(";;; comment\nZEBRA  Z IY1 B R AH0\nZEBRA(1)  Z EH1 B R AH0\n")
    lines = ["1.0 2.0 zebra okapi", "3.0 4.0 okapi zu- tapir"]
    write_transcript(settings.corpus, 2001, "A", lines)
    settings = override(settings, f"lexicon.cmudict={other}")
    settings = override(settings, "lexicon.synthesise=true")
    _run(settings, "lexicon")
    found = read_lexicon(settings.directory("lexicon")).pronunciations
    assert found["zebra"] == (("z", "iy", "b", "r", "ax"), ("z", "eh", "b", "r", "ax"))
    assert "okapi" in found  # heard twice, so eSpeak says it
    assert "tapir" not in found
    assert "zu-" not in found
    assert "1 of 3 missing words are in cmudict" in capsys.readouterr().out


def test_one_channel_recordings_have_no_side_b(settings: Settings):
    path = settings.corpus / "LDC97S62/swb1_d1/data/sw02001.sph"
    write_sphere(path, noise(6.0, channels=1))
    _run(settings, "prepare")
    assert {u.id[:9] for u in _split(settings, "train")} == {
        "sw02001-A",
        "sw02002-A",
        "sw02002-B",
    }


def _one_side(tmp_path: Path) -> tuple[Settings, Utterance, Path]:
    """A `dev` of one utterance, and an empty folder for its frames."""
    settings = Settings(corpus=tmp_path, out=tmp_path, cores=1)
    sound, folder = tmp_path / "a.wav", tmp_path / "frames"
    soundfile.write(sound, np.random.default_rng(0).normal(0, 0.1, 16_000), 8000)
    one = Utterance("a-A_000000-000200", sound, 0, 0.0, 2.0, ("yes",), "a-A")
    settings.directory("prepare").mkdir(parents=True)
    write_utterances(settings.directory("prepare") / "dev.jsonl", [one])
    folder.mkdir()
    return settings, one, folder


def test_a_journal_without_its_frames_is_not_believed(tmp_path: Path):
    settings, one, folder = _one_side(tmp_path)
    (folder / ".sides.done").write_text(f"{one.side}\n")
    feature_stage._split(settings, "dev", folder)
    assert bool(FrameStore(folder).frames(0).any())


@pytest.mark.parametrize(("ending", "is_believed"), [("\n", True), ("", False)])
def test_a_line_of_the_journal_that_was_cut_off_is_not_believed(
    tmp_path: Path, ending: str, is_believed: bool
):
    settings, one, folder = _one_side(tmp_path)
    FrameWriter(folder, [one.id], [200], settings.features.num_mels).create()
    (folder / ".sides.done").write_text(f"other A\n{one.side}{ending}")
    feature_stage._split(settings, "dev", folder)
    assert bool(FrameStore(folder).frames(0).any()) != is_believed


def test_a_side_is_noted_when_its_frames_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings, one, folder = _one_side(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(FrameWriter, "sync", full)
        with pytest.raises(OSError, match="No space left"):
            feature_stage._split(settings, "dev", folder)
    assert not (folder / ".sides.done").exists()
    monkeypatch.setattr(FrameWriter, "finish", full)
    with pytest.raises(OSError, match="No space left"):
        feature_stage._split(settings, "dev", folder)
    assert one.side in (folder / ".sides.done").read_text().split("\n")


def test_a_full_disk_is_told_with_the_journal_that_has_no_room(tmp_path):
    disk = tmp_path / "disk"

    def note_a_side() -> None:
        writer = FrameWriter(tmp_path / "frames", ["a"], [1], 1)
        writer.create()
        journal = feature_stage._Journal(disk / ".sides.done", writer)
        for page in range(64):
            with contextlib.suppress(OSError):
                (disk / str(page)).write_bytes(bytes(4096))
        journal.add("call A")
        journal.save()

    error = on_a_small_disk(disk, note_a_side).error
    assert f"No space left on device: '{disk / '.sides.done'}'" in error
