"""`python -m recipes.kaldi`: data directories of Kaldi, and alignments by its names."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import soundfile

from lightning_adpsgd.asr.corpora.corpus import read_utterances
from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.language.lexicon import (
    SPECIAL_WORDS,
    Lexicon,
    read_lexicon,
)
from lightning_adpsgd.asr.language.ngram import read_arpa
from recipes.hybrid.data import splits
from recipes.kaldi import __main__ as kaldi
from recipes.kaldi.__main__ import RECIPE, main
from tests.asr.kaldi_files import write_experiment
from tests.asr.tiny import write_sphere
from tests.pages.blocks import programs

ROOT = Path(__file__).parents[2]

SPOKEN = {
    "train": {"anna": 3, "bert": 3, "zoe": 2},
    "test": {"carl": 2},
}
SECONDS = 0.5


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Data directories of noise, a file for every utterance, as tutorials have them."""
    random = np.random.default_rng(0)
    (tmp_path / "sounds").mkdir()
    for split, speakers in SPOKEN.items():
        folder = tmp_path / "data" / split
        folder.mkdir(parents=True)
        tables = {"wav.scp": "", "text": "", "utt2spk": ""}
        for speaker, number in speakers.items():
            for take in range(number):
                name, sound = (
                    f"{speaker}_{take}",
                    tmp_path / f"sounds/{speaker}{take}.wav",
                )
                soundfile.write(sound, 0.1 * random.standard_normal(8000), 16000)
                tables["wav.scp"] += f"{name} {sound}\n"
                tables["text"] += f"{name} YES no\n"
                tables["utt2spk"] += f"{name} {speaker}\n"
        for table, text in tables.items():
            (folder / table).write_text(text)
    dictionary = tmp_path / "data/local/dict/lexicon.txt"
    dictionary.parent.mkdir(parents=True)
    dictionary.write_text("!SIL sil\nyes y eh s\nno n ow\n")
    return tmp_path / "data"


def _run(data: Path, last: str, *settings: str) -> int:
    out = str(data.parent / "run")
    command = ["--corpus", str(data), "--out", out, "--to", last, "--cores", "1"]
    chosen = ("prepare.min_dev_sides=1", *settings)
    return main([*command, *(f"--set={one}" for one in chosen)])


def _speakers(data: Path, split: str) -> list[str]:
    path = data.parent / f"run/exp/prepare/{split}.jsonl"
    return [utterance.speaker for utterance in read_utterances(path)]


def test_what_kaldi_writes_beside_its_tables_is_no_change_of_the_corpus(data: Path):
    assert _run(data, "lexicon") == 0
    read = [path for path in data.rglob("*") if path.is_file()]
    beside = ("local/dict/lexiconp.txt", "local/dict_larger/lexicon.txt")
    for name in ("train/feats.scp", "split2/1/text", "lang/words.txt", *beside):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).touch()
    assert _run(data, "lexicon") == 0
    for path in read:
        text = path.read_text()
        path.write_text(text + " ")
        is_table = path.name != "lexicon.txt"
        assert _run(data, "prepare") == is_table, path  # features and labels stay valid
        assert _run(data, "lexicon") == 1, path
        path.write_text(text)
    assert _run(data, "lexicon") == 0


def test_what_was_made_when_all_files_of_the_corpus_counted_is_compared_by_all(
    data: Path, monkeypatch: pytest.MonkeyPatch
):
    before = [stage._replace(of_corpus=None) for stage in RECIPE.stages]
    with monkeypatch.context() as patch:
        patch.setattr(kaldi, "RECIPE", RECIPE._replace(stages=before))
        assert _run(data, "lexicon") == 0
    assert _run(data, "lexicon") == 0
    text = data / "test/text"
    text.write_text(text.read_text() + " ")
    assert _run(data, "check") == 1


def test_a_dictionary_that_is_taken_away_is_a_change_though_no_sound_is_there(
    data: Path,
):
    assert _run(data, "lexicon") == 0
    (data / "local/dict/lexicon.txt").unlink()
    assert _run(data, "prepare") == 0
    assert _run(data, "lexicon") == 1


def test_a_folder_dev_without_text_is_not_passed_over_in_silence(data: Path, capsys):
    assert _run(data, "check") == 0
    assert "held out in its place" not in capsys.readouterr().out
    (data / "dev").mkdir()
    (data / "dev/text.txt").write_text("zoe_0 yes\n")
    assert (
        main(["--corpus", str(data), "--out", str(data.parent / "b"), "--to", "check"])
        == 0
    )
    told = f"WARNING: {data}/dev/text: MISSING, the last speakers of the training are"
    assert told in capsys.readouterr().out


def test_a_test_set_that_becomes_dev_is_a_change_of_the_corpus(data: Path):
    (data / "local/dict/lexicon.txt").unlink()
    assert _run(data, "prepare") == 0
    (data / "test").rename(data / "dev")
    assert _run(data, "prepare") == 1


def test_a_table_below_a_link_counts_though_its_folder_has_another_name(data: Path):
    (data / "test").rename(data / "eval2000")
    (data / "test").symlink_to("eval2000")
    assert _run(data, "prepare") == 0
    text = data / "test/text"
    text.write_text(text.read_text() + " ")
    assert _run(data, "check") == 1


@pytest.mark.parametrize("name", ["a.wav", "A.WAV", "a.aiff", "A.SPH;1", "a.opus"])
def test_sound_in_the_corpus_counts_whatever_its_kind(data: Path, name: str):
    (data / name).write_text("sound")
    assert _run(data, "check") == 0
    (data / name).write_text("other")
    assert _run(data, "check") == 1


def test_sound_that_the_tables_name_elsewhere_counts_and_is_named(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    assert _run(data, "features") == 0
    sound = data.parent / "sounds/anna0.wav"
    before = sound.read_bytes()
    sound.write_bytes(bytes(reversed(before)))
    assert _run(data, "features") == 1
    said = capsys.readouterr().err
    assert "`check`" in said
    assert "recordings was" in said
    assert f"(changed since: {sound})" in said
    sound.write_bytes(before)
    assert _run(data, "features") == 0


def test_sound_elsewhere_that_is_put_away_after_the_features_is_no_change(data: Path):
    assert _run(data, "features") == 0
    sounds = data.parent / "sounds"
    sounds.rename(data.parent / "away")
    assert _run(data, "features") == 0
    (data.parent / "away").rename(sounds)
    assert _run(data, "features") == 0


def test_sound_elsewhere_that_was_missing_and_is_there_is_a_change(data: Path):
    sound = data.parent / "sounds/anna0.wav"
    away = sound.rename(data.parent / "anna0.wav")
    assert _run(data, "check") == 0
    away.rename(sound)
    assert _run(data, "check") == 1


def test_alignments_with_kaldis_names_are_the_labels(data: Path):
    assert _run(data, "lm") == 0
    assert _run(data, "features") == 0
    exp = data.parent / "run/exp"
    assert _speakers(data, "train") == [*["anna"] * 3, *["bert"] * 3]
    assert _speakers(data, "dev") == ["zoe"] * 2
    assert _speakers(data, "test") == ["carl"] * 2
    store = FrameStore(exp / "features/train")
    length = len(store.frames(0))
    assert length == 100 * SECONDS
    names = [f"{who}_{take}" for who, n in SPOKEN["train"].items() for take in range(n)]
    experiment = data.parent / "tri"
    write_experiment(experiment, {name: [2, *[1] * (length - 1)] for name in names})
    assert _run(data, "graph", f"kaldi.experiment={experiment}") == 0
    for split in ("train", "dev"):
        assert (np.load(exp / f"kaldi/{split}/labels.npy") >= 0).all()


def test_side_b_of_files_with_one_channel_gets_frames(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    names = [line.split()[0] for line in (data / "train/text").open()]
    sides = "".join(f"{n} {n[:-2]} {'AB'[n[0] == 'b']}\n" for n in names)
    (data / "train/reco2file_and_channel").write_text(sides)
    assert _run(data, "features") == 0
    assert "left out" not in capsys.readouterr().out
    exp = data.parent / "run/exp"
    for split in ("train", "dev"):
        assert len(FrameStore(exp / f"features/{split}")) == len(_speakers(data, split))


def test_sides_of_a_file_with_two_channels_are_apart(data: Path):
    call = data.parent / "sounds/call.sph"
    both = np.stack([0.1 * np.ones(8000), 0.5 * np.sin(np.arange(8000))], axis=1)
    write_sphere(call, both, 16000, "PCM_16")
    table = data / "train/wav.scp"
    kept = [line for line in table.open() if not line.startswith("anna_")]
    table.write_text("".join(kept) + f"anna_0 {call}\nanna_1 {call}\n")
    (data / "train/reco2file_and_channel").write_text("anna_0 c A\nanna_1 c B\n")
    assert _run(data, "prepare") == 0
    path = data.parent / "run/exp/prepare/train.jsonl"
    sides = {u.id[:6]: u.channel for u in read_utterances(path) if u.recording == call}
    assert sides == {"anna_0": 0, "anna_1": 1}


def test_utterances_that_do_not_fit_their_sound_are_told_and_cost_no_others(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    ends = {"anna_0": "0 0.02", "anna_1": "0.6 0.9", "bert_0": "9 9.5"}
    names = [line.split()[0] for line in (data / "train/text").open()]
    spans = [f"{name} {name} {ends.get(name, '0.1 0.4')}" for name in names]
    # Beside one that is too short, in the same recording.
    spans += ["anna_3 anna_0 0.1 0.4"]
    (data / "train/segments").write_text("\n".join(spans))
    for table, value in (("text", "YES no"), ("utt2spk", "anna")):
        with (data / "train" / table).open("a") as file:
            file.write(f"anna_3 {value}\n")
    assert _run(data, "check") == 0
    said = capsys.readouterr().out
    assert "shorter than 0.1 s: 2" in said
    assert "segments:1: anna_0" in said
    assert "segments:2: anna_1" in said
    assert "transcript beyond the end of its audio: 1" in said
    assert _run(data, "features") == 0
    assert "unreadable" not in capsys.readouterr().out
    assert len(FrameStore(data.parent / "run/exp/features/train")) == 4


def test_sphere_at_twice_the_rate_is_trained_on(data: Path):
    random = np.random.default_rng(1)
    sound = data.parent / "sounds/anna0.wav"
    write_sphere(sound, 0.1 * random.standard_normal(8000), 16000, "PCM_16")
    assert _run(data, "features") == 0
    assert len(FrameStore(data.parent / "run/exp/features/train")) == 6


def test_a_dev_of_its_own_is_taken_and_nobody_is_held_out(data: Path):
    (data / "test").rename(data / "dev")
    assert _run(data, "prepare") == 0
    assert set(_speakers(data, "train")) == {"anna", "bert", "zoe"}
    assert _speakers(data, "dev") == ["carl"] * 2


def test_what_is_left_out_is_told_before_anything_starts(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    table = data / "train/wav.scp"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([f"{lines[0].split()[0]} sox x.mp3 - |", *lines[1:]]))
    (data.parent / "sounds/zoe1.wav").write_bytes(b"RIFF")
    assert _run(data, "check") == 0
    said = capsys.readouterr().out
    assert "train: 6 utterances" in said
    assert "command in wav.scp: 1" in said
    assert "unusable sound: 1" in said
    report = json.loads((data.parent / "run/exp/check/report.json").read_text())
    assert len(report["report"]) == 5
    assert "lexicon.txt: 3 words, 6 phones" in said


def test_a_missing_recording_is_told_once_with_its_line(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    for split in ("train", "test"):
        names = (data / split / "text").read_text().split("\n")[:-1]
        rows = [f"{line.split()[0]} {line.split()[0]} 0.0 0.4\n" for line in names]
        (data / split / "segments").write_text("".join(rows))
    table = data / "train/segments"
    table.write_text(table.read_text().replace(" zoe_1 ", " zoe_0 "))
    (data.parent / "sounds/zoe0.wav").unlink()
    assert _run(data, "check") == 0
    said = capsys.readouterr().out
    assert "unusable sound: 2" in said
    sound = data.parent / "sounds/zoe0.wav"
    assert said.count(f"train/wav.scp:7: {sound}: cannot be read: No such file") == 1


def test_a_command_is_told_though_no_blank_stands_before_the_bar(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    table = data / "train/wav.scp"
    table.write_text(table.read_text().replace("zoe1.wav", "zoe1.wav|"))
    assert _run(data, "check") == 0
    assert "command in wav.scp: 1" in capsys.readouterr().out


def test_a_missing_test_set_is_told_before_anything_starts(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    (data / "test/text").unlink()
    assert _run(data, "check") == 0
    assert "test/text: MISSING, nothing is tested" in capsys.readouterr().out


def test_a_recording_that_was_cut_short_is_left_out_and_told(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    path = data.parent / "sounds/anna0.wav"
    path.write_bytes(path.read_bytes()[:-4000])
    assert _run(data, "check") == 0
    said = capsys.readouterr().out
    assert "train: 7 utterances" in said
    assert "unusable sound: 1" in said
    assert f"{path}: cut short: the header says 16044 bytes, there are 12044" in said


def _lexicon(data: Path) -> Lexicon:
    return read_lexicon(data.parent / "run/exp/lexicon")


def test_phones_are_those_of_the_lexicon_as_they_are_written(data: Path):
    path = data / "local/dict/lexicon.txt"
    path.write_text("yes S e1 s\nno n e4 N\nyes s 2 S\n")
    assert _run(data, "lm") == 0
    found = _lexicon(data)
    assert found.nonsilence_phones == ("2", "N", "S", "e1", "e4", "n", "s")
    assert found.pronunciations["yes"] == (("S", "e1", "s"), ("s", "2", "S"))


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [("training", {"yes", "no"}), ("dictionary", {"yes", "no", "maybe"})],
)
def test_words_that_only_the_lexicon_has_are_in_the_vocabulary_if_asked_for(
    data: Path, capsys: pytest.CaptureFixture[str], vocabulary: str, words: set[str]
):
    path = data / "local/dict/lexicon.txt"
    silences = "!SIL SIL\n<unk> SPN\n[cough] NSN\n"
    path.write_text(f"{silences}yes y eh s\nno n ow\nmaybe m ey b iy\n")
    assert _run(data, "lm", f"vocabulary={vocabulary}") == 0
    assert _lexicon(data).pronunciations.keys() - SPECIAL_WORDS.keys() == words
    model = read_arpa(data.parent / "run/exp/lm/lm.arpa")
    found = {n[0] for n in model.log10_probabilities if len(n) == 1}
    assert found == words | {"<s>", "</s>"}
    assert _run(data, "lm", "vocabulary=training") == (vocabulary != "training")


def test_a_word_is_one_however_its_accents_are_written(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    apart, joined = (unicodedata.normalize(form, "café") for form in ("NFD", "NFC"))
    for split, written in (("train", apart), ("test", apart.upper())):
        text = data / split / "text"
        text.write_text(text.read_text().replace("YES", written, 1))
        text.write_text(text.read_text().replace("YES", joined, 1))
    path = data / "local/dict/lexicon.txt"
    phones = unicodedata.normalize("NFD", "é"), "é"
    path.write_text(
        f"yes y eh s\nno n ow\n{joined} k {phones[0]}\n{apart} {phones[1]}\n"
    )
    assert _run(data, "lm", f"lm.text={data / 'train/text'}") == 0
    assert "out-of-vocabulary words" not in capsys.readouterr().out
    assert _lexicon(data).pronunciations[joined] == (("k", "é"), ("é",))
    assert apart not in _lexicon(data)
    model = read_arpa(data.parent / "run/exp/lm/lm.arpa")
    assert (joined,) in model.log10_probabilities
    said = data.parent / "run/exp/prepare/test.jsonl"
    assert {u.words for u in read_utterances(said)} == {(joined, "no")}


def test_espeak_does_not_continue_a_lexicon_of_other_phones(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    path = data / "local/dict/lexicon.txt"
    path.write_text("yes Y EH1 S\nno N OW1\n")
    assert _run(data, "lexicon", "lexicon.synthesise=true") == 1
    error = capsys.readouterr().err
    assert f"{path} has the phone 'EH1'" in error
    assert _run(data, "lexicon", f"lexicon.cmudict={path}") == 0
    assert _lexicon(data).nonsilence_phones == ("eh", "n", "ow", "s", "y")


def test_words_that_are_spelled_out_keep_their_own_pronunciation(data: Path):
    text = data / "train/text"
    text.write_text(text.read_text().replace("YES no", "yes U._S. A. no ab-"))
    path = data / "local/dict/lexicon.txt"
    path.write_text("yes y eh s\nno n ow\nu._s. uw s\nab- ae b\n")
    assert _run(data, "lexicon") == 0
    found = _lexicon(data).pronunciations
    assert (found["u._s."], found["ab-"]) == ((("uw", "s"),), (("ae", "b"),))
    assert found["a."] == (("ey",),)


def test_a_word_is_not_spelled_out_in_phones_that_the_lexicon_lacks(data: Path):
    text = data / "train/text"
    text.write_text(text.read_text().replace("YES no", "yes A. no"))
    (data / "local/dict/lexicon.txt").write_text("yes Y EH S\nno N OW\n")
    assert _run(data, "lexicon") == 0
    assert "a." not in _lexicon(data)


def test_a_lexicon_of_before_is_not_taken_for_one_with_phones_as_written(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    assert _run(data, "lexicon") == 0
    stamp = data.parent / "run/exp/lexicon/.done"
    content = json.loads(stamp.read_text())
    del content["fingerprint"]["settings"]["edition"]
    stamp.write_text(json.dumps(content))
    assert _run(data, "lm") == 1
    error = capsys.readouterr().err
    assert "edition was absent, is phones as they are written" in error
    assert "--from lexicon --redo" in error


def test_a_damaged_lexicon_is_told_before_anything_starts(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    (data / "local/dict/silence_phones.txt").write_text("SIL\n")
    (data / "local/dict/lexicon.txt").write_text("yes y eh s\nlow lau\n")
    assert _run(data, "check") == 1
    assert "lexicon.txt:2: the phone 'lau'" in capsys.readouterr().err


def test_the_program_of_the_page_writes_a_corpus_that_the_recipe_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("audio").mkdir()
    random = np.random.default_rng(0)
    for number in (7, 8, 9):
        samples = 0.1 * random.standard_normal(12 * 8000)
        soundfile.write(f"audio/call{number}.flac", samples, 8000)
    (program,) = programs(ROOT / "docs/add-your-corpus.md")
    exec(program, {"__name__": "program"})
    assert _run(Path("data"), "features") == 0
    spoken = read_utterances(Path("run/exp/prepare/train.jsonl"))
    assert [(u.words, u.speaker) for u in spoken] == [(("yes", "i", "know"), "anna")]
    assert len(FrameStore(Path("run/exp/features/test"))) == 1
    assert "@U" in _lexicon(Path("data")).phones


@pytest.mark.parametrize(
    ("split", "meaning"), [("dev", "chosen on speech"), ("test", "not that of new")]
)
def test_speech_that_is_trained_on_and_tested_is_told(
    data: Path, capsys: pytest.CaptureFixture[str], split: str, meaning: str
):
    (data / split).mkdir(exist_ok=True)
    for name in ("wav.scp", "text", "utt2spk"):
        rows = (data / "train" / name).read_text().splitlines()[:2]
        (data / split / name).write_text("\n".join(rows).replace("anna_", "new_"))
    told = f"WARNING: {split}: 2 of 2 utterances are trained on too, for example "
    for stage in ("check", "prepare"):
        assert _run(data, stage) == 0
        said = capsys.readouterr().out.replace("\n", " ")
        assert f"{told}{data / split / 'text'}:1: " in said
        assert meaning in said


def test_long_utterances_are_told_with_the_longest(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(splits, "LONG_S", 1.0)
    for take, seconds in enumerate((2, 3)):
        sound = data.parent / f"sounds/bert{take}.wav"
        soundfile.write(sound, 0.1 * np.ones(seconds * 16_000), 16_000)
    assert _run(data, "prepare") == 0
    said = capsys.readouterr().out
    told = "WARNING: train: 2 utterances are longer than 1 s, the longest 3 s, "
    assert f"{told}{data / 'train/text'}:5: " in said
    assert said.count("longer than") == 1


def test_segments_of_one_recording_that_touch_are_of_no_two_splits(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    sound = data.parent / "sounds/anna0.wav"
    for split, begin in (("train", 0.0), ("test", 0.2)):
        folder = data / split
        rows = [row.split()[0] for row in (folder / "text").read_text().splitlines()]
        (folder / "wav.scp").write_text(f"call {sound}\n")
        cuts = [f"{name} call {begin} {begin + 0.25}" for name in rows]
        (folder / "segments").write_text("\n".join(cuts))
    assert _run(data, "check") == 0
    assert "trained on" not in capsys.readouterr().out


def test_a_corpus_that_is_no_data_directory_is_refused(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    (data / "train/wav.scp").unlink()
    assert _run(data, "check") == 1
    error = capsys.readouterr().err
    assert "--corpus:" in error
    assert "wav.scp" in error


def test_a_data_directory_itself_is_no_corpus_and_the_folder_above_is_asked_for(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    for table in (data / "train").iterdir():
        table.rename(data / table.name)
    (data / "train").rmdir()
    assert _run(data, "check") == 1
    assert f"{data} is a data directory itself; name" in capsys.readouterr().err


def test_one_speaker_alone_is_advised_to_move_utterances_and_nothing_refused(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    names = [line.split()[0] for line in (data / "train/text").open()]
    (data / "train/utt2spk").write_text("".join(f"{name} anna\n" for name in names))
    assert _run(data, "prepare") == 1
    told = capsys.readouterr().err
    assert f"in all; move utterances to a data directory {data / 'dev'}\n" in told


def test_test_utterances_that_differ_in_case_alone_are_refused(
    data: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("wav.scp", "text", "utt2spk"):
        table = data / "test" / name
        table.write_text(table.read_text().replace("carl_1 ", "CARL_0 "))
    assert _run(data, "check") == 1
    told = capsys.readouterr().err
    assert "the utterances carl_0 and CARL_0 of `test` differ in case alone" in told
