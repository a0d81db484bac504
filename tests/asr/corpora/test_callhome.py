"""CallHome transcripts: the transcribers' marks go, several talkers share a side."""

from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.callhome import (
    FOREIGN,
    normalise_callhome,
    read_callhome,
)
from lightning_adpsgd.asr.corpora.corpus import Skipped
from lightning_adpsgd.asr.corpora.fisher import NOT_UNDERSTOOD
from tests.asr.tiny import write_callhome_call


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("%ah &Tayyib, you know.", "ah tayyib you know"),
        ("{laugh} yes {breath} {big laugh}", "[laughter] yes [noise] [laughter]"),
        ("[distortion] yes [/distortion] no", "[noise] yes no"),
        ("well [[drawn out]] maybe", "well maybe"),
        ("+nucular+ **funkified** #at once#", "nucular funkified at once"),
        ("//come in// yes", "come in yes"),
        ("I went -- to B- Boston -ly", "i went to b- boston -ly"),
        ("the U.S. and N.A.S.A.", "the u._s. and n._a._s._a."),
        ("mhm. uh-huh! &Joe's?", "mhm uh-huh joe's"),
        ("caf\xe9", "caf\xe9"),
        ("Cafe\u0301", "caf\xe9"),
        ("--", ""),
    ],
)
def test_marks_become_words(text: str, words: str):
    assert normalise_callhome(text) == tuple(words.split())


def test_a_contraction_is_the_word_that_was_said(tmp_path: Path):
    mark = '<contraction e_form="[we=>we][\'re=>are]">'
    path = write_callhome_call(tmp_path, 4065, [f"1.0 2.0 A: yes {mark}we're here"])
    (turn,) = read_callhome(path, Skipped())
    assert turn.words == ("yes", "we're", "here")


def test_talkers_lines_and_continued_lines(tmp_path: Path):
    lines = [
        "# en_4065 a comment",
        "19.33 21.18 B: %ah Tayyib",
        "21.50 25.00 A1: and then we went to the",
        "shop and #you know# bought",
        "26.00 27.00 B2: caf\xe9",
    ]
    path = write_callhome_call(tmp_path, 4065, [])
    path.write_text("\n".join(lines), encoding="latin-1")
    turns = list(read_callhome(path, skipped := Skipped()))
    assert [(t.line, t.channel, t.talker) for t in turns] == [
        (2, 1, "B"),
        (3, 0, "A1"),
        (5, 1, "B2"),
    ]
    assert turns[1].words[-5:] == ("shop", "and", "you", "know", "bought")
    assert turns[2].words == ("caf\xe9",)
    assert not skipped.counts


def test_what_nobody_can_learn_from_is_counted(tmp_path: Path):
    lines = ["1.0 2.0 A: yes (( ))", "2.0 4.0 A: <Spanish hola> yes", "5.0 6.0 B: no"]
    path = write_callhome_call(tmp_path, 4065, lines)
    skipped = Skipped()
    assert [turn.words for turn in read_callhome(path, skipped)] == [("no",)]
    assert skipped.seconds == {NOT_UNDERSTOOD: 1.0, FOREIGN: 2.0}


@pytest.mark.parametrize(
    "line", ["x 2.0 A: yes", "3.0 2.0 A: yes", "1.0 2.0 C: yes", "1.0 2.0 yes"]
)
def test_a_broken_line_is_counted_and_continues_nothing(tmp_path: Path, line: str):
    path = write_callhome_call(tmp_path, 4065, ["0.0 0.5 A: no", line, "4.0 5.0 B: no"])
    skipped = Skipped()
    assert [turn.words for turn in read_callhome(path, skipped)] == [("no",), ("no",)]
    (where,) = skipped.examples["malformed transcript line"]
    assert where.startswith(f"{path}:3: expected")
