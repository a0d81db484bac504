"""Lines end where the programs that wrote them end them, and damage has a place."""

import gzip
from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.utf8 import utf8_lines


def _read(folder: Path, content: bytes) -> list[tuple[int, str]]:
    (folder / "text").write_bytes(content)
    return list(utf8_lines(folder / "text"))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_marks_and_ends_of_lines_are_left_out(tmp_path: Path, mark: bytes, end: str):
    content = mark + f"u1 grün{end}{end}u2 \ufeffja".encode()
    assert _read(tmp_path, content) == [(1, "u1 grün"), (2, ""), (3, "u2 \ufeffja")]


@pytest.mark.parametrize("odd", "\x0b\x0c\x1c\x85\u2028\u2029")
def test_a_line_goes_on_after_what_only_python_ends_it_at(tmp_path: Path, odd: str):
    assert _read(tmp_path, f"u1 a{odd}b\nu2 c\n".encode()) == [
        (1, f"u1 a{odd}b"),
        (2, "u2 c"),
    ]


def test_what_is_not_utf_8_is_named_with_line_and_byte(tmp_path: Path):
    lines = _lines_of_two(tmp_path)
    assert next(lines) == (1, "a")
    problem = (
        r"text:2: expected UTF-8, got the byte 0xfc after 2 others .*iconv -f LATIN1"
    )
    with pytest.raises(ValueError, match=problem):
        next(lines)


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (gzip.compress(b"u1 yes\n"), "the file is compressed: unpack it by `gunzip`"),
        ("u1 yes\n".encode("utf-16"), "the file is UTF-16, write .* -f UTF-16 -t"),
    ],
    ids=["gzip", "utf-16"],
)
def test_a_file_of_another_kind_is_told_by_its_begin(
    tmp_path: Path, content: bytes, remedy: str
):
    with pytest.raises(ValueError, match=rf"text:1: expected UTF-8, .*; {remedy}"):
        _read(tmp_path, content)


def _lines_of_two(folder: Path):
    (folder / "text").write_bytes(b"a\ngr\xfcn\n")
    return utf8_lines(folder / "text")
