"""Discs with one fault each: it is named with file, line and remedy; the rest goes on.

Every fault is made in the same small tree of all sources, which by itself is right.
"""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from lightning_adpsgd.asr.corpora.corpus import read_utterances
from lightning_adpsgd.asr.scoring import read_glm
from lightning_adpsgd.asr.sound.sphere import read_channel
from recipes.hybrid.pipeline.runner import run_stages
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.stages import STAGES
from tests.asr.tiny import (
    noise,
    voice,
    write_callhome_call,
    write_corpus,
    write_fisher_call,
    write_sphere,
    write_transcript,
)

AUDIO = "LDC97S62/swb1_d1/data/sw02002.sph"
TRANSCRIPT = "LDC97S62/swb_ms98_transcriptions/20/2002/sw2002A-ms98-a-trans.text"
DICTIONARY = "LDC97S62/swb_ms98_transcriptions/sw-ms98-dict.text"
FISHER = "LDC2004T19/fe_03_p1_tran/data/trans/000/fe_03_00001.txt"
FISHER_AUDIO = "LDC2004S13/fe_03_p1_sph1/audio/000/fe_03_00001.sph"
CALLDATA = "LDC2004T19/fe_03_p1_tran/doc/fe_03_p1_calldata.tbl"
CALLHOME = "LDC97T14/transcrpt/train/en_4065.txt"
TEST_AUDIO = "LDC2002S09/english/sw_4390.sph"
PEM = "LDC2002S09/english/hub5e_00.pem"
STM = "LDC2002T43/reference/hub5e00.english.000405.stm"
GLM = "LDC2002T43/reference/en20000405_hub5.glm"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = write_corpus(tmp_path / "discs")
    lines = ["0.50 2.50 A: yes no", "3.00 5.50 B: no yes"]
    for number in (1, 5851):
        write_fisher_call(root, number, lines)
    write_callhome_call(root, 4065, lines)
    return root


def _settings(tree: Path) -> Settings:
    sources = ("switchboard", "fisher", "callhome")
    return Settings(corpus=tree, out=tree.parent / "run", sources=sources, cores=1)


def _prepare(tree: Path) -> set[str]:
    """Run to `prepare`; the conversation sides of all utterances."""
    settings = _settings(tree)
    run_stages(settings, STAGES, last="prepare")
    prepared = settings.directory("prepare")
    return {
        utterance.id.rsplit("_", 1)[0]
        for split in settings.splits()
        for utterance in read_utterances(prepared / f"{split}.jsonl")
    }


ALL = {
    *(f"sw0200{number}-{side}" for number in (1, 2, 3) for side in "AB"),
    *(f"fe_03_{number}-{side}" for number in ("00001", "05851") for side in "AB"),
    *(f"en_4065-{side}" for side in "AB"),
    "sw_4390-A",
    "en_4156-A",
}


def test_a_right_tree_has_no_fault(tree: Path, capsys: pytest.CaptureFixture[str]):
    assert _prepare(tree) == ALL
    printed = capsys.readouterr().out
    warnings = [line for line in printed.splitlines() if "WARNING" in line]
    gaps = [line for line in warnings if "of Fisher are missing" in line]
    assert warnings == gaps
    assert "11697 of 11699 recordings of Fisher are missing" in gaps[0]
    assert "fe_03_00002 to fe_03_05850" in gaps[0]


def _rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes()))  # type: ignore


def _header(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(content: bytes) -> bytes:
        assert old in content[:1024]
        head = content[:1024].replace(old, new)
        return head.ljust(1024)[:1024] + content[1024:]

    return _rewrite(change)


def _line(number: int, text: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        lines = path.read_text().split("\n")
        lines[number - 1] = text
        path.write_text("\n".join(lines))

    return change


def _copy_of_sound(path: Path) -> None:
    other = path.parents[2] / "swb1_d2" / path.name.upper()
    other.parent.mkdir()
    shutil.copyfile(path, other)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _packed_and_cut(path: Path) -> None:
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes())[:-4])
    path.unlink()


def _bytes_exchanged(path: Path) -> None:
    """Speech of 16 bits, in the other order than its header says."""
    sides = np.stack([voice(6.0), voice(6.0)[::-1]], axis=1)
    write_sphere(path, sides, coding="PCM_16")
    _header(b"sample_byte_format -s2 01", b"sample_byte_format -s2 10")(path)


# Fault; the file; what is said; which sides are lost.
SW_A, SW = {"sw02002-A"}, {"sw02002-A", "sw02002-B"}
FE, CH = {"fe_03_00001-A", "fe_03_00001-B"}, {"en_4065-A", "en_4065-B"}
FAULTS = {
    "cut short": (
        _rewrite(lambda b: b[:9000]),
        AUDIO,
        ["sw02002.sph: truncated: the header says 48000", "copy it again"],
        SW,
    ),
    "cut in half": (
        _rewrite(lambda b: b[: 1024 + 48000]),
        AUDIO,
        ["holds 24000; copy it again, or get the second release"],
        SW,
    ),
    "cut in the header": (
        _rewrite(lambda b: b[:100]),
        AUDIO,
        ["sw02002.sph: broken SPHERE header", "copy it again"],
        SW,
    ),
    "empty": (_rewrite(lambda b: b""), AUDIO, ["sw02002.sph: an empty file"], SW),
    "zeros": (
        _rewrite(lambda b: bytes(len(b))),
        AUDIO,
        ["not a SPHERE file", "copy it again"],
        SW,
    ),
    "wrong rate": (
        _header(b"sample_rate -i 8000", b"sample_rate -i 16000"),
        AUDIO,
        ["expected 8000 Hz, the header says 16000; resample it"],
        SW,
    ),
    "rate of zero": (
        _header(b"sample_rate -i 8000", b"sample_rate -i 0"),
        AUDIO,
        ["`sample_rate` must be positive, got 0"],
        SW,
    ),
    "no sample count": (
        _header(b"sample_count", b"sample_kount"),
        AUDIO,
        ["broken SPHERE header: KeyError('sample_count')"],
        SW,
    ),
    "letters for a count": (
        _header(b"sample_count -i 48000", b"sample_count -i many"),
        AUDIO,
        ["broken SPHERE header", "'many'"],
        SW,
    ),
    "unknown coding": (
        _header(b"-s4 ulaw", b"-s4 mp3x"),
        AUDIO,
        ["`sample_coding` must be of", "'mp3x'"],
        SW,
    ),
    "shorten": (
        _header(b"-s4 ulaw", b"-s26 ulaw,embedded-shorten-v2.00"),
        AUDIO,
        ["compressed with shorten: 1", "sw02002.sph", "sph2pipe", "put it on PATH"],
        SW,
    ),
    "one channel": (
        lambda path: write_sphere(path, noise(6.0, channels=1)),
        AUDIO,
        ["recording without two channels", "sw02002.sph: the header says 1"],
        {"sw02002-B"},
    ),
    "no sound": (
        Path.unlink,
        AUDIO,
        ["transcript without its recording: 1", "copy the disc that holds sw02002.sph"],
        SW,
    ),
    "no sound of Fisher": (
        Path.unlink,
        FISHER_AUDIO,
        ["transcript without its recording: 1", "that holds fe_03_00001.sph"],
        FE,
    ),
    "a folder in the place of a file": (
        lambda path: (path.unlink(), path.mkdir()),
        AUDIO,
        ["transcript without its recording: 1"],
        SW,
    ),
    "a pipe in the place of a file": (
        _pipe,
        AUDIO,
        ["neither file nor folder: 1", AUDIO, "copy the file of that name"],
        SW,
    ),
    "a link to itself": (
        _circle,
        TRANSCRIPT,
        ["broken link: 1", f"{TRANSCRIPT}: Too many levels", "remove it"],
        SW_A,
    ),
    "a coding that libsndfile lacks": (
        _header(b"-s4 ulaw", b"-s3 pcm"),
        AUDIO,
        ["unusable recording: 1", "sw02002.sph: File contains data in an unimpl"],
        SW,
    ),
    "bytes in another order than the header says": (
        _bytes_exchanged,
        AUDIO,
        [
            "unusable recording: 1",
            "sw02002.sph: noise, but speech once the two bytes of each sample",
            "change `sample_byte_format` there from 10 to 01",
        ],
        SW,
    ),
    "test recording of another rate": (
        _header(b"sample_rate -i 8000", b"sample_rate -i 16000"),
        TEST_AUDIO,
        ["sw_4390.sph: expected 8000 Hz", "no test utterances for swb"],
        {"sw_4390-A"},
    ),
    "test recording with one channel": (
        lambda path: write_sphere(path, noise(6.0, channels=1)),
        TEST_AUDIO,
        ["recording without two channels: 1", "sw_4390.sph: the header says 1"],
        set(),
    ),
    "twice": (
        _copy_of_sound,
        AUDIO,
        ["second recording of the same name: 1", "SW02002.SPH", "remove the others"],
        set(),
    ),
    "no transcript": (
        lambda path: (
            path.unlink(),
            (path.parent / path.name.replace("A", "B")).unlink(),
        ),
        TRANSCRIPT,
        ["recording without a transcript: 1", "MS-State transcripts"],
        SW,
    ),
    "no transcript of a side": (
        Path.unlink,
        TRANSCRIPT,
        ["conversation with words of one side only: 1", "nothing of side A"],
        SW_A,
    ),
    "empty transcript": (
        _rewrite(lambda b: b""),
        TRANSCRIPT,
        ["file without text: 1", f"{TRANSCRIPT}:1", "copy it again"],
        SW_A,
    ),
    "binary transcript": (
        _rewrite(lambda b: b[:70] + bytes(50)),
        TRANSCRIPT,
        [f"{TRANSCRIPT}:2: expected text, found a zero byte"],
        SW_A,
    ),
    "letters for a time": (
        _line(2, "sw2002A-ms98-a-0002 0.5x 2.5 yes"),
        TRANSCRIPT,
        [f"{TRANSCRIPT}:2: expected times", "'0.5x' '2.5'", "the line is left out"],
        set(),
    ),
    "end before start": (
        _line(2, "sw2002A-ms98-a-0002 2.5 0.5 yes"),
        TRANSCRIPT,
        [f"{TRANSCRIPT}:2: expected times 0 <= start < end", "'2.5' '0.5'"],
        set(),
    ),
    "negative time": (
        _line(2, "sw2002A-ms98-a-0002 -0.5 0.5 yes"),
        TRANSCRIPT,
        [f"{TRANSCRIPT}:2: expected times 0 <= start < end"],
        set(),
    ),
    "line of another side": (
        _line(2, "sw2003A-ms98-a-0002 0.5 2.5 yes"),
        TRANSCRIPT,
        [f"{TRANSCRIPT}:2: expected a line of sw02002 A"],
        set(),
    ),
    "overlapping times": (
        _line(3, "sw2002A-ms98-a-0003 1.0 5.5 yes"),
        TRANSCRIPT,
        ["times that overlap on one side: 1", f"{TRANSCRIPT}:3: from 1.0 s"],
        set(),
    ),
    "times beyond the audio": (
        _line(3, "sw2002A-ms98-a-0003 3.0 65.5 yes"),
        TRANSCRIPT,
        ["beyond the end of the audio: 1", f"{TRANSCRIPT}:3: 65.5 s of 6.00 s"],
        set(),
    ),
    "no number for a time": (
        _line(2, "sw2002A-ms98-a-0002 nan inf yes"),
        TRANSCRIPT,
        [f"{TRANSCRIPT}:2: expected times", "'nan' 'inf'"],
        set(),
    ),
    "a line twice": (
        _rewrite(lambda b: b + b.split(b"\n")[1] + b"\n"),
        TRANSCRIPT,
        ["times that overlap on one side: 1", "transcribed a second time: 1"],
        set(),
    ),
    "a page of the web": (
        _rewrite(lambda b: b"<html><body>404 Not Found</body></html>\n"),
        TRANSCRIPT,
        [f"{TRANSCRIPT}:1: expected `id start end words`, got '<html>"],
        SW_A,
    ),
    "a packed transcript, cut short": (
        _packed_and_cut,
        TRANSCRIPT,
        ["packed archive: 1", f"{TRANSCRIPT}.gz", "unpack or mount it"],
        SW_A,
    ),
    "Latin-1": (
        _rewrite(lambda b: b.replace(b"yes no", b"caf\xe9 no")),
        TRANSCRIPT,
        ["text that is not UTF-8: 1", f"{TRANSCRIPT}:2", "read as Latin-1"],
        set(),
    ),
    "line of Fisher without a side": (
        _line(4, "0.50 2.50 yes no"),
        FISHER,
        [f"{FISHER}:4: expected `start end A: words`"],
        {"fe_03_00001-A"},
    ),
    "speaker of Fisher nobody knows": (
        _line(4, "0.50 2.50 C: yes no"),
        FISHER,
        [f"{FISHER}:4: expected a talker, `A:` or `B:`, got 'C:'"],
        {"fe_03_00001-A"},
    ),
    "head of another call": (
        _line(1, "# fe_03_00002.sph"),
        FISHER,
        [f"{FISHER}:1: the head names another call, fe_03_00002"],
        FE,
    ),
    "caller of Fisher nobody knows": (
        _rewrite(lambda b: b.replace(b",1,f.a", b",,f.a")),
        CALLDATA,
        ["side of an unknown speaker: 1", "fe_03_00001 A", "a speaker of its own"],
        set(),
    ),
    "line of callers cut short": (
        _line(2, "00001,2002"),
        CALLDATA,
        ["malformed line of callers: 1", f"{CALLDATA}:2"],
        set(),
    ),
    "no callers of Fisher": (
        lambda path: shutil.rmtree(path.parents[2]),
        CALLDATA,
        ["recording without a transcript: 1", "LDC2004T19"],
        FE,
    ),
    "line of CallHome without times": (
        _line(3, "x 5.50 B: no yes"),
        CALLHOME,
        [f"{CALLHOME}:3: expected times"],
        {"en_4065-B"},
    ),
    "line of the dictionary without phones": (
        _rewrite(lambda b: b"yes\n" + b),
        DICTIONARY,
        ["dictionary line without phones: 1", f"{DICTIONARY}:1: yes", "left out"],
        set(),
    ),
    "a phone that is a name of the search graph": (
        _rewrite(lambda b: b + b"odd #1 ow\n<s> y\n"),
        DICTIONARY,
        ["with a name of the search graph: 2", f"{DICTIONARY}:3: odd", "left out"],
        set(),
    ),
    "another dictionary": (
        lambda path: shutil.copyfile(path, path.with_name("SW-MS98-DICT.TEXT;1")),
        DICTIONARY,
        ["second file of one kind: 1", f"{DICTIONARY};", "is used; remove the others"],
        set(),
    ),
    "pem twice": (
        _rewrite(lambda b: b + b),
        PEM,
        ["test segments that overlap on one side: 2", f"{PEM}:3: sw_4390 from 0.5 s"],
        set(),
    ),
    "pem without a time": (
        _line(1, "sw_4390 A unknown_speaker 0.50"),
        PEM,
        ["malformed pem line: 1", f"{PEM}:1: expected `file A|B speaker"],
        {"sw_4390-A"},
    ),
    "stm with letters for times": (
        _line(2, "sw_4390 A sw_4390_A x 2.50 <O,sw,M,sw-M> YES NO"),
        STM,
        ["malformed stm line: 1", f"{STM}:2: expected times"],
        {"sw_4390-A"},
    ),
    "stm of a call that is not there": (
        _line(2, "sw_4400 A sw_4400_A 0.50 2.50 <O,sw,M,sw-M> YES NO"),
        STM,
        ["test segments without a recording: 1", f"{STM}:2: sw_4400", "LDC2002S09"],
        {"sw_4390-A"},
    ),
    "stm beyond its audio": (
        _line(2, "sw_4390 A sw_4390_A 0.50 92.50 <O,sw,M,sw-M> YES NO"),
        STM,
        ["test segment beyond its audio: 1", f"{STM}:2: sw_4390"],
        {"sw_4390-A"},
    ),
    "stm with a line twice": (
        _rewrite(lambda b: b + b.split(b"\n")[1] + b"\n"),
        STM,
        [f"{STM}:4: sw_4390 from 0.5 s; its words may count twice; remove the surplus"],
        set(),
    ),
    "a folder in the place of the stm": (
        _folder,
        STM,
        ["folder in the place of a file: 1", STM, "of the test set: MISSING"],
        {"sw_4390-A", "en_4156-A"},
    ),
    "another stm": (
        lambda path: path.with_name("hub5e00.english.000405.copy.stm").write_text(
            "no\n"
        ),
        STM,
        ["second file of one kind: 1", "000405.copy.stm", f"{STM} is used"],
        set(),
    ),
    "stm with an open bracket": (
        _line(2, "sw_4390 A sw_4390_A 0.50 2.50 <O,sw,M,sw-M> (YES NO"),
        STM,
        ["reference with wrong brackets: 1", f"{STM}:2", "scoring will stop there"],
        set(),
    ),
    "stm with brackets inside brackets": (
        _line(2, "sw_4390 A sw_4390_A 0.50 2.50 <O,sw,M,sw-M> (YES (NO) YES)"),
        STM,
        ["reference with wrong brackets: 1", f"{STM}:2: parentheses around optional"],
        set(),
    ),
    "stm with a choice that touches a word": (
        _line(2, "sw_4390 A sw_4390_A 0.50 2.50 <O,sw,M,sw-M> YES{ NO / NO }"),
        STM,
        ["reference with wrong brackets: 1", f"{STM}:2: an alternation must stand"],
        set(),
    ),
    "stm of another time": (
        _line(2, "sw_4390 A sw_4390_A 3.50 4.50 <O,sw,M,sw-M> YES NO"),
        STM,
        ["reference outside every pem segment: 1", f"{STM}:2", f"{PEM}:1"],
        {"sw_4390-A"},
    ),
    "empty pem": (
        _rewrite(lambda b: b""),
        PEM,
        ["file without text: 1", f"{PEM}:1"],
        set(),  # those of the stm are taken
    ),
    "no pem": (Path.unlink, PEM, ["segments of the test set: MISSING"], set()),
    "binary stm": (
        _rewrite(lambda b: b[:40] + bytes(40)),
        STM,
        ["unreadable segments of the test: 1", f"{STM}:2: expected text"],
        {"sw_4390-A", "en_4156-A"},
    ),
    "transcripts of silence": (
        lambda path: [
            other.write_text(f"{other.name[:7]}-ms98-a-0001 0.0 6.0 [silence]\n")
            for other in path.parent.glob("sw2002?-ms98-a-trans.text")
        ],
        TRANSCRIPT,
        ["conversation without words: 1", TRANSCRIPT],
        SW,
    ),
    "transcript in UTF-16": (
        _rewrite(lambda b: b.decode().encode("utf-16")),
        TRANSCRIPT,
        [],
        set(),
    ),
    "dictionary with Windows line ends": (
        _rewrite(lambda b: b.replace(b"\n", b"\r\n")),
        DICTIONARY,
        [],
        set(),
    ),
    "packed": (
        lambda path: path.rename(path.with_suffix(".sph.gz")),
        AUDIO,
        ["packed archive: 1", "sw02002.sph.gz", "unpack or mount it"],
        SW,
    ),
    "empty stm": (
        _rewrite(lambda b: b""),
        STM,
        ["file without text: 1", f"{STM}:1"],
        {"sw_4390-A", "en_4156-A"},
    ),
    "no stm": (
        Path.unlink,
        STM,
        ["reference of the test set: MISSING", "no test utterances for ch, swb"],
        {"sw_4390-A", "en_4156-A"},
    ),
    "rule of the glm without an arrow": (
        _rewrite(lambda b: b";; rules\n[uh] [%hesitation]\n"),
        GLM,
        ["unreadable rules of scoring: 1", f"{GLM}:2: expected", "repair the line"],
        set(),
    ),
    "option of the glm without quotes": (
        _rewrite(lambda b: b";; rules\n* case_sensitive = F\n"),
        GLM,
        [f"{GLM}:2: expected a value in quotes"],
        set(),
    ),
    "empty glm": (
        _rewrite(lambda b: b""),
        GLM,
        ["file without text: 1", f"{GLM}:1"],
        set(),
    ),
    "no glm": (Path.unlink, GLM, ["rules of scoring: MISSING"], set()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_the_rest_goes_on(
    tree: Path,
    fault: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PATH", "")  # no sph2pipe
    make, name, said, lost = FAULTS[fault]
    make(tree / name)
    assert _prepare(tree) == ALL - lost
    printed = capsys.readouterr().out
    for words in said:
        assert words in printed


def test_windows_line_ends_and_a_byte_order_mark_change_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    for path in tree.rglob("*"):
        if path.is_file() and path.suffix in (".text", ".txt", ".pem", ".stm", ".tbl"):
            text = path.read_bytes().replace(b"\n", b"\r\n")
            path.write_bytes(b"\xef\xbb\xbf" + text)
    assert _prepare(tree) == ALL
    assert "malformed" not in capsys.readouterr().out
    _is_copied(tree, ';; LABEL "O" "Overall" "Overall"\n')


def _is_copied(tree: Path, begin: str, end: str = " YES NO\n") -> None:
    """The reference is there in UTF-8, line for line."""
    copied = (tree.parent / "run/exp/prepare/eval.stm").read_bytes().decode()
    assert copied.startswith(begin)
    assert copied.endswith(end)
    assert copied.count("\n") == (tree / STM).read_text("latin-1").count("\n")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16", "utf-8-sig"])
def test_a_reference_of_any_encoding_is_scored_in_utf_8(tree: Path, encoding: str):
    # in Latin-1 the last letter would be the end of a line of another alphabet
    text = (tree / STM).read_text().replace("YES NO", "CAF\xc9 NO\x85")
    (tree / STM).write_bytes(text.encode(encoding))
    rules = (tree / GLM).read_text() + "[CAF\xc9] => [COFFEE]\n"
    (tree / GLM).write_bytes(rules.encode(encoding))
    assert _prepare(tree) == ALL
    _is_copied(tree, ";; LABEL", " CAF\xc9 NO\n")
    glm = read_glm(tree.parent / "run/exp/prepare/eval.glm")
    assert glm.reference.apply("[CAF\xc9]") == "[COFFEE]"


def test_rules_that_are_no_text_stop_before_anything_is_computed(tree: Path):
    (tree / GLM).write_bytes(b";; rules\n" + bytes(9))
    with pytest.raises(StageError, match=rf"{GLM}:2: expected text.*remove the file"):
        _prepare(tree)


def test_a_dictionary_of_other_words_stops_before_anything_is_computed(tree: Path):
    (tree / DICTIONARY).write_text("maybe m ey b iy\n")
    with pytest.raises(StageError, match=r"32 of 36 words .* 'yes' 18 times"):
        run_stages(_settings(tree), STAGES, last="lexicon")


def test_names_of_a_mounted_disc_are_those_of_a_copied_one(tree: Path):
    """ISO 9660 shows `sw02001.sph` as `SW02001.SPH;1`."""
    for path in sorted(tree.rglob("*"), key=lambda path: -len(path.parts)):
        name = path.name.upper() + (";1" if path.is_file() else "")
        path.rename(path.with_name(name))
    assert _prepare(tree) == ALL


def test_links_are_followed_and_circles_end(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    apart = tree.parent / "elsewhere"
    shutil.move(tree / "LDC97S62/swb1_d1", apart)
    (tree / "LDC97S62/swb1_d1").symlink_to(apart)
    (apart / "circle").symlink_to(tree)
    (tree / "nowhere.sph").symlink_to(tree / "gone")
    assert _prepare(tree) == ALL
    printed = capsys.readouterr().out
    assert "folder that is linked twice or in a loop" in printed
    assert "broken link: 1" in printed


def test_a_file_that_may_not_be_read_is_left_out(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    _forbid(monkeypatch, tree / AUDIO, tree / TRANSCRIPT)
    assert _prepare(tree) == ALL - SW
    printed = capsys.readouterr().out
    assert "sw02002.sph: cannot be read: Permission denied" in printed
    assert f"{TRANSCRIPT}: cannot be read: Permission denied; see its perm" in printed


def _forbid(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """As for a user who is not root, whom modes of files do not stop."""
    as_it_is = Path.open

    def refusing(path: Path, *arguments, **named):
        if path in paths:
            raise PermissionError(13, "Permission denied", str(path))
        return as_it_is(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", refusing)


def test_a_folder_name_that_is_no_text_is_printed_and_kept(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    odd = tree / "LDC97S62" / b"disc\xff".decode(errors="surrogateescape")
    (tree / "LDC97S62/swb1_d1").rename(odd)
    assert len(read_channel(odd / "data/sw02002.sph", 0)) == 48000
    (odd / "data/sw02002.sph").write_bytes(b"")
    assert _prepare(tree) == ALL - SW
    assert "disc\\udcff/data/sw02002.sph: an empty file" in capsys.readouterr().out


def test_the_good_one_of_two_copies_is_taken(tree: Path):
    good = tree / "LDC97S62/swb1_d2/sw02002.sph"
    good.parent.mkdir()
    shutil.copyfile(tree / AUDIO, good)
    (tree / AUDIO).write_bytes(b"")
    assert _prepare(tree) == ALL
    report = json.loads((tree.parent / "run/exp/check/report.json").read_text())
    assert report["recordings"]["sw02002"][0] == str(good)


def test_a_call_of_the_test_is_not_trained_on(tree: Path):
    write_callhome_call(tree, 4156, ["0.50 2.50 A: yes no"])
    assert _prepare(tree) == ALL
    settings = _settings(tree)
    train = read_utterances(settings.directory("prepare") / "train.jsonl")
    assert not [utterance for utterance in train if "en_4156" in utterance.id]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (DICTIONARY, Path.unlink, r"expected the dictionary sw-ms98-dict\.text"),
        (DICTIONARY, _rewrite(lambda b: b""), r"dict\.text: expected lines of `word"),
        (DICTIONARY, _rewrite(lambda b: b"\0" * 9), r"dict\.text:1: expected text"),
        ("LDC97S62", shutil.rmtree, r"LDC97S62.*there is nothing to train on"),
        ("LDC2004S13", lambda p: shutil.rmtree(p.parent / "LDC2005S13"), None),
        ("LDC97S42", shutil.rmtree, r"en_.*LDC97S42.*leave callhome out"),
    ],
)
def test_what_nothing_can_be_done_without_stops(
    tree: Path, name: str, change: Callable[[Path], None], message: str | None
):
    change(tree / name)
    if message is None:  # one of two parts is enough to go on
        assert _prepare(tree) == ALL - {"fe_03_05851-A", "fe_03_05851-B"}
        return
    with pytest.raises(StageError, match=message):
        _prepare(tree)


def test_only_compressed_recordings_stop_with_where_to_get_sph2pipe(
    tree: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "")
    for path in tree.rglob("*.sph"):
        _header(b"-s4 ulaw", b"-s26 ulaw,embedded-shorten-v2.00")(path)
    with pytest.raises(
        StageError, match=r"none has a usable.*source of the program sph2"
    ):
        _prepare(tree)


def test_a_source_nobody_knows_is_refused(tree: Path):
    settings = Settings(corpus=tree, out=tree.parent / "run", sources=("fischer",))
    with pytest.raises(StageError, match="must be of switchboard, fisher, callhome"):
        run_stages(settings, STAGES, last="check")


def test_a_source_that_is_named_twice_is_refused(tree: Path):
    twice = ("switchboard", "switchboard")
    settings = Settings(corpus=tree, out=tree.parent / "run", sources=twice)
    with pytest.raises(StageError, match="each source once, got switchboard,switch"):
        run_stages(settings, STAGES, last="check")


def test_several_processes_say_the_same(tree: Path, capsys: pytest.CaptureFixture[str]):
    (tree / AUDIO).write_bytes(b"")
    write_transcript(tree, 2001, "A", ["0.5 2.5 yes", "oops"])
    reports = []
    for cores in (1, 3):
        settings = Settings(corpus=tree, out=tree.parent / f"run{cores}", cores=cores)
        run_stages(settings, STAGES, last="check")
        reports.append(
            json.loads((settings.directory("check") / "report.json").read_text())
        )
    assert reports[0] == reports[1]


def test_sound_of_another_kind_is_refused(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    """A WAV file under the name of a SPHERE file."""
    with (tree / AUDIO).open("wb") as file:
        soundfile.write(file, np.zeros((48000, 2)), 8000, format="WAV")
    assert _prepare(tree) == ALL - SW
    assert "it begins with b'RIFF" in capsys.readouterr().out
