"""MS-State transcripts: the marks become words, broken lines are counted."""

from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import Caller, CorpusError, Skipped
from lightning_adpsgd.asr.corpora.transcripts import (
    normalise_word,
    normalise_words,
    parse_line,
    read_speakers,
    read_transcript,
    side_of,
)
from tests.asr.tiny import write_transcript


@pytest.mark.parametrize(
    ("token", "word"),
    [
        ("Yes", "yes"),
        ("[laughter-yes]", "yes"),
        ("[laughter-ab[solute]-]", "ab-"),
        ("[it'n/isn't]", "it'n"),
        ("[lem[guini]-/linguini]", "lem-"),
        ("ab[solute]-", "ab-"),
        ("ab[solute]", "ab-"),
        ("-[an]y", "-y"),
        ("ammu[n]it-", "ammu-it-"),
        ("ex[specially]-/especially]", "ex-"),
        ("{yuppiedom}", "yuppiedom"),
        ("them_1", "them"),
        ("u._s.", "u._s."),
        ("uh-huh", "uh-huh"),
        ("[noise]", "[noise]"),
        ("[vocalized-noise]", "[vocalized-noise]"),
        ("[LAUGHTER]", "[laughter]"),
        ("[silence]", None),
        ("<b_aside>", None),
        ("<E_ASIDE>", None),
    ],
)
def test_a_token_becomes_the_word_it_stands_for(token: str, word: str | None):
    assert normalise_word(token) == word


def test_a_normalised_word_stays_as_it_is():
    words = normalise_words("[laughter-ab[solute]-] [it'n/isn't] them_1 [noise] -[an]y")
    assert normalise_words(" ".join(words)) == words


@pytest.mark.parametrize(
    "line",
    [
        "sw2001A-ms98-a-0001 0.0 1.0",
        "sw2001A-ms98-a-0001",
        "sw2001A-ms98-a-0001 0.0 one yes",
        "sw2001A-ms98-a-0001 1.0 1.0 yes",
        "sw2001A-ms98-a-0001 2.0 1.0 yes",
        "sw2001A-ms98-a-0001 -1.0 1.0 yes",
        "sw2001A-ms98-a-0001 0.0 nan yes",
        "sw2001A-ms98-a-0001 0.0 inf yes",
    ],
)
def test_a_malformed_line_is_refused_with_file_and_line(line: str):
    with pytest.raises(CorpusError, match=r"a\.text:7: expected"):
        parse_line(Path("a.text"), 7, line)


def test_malformed_lines_are_counted_and_the_others_read(tmp_path: Path):
    lines = ["0.0 0.5 [silence]", "0.5 1.0 yes", "1.0 no", "2.0 3.0 no [noise]"]
    path = write_transcript(tmp_path, 2001, "A", lines)
    skipped = Skipped()
    segments = list(read_transcript(path, skipped))
    assert [(s.line, s.words) for s in segments] == [
        (2, ("yes",)),
        (4, ("no", "[noise]")),
    ]
    assert skipped.counts == {"malformed transcript line": 1}
    assert f"{path}:3:" in skipped.examples["malformed transcript line"][0]


def test_an_empty_transcript_holds_no_segments(tmp_path: Path):
    skipped = Skipped()
    assert not list(read_transcript(write_transcript(tmp_path, 2001, "B", []), skipped))
    assert skipped.counts == {"file without text": 1}


def test_bytes_that_are_no_text_spoil_one_word_only(tmp_path: Path):
    path = write_transcript(tmp_path, 2001, "A", ["0.0 1.0 yes", "1.0 2.0 no"])
    path.write_bytes(path.read_bytes().replace(b"yes", b"y\xffs"))
    words = [segment.words for segment in read_transcript(path, Skipped())]
    assert len(words) == 2
    assert words[1] == ("no",)


def test_a_missing_transcript_is_named(tmp_path: Path):
    with pytest.raises(CorpusError, match=r"gone\.text: cannot be read"):
        list(read_transcript(tmp_path / "gone.text", Skipped()))


def test_the_file_name_tells_the_side():
    assert side_of(Path("20/2001/sw2001B-ms98-a-trans.text")) == ("sw02001", 1)
    with pytest.raises(CorpusError, match="expected a name like"):
        side_of(Path("2001.text"))


def test_callers_are_read_from_the_conversation_table(tmp_path: Path):
    path = tmp_path / "conv.tab"
    path.write_text('2001, 302, "1004", "1005"\n2002,1\n²003, 302, 1004, 1005\n')
    skipped = Skipped()
    assert read_speakers(path, skipped) == {
        ("sw02001", 0): Caller("sw1004"),
        ("sw02001", 1): Caller("sw1005"),
    }
    assert skipped.counts == {"malformed line of callers": 2}
    assert skipped.examples["malformed line of callers"][0].startswith(f"{path}:2:")


def test_a_line_of_another_side_is_refused():
    path = Path("sw2001B-ms98-a-trans.text")
    with pytest.raises(CorpusError, match=r"text:3: expected a line of sw02001 B"):
        parse_line(path, 3, "sw2001A-ms98-a-0003 0.0 1.0 yes")


def test_acronyms_are_spelled_where_capitals_say_so():
    acronyms = {"US": "u._s.", "I": "i.", "B": "b.", "M": "m."}
    words = normalise_words("the US told us I B M and I", acronyms)
    assert words == ("the", "u._s.", "told", "us", "i.", "b.", "m.", "and", "i")
