"""LibriSpeech's layout, on a tree of generated speech, and with one fault each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from lightning_adpsgd.asr.corpora.corpus import read_utterances
from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.language.lexicon import read_lexicon
from recipes.generated.corpus import write_librispeech
from recipes.hybrid.pipeline.command import parser, settings_from
from recipes.hybrid.pipeline.settings import Settings
from recipes.librispeech import download
from recipes.librispeech.__main__ import RECIPE, main
from recipes.librispeech.download import UTTERANCES


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libri") / "data"
    write_librispeech(folder, minutes=0.5, test_minutes=0.1, processes=2)
    return folder


@pytest.fixture
def tree(spoken: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(spoken, tmp_path / "data"))


def _arguments(tree: Path, last: str) -> list[str]:
    out = str(tree.parent / "run")
    return ["--corpus", str(tree), "--out", out, "--to", last, "--cores", "1"]


def _settings(tree: Path) -> Settings:
    return settings_from(RECIPE, parser(RECIPE).parse_args(_arguments(tree, "lm")))


def _chapter(tree: Path) -> Path:
    return min((tree / "LibriSpeech/train-clean-5").rglob("*.trans.txt"))


def test_every_line_of_every_transcript_gets_frames(tree: Path):
    assert main(_arguments(tree, "features")) == 0
    settings = _settings(tree)
    assert settings.splits() == ("train", "dev", "dev-clean-2", "test-clean")
    lines = {
        line.split()[0]: line.split()[1:]
        for path in tree.rglob("*.trans.txt")
        for line in path.read_text().splitlines()
    }
    found = {}
    for split in settings.splits():
        prepared = settings.directory("prepare") / f"{split}.jsonl"
        store = FrameStore(settings.directory("features") / split)
        for utterance in read_utterances(prepared):
            found[utterance.conversation] = [word.upper() for word in utterance.words]
            frames = store.frames(store.position(utterance.id))
            # 16 kHz on disc; a frame each 10 ms
            assert abs(len(frames) - 100 * utterance.duration_s) <= 1
            assert utterance.speaker == utterance.conversation.split("-")[0]
    assert found == lines
    sexes = (settings.directory("prepare") / "sexes.txt").read_text().split("\n")
    assert len(sexes) - 1 == len({name.split("-")[0] for name in lines})


def test_readers_of_dev_are_not_trained_on(tree: Path):
    assert main(_arguments(tree, "prepare")) == 0
    prepared = _settings(tree).directory("prepare")
    train, dev = (
        {u.speaker for u in read_utterances(prepared / f"{split}.jsonl")}
        for split in ("train", "dev")
    )
    assert train
    assert dev
    assert not train & dev


def test_an_utterance_of_overlapping_splits_is_used_once(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    splits = tree / "LibriSpeech"
    shutil.copytree(splits / "dev-clean-2", splits / "dev-clean")
    chapter = min((splits / "dev-clean-2").rglob("*.trans.txt"))
    number = len(chapter.read_text().splitlines())
    chapter = splits / "dev-clean" / chapter.relative_to(splits / "dev-clean-2")
    shutil.rmtree(chapter.parent)  # which `dev-clean-2` alone has
    shutil.copytree(splits / "train-clean-5", splits / "train-clean-100")
    assert main(_arguments(tree, "prepare")) == 0
    settings = _settings(tree)
    prepared = settings.directory("prepare")
    ids = {
        split: [u.id for u in read_utterances(prepared / f"{split}.jsonl")]
        for split in settings.splits()
    }
    every = [name for names in ids.values() for name in names]
    assert len({*every}) == len(every)
    assert len(ids["dev-clean-2"]) == number
    said = capsys.readouterr().out
    repeated = len(ids["dev-clean"])
    assert f"in dev-clean-2 and in a test set before it: {repeated}" in said
    trained = len(ids["train"]) + len(ids["dev"])
    assert f"transcribed a second time: {trained}" in said


def test_a_split_of_another_name_and_a_second_channel_are_told(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    splits = tree / "LibriSpeech"
    (splits / "test-clean").rename(splits / "eval")
    sound = next((splits / "train-clean-5").rglob("*.flac"))
    samples, rate = soundfile.read(sound)
    soundfile.write(sound, np.stack([samples, samples], 1), rate)
    assert main(_arguments(tree, "prepare")) == 0
    assert _settings(tree).splits() == ("train", "dev", "dev-clean-2")
    said = capsys.readouterr().out
    assert said.count("WARNING: eval: not used; a split that is trained on is nam") == 2
    assert "one of dev-clean, dev-clean-2, test-clean, dev-other, test-other, t" in said
    told = f"sound of several channels: 1, for example {sound}; the first channel is"
    assert said.count(told) == 1


def test_a_second_copy_of_a_test_set_is_left_out(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(
        tree / "LibriSpeech/test-clean", tree / "copy/LibriSpeech/test-clean"
    )
    assert main(_arguments(tree, "prepare")) == 0
    path = _settings(tree).directory("prepare") / "test-clean.jsonl"
    ids = [u.id for u in read_utterances(path)]
    assert len({*ids}) == len(ids)
    assert f"transcribed a second time: {len(ids)}" in capsys.readouterr().out


def test_without_a_lexicon_espeak_pronounces(tree: Path):
    (tree / "librispeech-lexicon.txt").unlink()
    assert main(_arguments(tree, "lexicon")) == 0
    settings = _settings(tree)
    lexicon = read_lexicon(settings.directory("lexicon"))
    train = read_utterances(settings.directory("prepare") / "train.jsonl")
    assert {word for utterance in train for word in utterance.words} <= {
        *lexicon.pronunciations
    }


def _first_flac(tree: Path) -> Path:
    return min(_chapter(tree).parent.glob("*.flac"))


def _cut_line(tree: Path) -> None:
    path = _chapter(tree)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["oops", *lines[1:]]))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda tree: _first_flac(tree).unlink(), "transcript without its sound: 1"),
        (lambda tree: _first_flac(tree).write_bytes(b""), "unusable sound: 1"),
        (lambda tree: _chapter(tree).unlink(), "sound without a transcript"),
        (_cut_line, "1: expected `reader-chapter-number WORDS`"),
        (
            lambda tree: (tree / "LibriSpeech/SPEAKERS.TXT").write_text("1 | X | y\n"),
            "SPEAKERS.TXT:1",
        ),
    ],
)
def test_a_fault_is_named_and_the_rest_goes_on(
    tree: Path,
    fault: Callable[[Path], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
):
    fault(tree)
    assert main(_arguments(tree, "prepare")) == 0
    assert said in capsys.readouterr().out


def test_a_folder_without_training_speech_stops(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.rmtree(tree / "LibriSpeech/train-clean-5")
    assert main(_arguments(tree, "check")) == 1
    assert "recipes.librispeech.download fetches" in capsys.readouterr().err


def test_hours_are_reported(tree: Path, capsys: pytest.CaptureFixture[str]):
    assert main(_arguments(tree, "check")) == 0
    assert "(complete: 5.4 h)" in capsys.readouterr().out
    report = _settings(tree).directory("check") / "report.json"
    assert sum(json.loads(report.read_text())["seconds"].values()) > 30


def test_the_downloader_is_torchaudios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = []

    def fetch(root: Path, part: str, download: bool) -> list[int]:
        asked.append((root, part, download))
        if part == "test-clean":
            raise OSError("no network")
        return [0] * UTTERANCES[part]

    monkeypatch.setattr(download, "LIBRISPEECH", fetch)
    assert download.main(["--out", str(tmp_path / "data")]) == 1
    assert [part for _, part, _ in asked] == list(download.PARTS)
    assert "test-clean could not be fetched: no network" in capsys.readouterr().err


def test_a_part_whose_unpacking_was_interrupted_is_not_taken_for_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(download, "LIBRISPEECH", lambda *_, **__: [0] * 9)
    assert download.main(["--out", str(tmp_path), "--parts", "dev-clean"]) == 1
    told = f"{tmp_path}/LibriSpeech/dev-clean: expected 2703 utterances, found 9"
    assert told in capsys.readouterr().err


def test_a_part_that_librispeech_does_not_have_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        download.main(["--out", str(tmp_path / "data"), "--parts", "dev-claen"])
    said = capsys.readouterr().err
    assert "argument --parts: invalid choice: 'dev-claen'" in said
    assert "dev-clean" in said
    assert not (tmp_path / "data").exists()
