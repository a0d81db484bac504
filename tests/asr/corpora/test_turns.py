"""Lines of text files from discs, whatever system wrote them."""

from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.turns import (
    Turn,
    overlapping,
    parse_talker,
    read_lines,
)


@pytest.mark.parametrize(
    "content",
    [
        "a\n\nné\n".encode(),
        "a\r\n\r\nné\r\n".encode(),
        "a\r\rné\r".encode(),
        b"\xef\xbb\xbf" + "a\n\nné".encode(),
        "a\n\nné\n".encode("utf-16"),
    ],
)
def test_lines_of_any_system_keep_their_numbers(tmp_path: Path, content: bytes):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    skipped = Skipped()
    assert read_lines(path, skipped) == [(1, "a"), (3, "né")]
    assert not skipped.counts


def test_latin_1_is_counted_unless_it_may_be(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\nn\xe9\x85x\n")
    skipped = Skipped()
    assert read_lines(path, skipped, may_be_latin=True)[1] == (2, "n\xe9\x85x")
    assert not skipped.counts
    read_lines(path, skipped)
    assert skipped.examples == {"text that is not UTF-8": [f"{path}:2"]}


def test_zero_bytes_are_no_text(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\nb\n\0\0")
    with pytest.raises(
        CorpusError, match=r"a\.txt:3: expected text, found a zero byte"
    ):
        read_lines(path, Skipped())


def test_a_talker_has_a_side_and_perhaps_a_number():
    path = Path("a.txt")
    assert parse_talker(path, 1, "A:") == (0, "A")
    assert parse_talker(path, 1, "B12:") == (1, "B12")
    with pytest.raises(CorpusError, match=r"a\.txt:7: expected a talker.*got 'C:'"):
        parse_talker(path, 7, "C:")


def test_overlaps_are_of_one_talker_and_beyond_the_tolerance():
    turns = [
        Turn(1, 0, 0.0, 5.0, ("a",)),
        Turn(2, 1, 1.0, 2.0, ("b",)),  # the other side
        Turn(3, 0, 4.6, 6.0, ("c",)),  # within the tolerance
        Turn(4, 0, 5.0, 5.5, ("d",)),
        Turn(5, 0, 5.2, 7.0, ("e",), "A1"),  # another talker there
    ]
    assert [turn.line for turn in overlapping(reversed(turns), 0.5)] == [4]
