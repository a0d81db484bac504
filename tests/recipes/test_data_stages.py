"""The data stages on a tiny corpus: nothing is lost without being counted."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_adpsgd.asr.corpus import Skipped, Utterance, read_utterances
from lightning_adpsgd.asr.lexicon import read_lexicon
from lightning_adpsgd.asr.sphere import read_channel
from lightning_adpsgd.asr.store import FrameStore
from recipes.switchboard import feature_stage
from recipes.switchboard.pipeline import StageError, run_stages
from recipes.switchboard.prepare_stage import hold_out, limit_repeats
from recipes.switchboard.settings import PrepareSettings, Settings
from recipes.switchboard.stages import STAGES
from tests.asr.tiny import noise, write_corpus, write_sphere, write_transcript


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


def test_an_interrupted_feature_stage_goes_on_where_it_was(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    read: list[tuple[str, int]] = []

    def noted(path: Path, channel: int) -> np.ndarray:
        if len(read) == 3 and not resumed:
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
    # no side twice: four of train, two of dev, one of each test part
    assert len(read) == len(set(read)) == 8


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
    with pytest.raises(StageError, match="found 2 sides of 2 speakers in all"):
        _run(settings, "prepare")


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


def test_repeats_beyond_the_limit_are_counted():
    spoken = [_spoken("a", "uh-huh")] * 5 + [_spoken("a", "no")]
    skipped = Skipped()
    kept = list(limit_repeats(spoken, 3, skipped))
    assert [u.words for u in kept] == [("uh-huh",)] * 3 + [("no",)]
    assert skipped.counts == {"same words heard more than 3 times": 2}
    assert len(list(limit_repeats(spoken, 0, Skipped()))) == 6


def test_one_channel_recordings_have_no_side_b(settings: Settings):
    path = settings.corpus / "LDC97S62/swb1_d1/data/sw02001.sph"
    write_sphere(path, noise(6.0, channels=1))
    _run(settings, "prepare")
    assert {u.id[:9] for u in _split(settings, "train")} == {
        "sw02001-A",
        "sw02002-A",
        "sw02002-B",
    }
