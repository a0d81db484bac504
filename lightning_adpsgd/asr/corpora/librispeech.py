"""LibriSpeech and mini LibriSpeech: read speech, a file per utterance.

    LibriSpeech/train-clean-5/1088/134315/1088-134315-0000.flac
    LibriSpeech/train-clean-5/1088/134315/1088-134315.trans.txt
    LibriSpeech/SPEAKERS.TXT

A line of a transcript is `1088-134315-0000 WORDS IN CAPITALS`, a line of SPEAKERS.TXT
`1088 | F | train-clean-5 | 25.07 | Name`, with `;` for comments.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.corpus import Skipped
from lightning_adpsgd.asr.corpora.discs import find_files
from lightning_adpsgd.asr.corpora.turns import COPY_AGAIN, LINE_LEFT_OUT, read_lines
from lightning_adpsgd.asr.corpora.utf8 import in_one_form

_TRANSCRIPT = re.compile(r"\d+-\d+\.trans\.txt")
_SOUND = re.compile(r"\d+-\d+-\d+\.flac")
_LINE = re.compile(r"\s*(\d+)-(\d+)-(\d+)\s+(\S.*)")


class ReadUtterance(NamedTuple):
    """One line of a transcript, with its sound.

    Attributes:
        name: `1088-134315-0000`.
        reader: `1088`.
        words: Words in lower case.
        sound: FLAC file.
        source: `file:line` of the transcript.
    """

    name: str
    reader: str
    words: tuple[str, ...]
    sound: Path
    source: str


class Library(NamedTuple):
    """The contents of some folders.

    Attributes:
        splits: Utterances of each split, `train-clean-5`, in the order of their names.
        sexes: Sex of each reader, "m" or "f".
        lexicon: `librispeech-lexicon.txt`, if it exists.
    """

    splits: dict[str, list[ReadUtterance]]
    sexes: dict[str, str]
    lexicon: Path | None


def find_library(roots: Iterable[Path], skipped: Skipped) -> Library:
    """Reads all transcripts; counts lines without sound and sounds without a line.

    Raises:
        CorpusError: An element of `roots` is not a folder, or a transcript is not text.
    """
    files = find_files(roots, skipped)
    sounds = {file.stem: file.path for file in files if _SOUND.fullmatch(file.name)}
    splits: dict[str, list[ReadUtterance]] = {}
    used: set[str] = set()
    for file in files:
        if _TRANSCRIPT.fullmatch(file.name):
            spoken = splits.setdefault(split_of(file.path), [])
            spoken += read_transcript(file.path, sounds, skipped)
            used |= {utterance.name for utterance in spoken}
    for name in sorted(sounds.keys() - used):
        remedy = "left out; copy the transcript of its chapter"
        skipped.add("sound without a transcript", str(sounds[name]), remedy=remedy)
    tables = [file.path for file in files if file.name == "speakers.txt"]
    sexes = {k: v for path in tables for k, v in read_sexes(path, skipped).items()}
    lexicons = (f.path for f in files if f.name == "librispeech-lexicon.txt")
    return Library(splits, sexes, next(lexicons, None))


def split_of(path: Path) -> str:
    """The split that a file belongs to: the folder above reader and chapter."""
    return path.parts[-4].lower() if len(path.parts) > 3 else ""


def read_transcript(
    path: Path, sounds: dict[str, Path], skipped: Skipped
) -> Iterator[ReadUtterance]:
    """The utterances of one chapter that have sound; counts the others."""
    for number, line in read_lines(path, skipped):
        where = f"{path}:{number}"
        match = _LINE.fullmatch(line)
        if match is None:
            problem = f"{where}: expected `reader-chapter-number WORDS`"
            skipped.add("malformed transcript line", problem, remedy=LINE_LEFT_OUT)
            continue
        name = "-".join(match.group(1, 2, 3))
        if name not in sounds:
            remedy = f"copy {name}.flac; {COPY_AGAIN}"
            skipped.add("transcript without its sound", where, remedy=remedy)
            continue
        words = tuple(in_one_form(match[4]).split())
        yield ReadUtterance(name, match[1], words, sounds[name], where)


def read_sexes(path: Path, skipped: Skipped) -> dict[str, str]:
    """Sexes of the readers, from SPEAKERS.TXT."""
    sexes = {}
    for number, line in read_lines(path, skipped):
        fields = [field.strip() for field in line.split("|")]
        if line.lstrip().startswith(";"):
            continue
        if len(fields) < 3 or not fields[0].isdecimal() or fields[1] not in ("M", "F"):
            where = f"{path}:{number}: {line.strip()[:60]!r}"
            skipped.add("malformed line of readers", where, remedy=LINE_LEFT_OUT)
            continue
        sexes[fields[0]] = fields[1].lower()
    return sexes
