"""Fisher transcripts: what was said, who said it, and what is not used."""

from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import Caller, CorpusError, Skipped
from lightning_adpsgd.asr.corpora.fisher import (
    NOT_UNDERSTOOD,
    normalise_fisher,
    read_calldata,
    read_fisher,
)
from tests.asr.tiny import CALLDATA_HEAD, write_fisher_call


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("an- so the topic is ", "an- so the topic is"),
        ("[laugh] yeah [lipsmack]", "[laughter] yeah [noise]"),
        ("[sigh] [cough] [mn] [breath] [sneeze] [noise]", "[noise] " * 6),
        ("c._n._n. and u._s.'s b. [[skip]] [pause]", "c._n._n. and u._s.'s b."),
        ("*mandatory uh-huh, is it? <german wort>", "mandatory uh-huh is it"),
        ("i'm 'kay - mr. smith", "i'm 'kay mr smith"),
        ("Cafe\u0301", "caf\xe9"),
        ("", ""),
        ("-", ""),
    ],
)
def test_marks_become_words(text: str, words: str):
    assert normalise_fisher(text) == tuple(words.split())


@pytest.mark.parametrize("text", ["(( ))", "yes (( maybe )) no", "((yes"])
def test_what_was_not_understood_has_no_words(text: str):
    assert normalise_fisher(text) is None


def test_turns_have_side_line_and_times(tmp_path: Path):
    lines = ["7.38 8.78 A: an- so", "9.10 9.95 B: [laugh]", "10.0 11.5 A: (( what ))"]
    path = write_fisher_call(tmp_path, 4, lines)
    skipped = Skipped()
    assert [turn[:-1] for turn in read_fisher(path, skipped)] == [
        (4, 0, 7.38, 8.78, ("an-", "so")),
        (6, 1, 9.10, 9.95, ("[laughter]",)),
    ]
    assert skipped.counts == {NOT_UNDERSTOOD: 1}
    assert skipped.seconds == {NOT_UNDERSTOOD: 1.5}


@pytest.mark.parametrize(
    "line", ["1.0 2.0 C: yes", "1.0 2.0 yes", "x 2.0 A: yes", "3.0 2.0 A: yes", "yes"]
)
def test_a_broken_line_is_counted_and_the_others_read(tmp_path: Path, line: str):
    path = write_fisher_call(tmp_path, 4, [line, "4.0 5.0 B: no"])
    skipped = Skipped()
    assert [turn.words for turn in read_fisher(path, skipped)] == [("no",)]
    (where,) = skipped.examples["malformed transcript line"]
    assert where.startswith(f"{path}:4: expected")


def test_a_transcript_of_another_call_is_refused(tmp_path: Path):
    path = write_fisher_call(tmp_path, 4, ["1.0 2.0 A: yes"])
    path.write_text(path.read_text().replace("fe_03_00004", "fe_03_00005"))
    with pytest.raises(CorpusError, match=r"txt:1: the head names another call"):
        list(read_fisher(path, Skipped()))


def test_callers_and_their_sexes_are_read(tmp_path: Path):
    path = tmp_path / "fe_03_p1_calldata.tbl"
    row = "00001,20021204,ENG01,4,3,2602,f.a,x,h,l,1790,m.o,y,c,c\n"
    broken = "00002,20021204,ENG01,4\n"
    nobody = "00003,20021204,ENG01,4,3,0,,x,h,l,1791,m.a,y,c,c\n"
    path.write_text(CALLDATA_HEAD + row + broken + nobody + row.replace("00001", "²"))
    skipped = Skipped()
    assert read_calldata(path, skipped) == {
        ("fe_03_00001", 0): Caller("fe2602", "f"),
        ("fe_03_00001", 1): Caller("fe1790", "m"),
        ("fe_03_00003", 1): Caller("fe1791", "m"),
    }
    assert skipped.examples["malformed line of callers"][0].startswith(f"{path}:3:")
