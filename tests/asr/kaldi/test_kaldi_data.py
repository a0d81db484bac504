"""Kaldi data directories as utterances: what is read, left out and refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import Skipped
from lightning_adpsgd.asr.kaldi.data import read_data
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.names import Names
from lightning_adpsgd.asr.sound.channels import SoundFacts

FILES = {
    "wav.scp": "anna-call /speech/anna call.wav\nbert sox x.sph -t wav - |\n",
    "segments": "anna-1 anna-call 0.98 2.5\nanna-2 anna-call 3 5.3\nbert-1 bert 0 1\n",
    "utt2spk": "anna-1 anna\nanna-2 anna\nbert-1 bert\n",
    "reco2file_and_channel": "anna-call call B\nbert x A\n",
    "text": "anna-1 YES i know\nanna-2 no\nbert-1 no\ncarl-1 no\n",
}
WHOLE = {
    "wav.scp": "anna_1 /a.wav\n",
    "utt2spk": "anna_1 anna\n",
    "text": "anna_1 0 4\n",
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    def writes(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        return tmp_path

    return writes


def _five_seconds(path: Path) -> SoundFacts:
    return SoundFacts(5.0, num_channels=2, sample_rate=8000)


def _mono(path: Path) -> SoundFacts:
    return SoundFacts(5.0, num_channels=1, sample_rate=8000)


def test_utterances_have_the_recordings_times_and_sides_of_the_tables(write):
    skipped = Skipped()
    first, second = read_data(write(FILES), _five_seconds, skipped)
    assert first.id == "anna-1-B_000098-000250"
    assert first.conversation == "anna-1"
    assert first.recording == Path("/speech/anna call.wav")
    assert (first.channel, first.start_s, first.end_s) == (1, 0.98, 2.5)
    assert (first.words, first.speaker) == (("yes", "i", "know"), "anna")
    assert first.source.endswith("text:1")
    assert second.end_s == 5.0  # no longer than its recording
    assert skipped.counts == {"command in wav.scp": 1, "text without a recording": 1}


UNPACKED = {
    "sph2pipe -f wav -p -c 1 /d/a.sph |": ("/d/a.sph", 0),
    "/kaldi/tools/sph2pipe -f wav -p -c 2 '/d 1/a.sph' |": ("/d 1/a.sph", 1),
    "flac -c -d -s /d/a.flac |": ("/d/a.flac", 0),
    "/usr/bin/flac -cds /d/a.flac|": ("/d/a.flac", 0),
    "flac --decode --stdout /d/a.flac |": ("/d/a.flac", 0),
}


@pytest.mark.parametrize("command", UNPACKED)
def test_of_a_command_that_only_unpacks_a_file_the_file_is_read(write, command: str):
    facts = _mono if "flac" in command else _five_seconds
    files = FILES | {"wav.scp": f"anna-call {command}\n"}
    del files["reco2file_and_channel"]
    first, _ = read_data(write(files), facts, Skipped())
    assert (str(first.recording), first.channel) == UNPACKED[command]


@pytest.mark.parametrize(
    "command",
    [
        "sph2pipe -f wav -p -c 1 -t 0:10 a.sph |",
        "sph2pipe -f wav -p -c 3 a.sph |",
        "sph2pipe -c 1 a.sph b.sph |",
        "sph2pipe -c 1 a.sph | sox - -r 8000 -t wav - |",
        "flac -cd 'a.flac |",
        "flac -t a.flac |",
        "sph2pipe -f wav -p -c 1 $SWB/a.sph |",
        "flac -cds ~/a.flac |",
        "flac -cds *.flac |",
        "|",
    ],
)
def test_a_command_that_may_do_more_is_left_out(write, command: str):
    files = FILES | {"wav.scp": f"anna-call {command}\n"}
    with pytest.raises(KaldiError, match=r"command in wav\.scp: 2"):
        read_data(write(files), _five_seconds, Skipped())


def test_a_command_for_a_channel_that_is_not_there_is_told(write):
    files = FILES | {"wav.scp": "anna-call sph2pipe -f wav -p -c 2 /a.sph |\n"}
    problem = r"a channel that is not there: 2, for example .*wav\.scp:1: /a\.sph has 1"
    with pytest.raises(KaldiError, match=problem):
        read_data(write(files), _mono, Skipped())


def test_a_path_holds_in_other_folders_too(write, monkeypatch: pytest.MonkeyPatch):
    folder = write(FILES | {"wav.scp": "anna-call speech/call.wav\n"})
    monkeypatch.chdir(folder)
    first, _ = read_data(folder, _five_seconds, Skipped())
    assert first.recording == folder / "speech/call.wav"


def test_side_b_of_a_file_with_one_channel_is_that_channel(write):
    first, second = read_data(write(FILES), _mono, Skipped())
    assert (first.channel, second.channel) == (0, 0)
    assert Names([first.id, second.id]).find("anna-1") == first.id


CONTRADICTIONS = {
    "wav.scp": ("anna-call /speech/other.wav", "/speech/anna call.wav"),
    "segments": ("anna-1 anna-call 0.98 2.6", "anna-call 0.98 2.5"),
    "utt2spk": ("anna-1 bert", "anna"),
    "reco2file_and_channel": ("anna-call call A", "call B"),
    "text": ("anna-1 yes i know", "YES i know"),
}


@pytest.mark.parametrize("table", CONTRADICTIONS)
def test_two_rows_of_one_name_that_differ_are_both_named(write, table: str):
    line, first = CONTRADICTIONS[table]
    files = FILES | {table: f"{FILES[table]}{line}\n"}
    number = files[table].count("\n")
    name, other = line.split(maxsplit=1)
    problem = rf"{table}:{number}: '{name}' is '{other}' here and '{first}' in .*:1;"
    with pytest.raises(KaldiError, match=problem):
        read_data(write(files), _five_seconds, Skipped())


def test_rows_that_are_there_twice_are_no_contradiction(write):
    tables = CONTRADICTIONS.keys()
    twice = FILES | {table: FILES[table] + FILES[table] for table in tables}
    once = read_data(write(FILES), _five_seconds, Skipped())
    assert read_data(write(twice), _five_seconds, Skipped()) == once


def test_a_byte_order_mark_is_no_part_of_a_name(write, tmp_path: Path):
    once = read_data(write(FILES), _five_seconds, Skipped())
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_data(tmp_path, _five_seconds, Skipped()) == once


def test_a_transcript_goes_on_after_a_line_separator_of_unicode(write):
    text = "anna-1 yes\u2028i\x85know\nanna-2 no\n"
    first, second = read_data(write(FILES | {"text": text}), _five_seconds, Skipped())
    assert (first.words, second.words) == (("yes", "i", "know"), ("no",))
    assert second.source.endswith("text:2")


def test_a_table_that_is_not_utf_8_is_named_with_the_line(write, tmp_path: Path):
    write(FILES)
    (tmp_path / "text").write_bytes("anna-2 no\nanna-1 grün\n".encode("latin-1"))
    with pytest.raises(KaldiError, match=r"text:2: expected UTF-8, got the byte 0xfc"):
        read_data(tmp_path, _five_seconds, Skipped())


def test_an_utterance_without_words_is_left_out_and_costs_no_others(write):
    skipped = Skipped()
    files = FILES | {"text": "anna-1\nanna-2 no\n"}
    (found,) = read_data(write(files), _five_seconds, skipped)
    assert found.id.startswith("anna-2")
    left_out = {"utterance without words": 1, "recording without a text": 1}
    assert skipped.counts == left_out  # the one is anna-1, the other bert-1
    assert skipped.examples["utterance without words"][0].endswith("text:1")


def test_recordings_with_several_channels_of_which_none_is_named_are_left_out(write):
    files = FILES | {
        "wav.scp": "anna-call /call.wav\nbert /call.wav\n",
        "reco2file_and_channel": "bert call B\n",
    }
    skipped = Skipped()
    (found,) = read_data(write(files), _five_seconds, skipped)
    assert (found.speaker, found.channel) == ("bert", 1)
    assert skipped.counts["recording of unknown channel"] == 2
    told = " ".join(skipped.report())
    assert "wav.scp:1" in told
    assert "`recording file A` or `recording file B` into reco2file_and_chan" in told


def test_a_path_keeps_its_blanks(write):
    paths = ("/a  b.wav", "/a\u00a0b.wav", "/a \u202fb.wav")
    lines = [f"anna_{place} {path}\r\n" for place, path in enumerate(paths)]
    names = [line.split()[0] for line in lines]
    speakers = "".join(f"{name} anna\n" for name in names)
    text = "".join(f"{name} 0\n" for name in names)
    files = {"wav.scp": "".join(lines), "utt2spk": speakers, "text": text}
    found = read_data(write(files), _mono, Skipped())
    assert tuple(str(one.recording) for one in found) == paths


@pytest.mark.parametrize(("is_cut", "seconds"), [(True, 2.3), (False, 0.0)])
def test_sound_whose_text_is_missing_is_counted(write, is_cut: bool, seconds: float):
    files = FILES | {"text": "anna-1 yes\nbert-1 no\n"}
    if not is_cut:
        sounds = "anna-1 /a.wav\nanna-2 /b.wav\n"
        files = WHOLE | {"wav.scp": sounds, "text": "anna-1 0\n"}
        files["utt2spk"] = "anna-1 anna\n"
    folder, skipped = write(files), Skipped()
    (folder / "reco2file_and_channel").unlink(missing_ok=True)
    assert len(read_data(folder, _mono, skipped)) == 1
    reason = "recording without a text"
    assert skipped.counts[reason] == 1
    assert skipped.seconds[reason] == pytest.approx(seconds)
    table = "segments" if is_cut else "wav.scp"
    assert skipped.examples[reason] == [f"{folder / table}:2"]
    assert skipped.remedies[reason].startswith("write `utterance words` into text")


def test_an_utterance_without_a_speaker_is_left_out_and_named(write):
    skipped = Skipped()
    files = FILES | {"utt2spk": "anna-2 anna\n"}
    (found,) = read_data(write(files), _five_seconds, skipped)
    assert found.id.startswith("anna-2")
    assert skipped.counts["utterance without a speaker"] == 2
    assert skipped.examples["utterance without a speaker"][0].endswith("text:1")
    assert skipped.remedies["utterance without a speaker"].endswith("into utt2spk")


@pytest.mark.parametrize(
    ("segment", "reason"),
    [
        ("7 8", "transcript beyond the end of its audio"),
        ("5.2 5.4", "shorter than 0.1 s"),
        ("5.2 -1", "shorter than 0.1 s"),
        ("4.95 5.4", "shorter than 0.1 s"),
        ("1 1.02", "shorter than 0.1 s"),
        ("1 5.6", "transcript beyond the end of its audio"),
    ],
)
def test_what_has_too_little_sound_is_left_out_and_named(
    write, segment: str, reason: str
):
    files = FILES | {
        "segments": f"anna-1 anna-call {segment}\nanna-2 anna-call 3 4\n",
        "text": "anna-1 yes\nanna-2 no\n",
    }
    skipped = Skipped()
    (found,) = read_data(write(files), _five_seconds, skipped)
    assert found.id.startswith("anna-2")
    assert skipped.counts == {reason: 1}
    (where,) = skipped.examples[reason]
    assert where.endswith("segments:1: anna-1 in 5.00 s of /speech/anna call.wav")


def test_an_end_of_minus_one_is_that_of_the_recording(write):
    files = WHOLE | {"segments": "anna_1 call 1.5 -1\n", "wav.scp": "call /a.wav\n"}
    (found,) = read_data(write(files), _mono, Skipped())
    assert (found.start_s, found.end_s) == (1.5, 5.0)


def test_without_segments_a_recording_is_an_utterance(write):
    (found,) = read_data(write(WHOLE), _mono, Skipped())
    assert (found.id, found.start_s, found.end_s) == ("anna_1-A_000000-000500", 0, 5)
    # Kaldi's alignments have its name alone
    assert Names([found.id]).find("anna_1") == found.id


def test_a_recording_of_several_utterances_is_none_of_them():
    names = Names(["sw02001-A_000098-001156", "sw02001-A_001200-001300"])
    assert names.find("sw02001") is None


def _broken(path: Path) -> SoundFacts:
    raise ValueError(f"{path}: truncated")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"text": "anna_1 0\n\n"}, r"text:2: expected a name and more, got ''"),
        ({"text": "anna_1\n"}, r"no utterance .* without words: 1.*text:1"),
        ({"wav.scp": "anna_1\n"}, r"wav.scp:1: expected a name and more, got 'anna_1'"),
        ({"segments": "anna_1 r 0\n"}, r"segments:1: expected `utterance recording"),
        ({"segments": "anna_1 r 2 1\n"}, r"segments:1: expected 0 <= start < end"),
        ({"segments": "anna_1 r 0 nan\n"}, r"segments:1: expected 0 <= start < end"),
        ({"reco2file_and_channel": "r f C\n"}, r"channel:1: expected channel A or B"),
        ({"reco2file_and_channel": "r A\n"}, r"channel:1: expected `recording file"),
        ({"utt2spk": "anna_1 anna bert\n"}, r"utt2spk:1: expected `utterance speaker`"),
        (
            {"wav.scp": "anna_1 mpg123 a.mp3 |\n"},
            "no utterance .* command in wav.s",
        ),
    ],
)
def test_files_that_make_no_sense_are_named_with_the_line(
    write, files: dict[str, str], problem: str
):
    with pytest.raises(KaldiError, match=problem):
        read_data(write(WHOLE | files), _mono, Skipped())


def test_no_usable_sound_and_no_table_are_errors(write):
    folder = write(WHOLE)
    with pytest.raises(
        KaldiError, match=r"no utterance .*unusable sound: 1.*truncated"
    ):
        read_data(folder, _broken, Skipped())
    (folder / "text").unlink()
    with pytest.raises(
        KaldiError, match=r"text: .*No such file.*expected a Kaldi file"
    ):
        read_data(folder, _five_seconds, Skipped())


@pytest.mark.parametrize(
    ("table", "form"),
    [
        ("wav.scp", "recording path"),
        ("text", "utterance words"),
        ("utt2spk", "utterance speaker"),
    ],
)
def test_of_a_table_that_is_missing_the_lines_are_told(write, table: str, form: str):
    folder = write(WHOLE)
    (folder / table).unlink()
    told = f"/{table}: No such file or directory; expected a Kaldi file with lines `"
    with pytest.raises(KaldiError, match=rf"{told}{form}`$"):
        read_data(folder, _five_seconds, Skipped())


def test_a_name_of_a_speaker_with_a_space_is_named_as_the_cause(write):
    folder = write(WHOLE | {"utt2spk": "anna_1 anna bert\n"})
    told = r"utt2spk:1: expected `utterance speaker`, got .*; names have no spaces$"
    with pytest.raises(KaldiError, match=told):
        read_data(folder, _mono, Skipped())


def test_a_time_that_is_missing_is_not_blamed_on_a_space(write):
    folder = write(FILES | {"segments": "anna-1 rec_a 0.5\n"})
    told = r"segments:1: expected `utterance recording start end`, got '[^']*'$"
    with pytest.raises(KaldiError, match=told):
        read_data(folder, _mono, Skipped())
