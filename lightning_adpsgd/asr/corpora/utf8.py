"""Lines of text files that must be UTF-8: tables, language models, texts.

Only a line feed ends a line, as for the programs that write these files. Python's
`splitlines` also ends one at U+0085 and U+2028, which may stand inside a sentence. A
byte order mark in front is left out.

One word may be written in two ways: `é` is one character (NFC), or `e` and an accent
(NFD, as macOS and some keyboards write it). They look alike. Words are compared in NFC.
"""

import codecs
import unicodedata
from collections.abc import Iterator
from pathlib import Path

_GZIP = b"\x1f\x8b"


def utf8_lines(
    path: Path, error: type[ValueError] = ValueError
) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers from 1, without their ends.

    Args:
        path: The file, which is read line by line.
        error: What is raised for a line that is not UTF-8.

    Raises:
        ValueError: A line is not UTF-8; path, line and byte are named.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as problem:
                raise error(
                    f"{path}:{number}: expected UTF-8, got the byte "
                    f"0x{line[problem.start]:02x} after {problem.start} others of the "
                    f"line; {_remedy(line if number == 1 else b'')}"
                ) from problem
            yield number, text.rstrip("\r\n")


def composed(text: str) -> str:
    """The text in NFC, in which letter and accent are one character."""
    return unicodedata.normalize("NFC", text)


def in_one_form(word: str) -> str:
    """The form in which words are compared: lower case and NFC."""
    return composed(word.lower())


def _remedy(first_line: bytes) -> str:
    if first_line.startswith(_GZIP):
        return "the file is compressed: unpack it by `gunzip`"
    kind, name = "if the file is Latin-1", "LATIN1"
    if first_line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        kind, name = "the file is UTF-16", "UTF-16"
    return f"{kind}, write it in UTF-8 by `iconv -f {name} -t UTF-8`"
