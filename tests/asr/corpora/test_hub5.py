"""Hub5'00: segments and references find each other; broken lines are counted."""

from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.hub5 import (
    EvalSegment,
    assign,
    extended,
    part_of,
    read_pem,
    read_stm,
    reference_words,
    repaired,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<O,sw,M,sw-M> YES  I'M HERE", ("yes", "i'm", "here")),
        ("YES (%HESITATION) NO", ("yes", "no")),
        ("((I)) SEE (DOG-)", ("see",)),
        ("<O> <B_ASIDE> WAIT <E_ASIDE> { HE'S / HE IS } IN", ("wait", "he's", "in")),
        ("{ UH / @ } YES", ("uh", "yes")),
        ("CAFE\u0301", ("caf\xe9",)),
        ("", ()),
    ],
)
def test_a_reference_keeps_the_words_that_must_be_said(text: str, words: tuple):
    assert reference_words(text) == words


def test_comments_are_passed_over_and_broken_lines_counted(tmp_path: Path):
    path = tmp_path / "a.stm"
    path.write_text(
        ";; LABEL x\nsw_4390 A s 0.5 2.5 <O> YES\nsw_4390 A s 0.5\nsw_4390 C s 1 2 NO\n"
    )
    skipped = Skipped()
    (segment,) = read_stm(path, skipped)
    assert segment == EvalSegment(2, "sw_4390", 0, 0.5, 2.5, "<O> YES")
    assert skipped.counts == {"malformed stm line": 2}
    assert ":3:" in skipped.examples["malformed stm line"][0]


def test_a_missing_pem_is_named(tmp_path: Path):
    with pytest.raises(CorpusError, match=r"gone\.pem: cannot be read"):
        read_pem(tmp_path / "gone.pem", Skipped())


def test_references_go_to_the_segment_that_holds_their_middle():
    pem = [
        EvalSegment(1, "sw_1", 0, 0.0, 2.0),
        EvalSegment(2, "sw_1", 0, 2.0, 5.0),
        EvalSegment(3, "sw_1", 1, 0.0, 5.0),
    ]
    stm = [
        EvalSegment(2, "sw_1", 0, 1.8, 4.0, "C"),
        EvalSegment(1, "sw_1", 0, 0.0, 1.7, "A"),
        EvalSegment(3, "sw_1", 0, 4.0, 5.0, "D"),
        EvalSegment(4, "sw_1", 1, 1.0, 2.0, "B"),
        EvalSegment(5, "sw_1", 1, 6.0, 9.6, "LOST"),
    ]
    skipped = Skipped()
    pairs = assign(pem, stm, skipped, Path("a.stm"))
    texts = {segment.line: [r.text for r in found] for segment, found in pairs}
    assert texts == {1: ["A"], 2: ["C", "D"], 3: ["B"]}
    assert skipped.examples == {"reference outside every pem segment": ["a.stm:5"]}


def test_doubled_parentheses_and_asides_are_repaired():
    line = "en_4156 A x 1.0 2.0 <O,en,F,en-F> ((UH) <B_ASIDE> YES <E_ASIDE> ((I))\n"
    assert repaired(line) == "en_4156 A x 1.0 2.0 <O,en,F,en-F> (UH)  YES  (I)\n"


def test_segments_are_extended_but_not_into_one_another():
    segments = [
        EvalSegment(1, "sw_1", 0, 0.05, 2.0),
        EvalSegment(3, "sw_1", 0, 4.0, 5.0),  # lines need not be in order of time
        EvalSegment(2, "sw_1", 0, 2.1, 4.5),
        EvalSegment(4, "sw_1", 1, 2.05, 3.0),
    ]
    times = [(s.start_s, s.end_s) for s in extended(segments, 0.1)]
    wanted = [(0.0, 2.05), (4.0, 5.1), (2.05, 4.5), (1.95, 3.1)]
    for found, expected in zip(times, wanted, strict=True):
        assert found == pytest.approx(expected)


def test_the_name_tells_the_part():
    assert [part_of(name) for name in ("sw_4390", "en_4156", "x")] == [
        "swb",
        "ch",
        None,
    ]


def test_a_segment_can_be_excluded_from_scoring():
    text = "<O> IGNORE_TIME_SEGMENT_IN_SCORING"
    assert EvalSegment(1, "sw_1", 0, 0.0, 2.0, text).is_ignored
    assert not EvalSegment(1, "sw_1", 0, 0.0, 2.0, "YES").is_ignored
