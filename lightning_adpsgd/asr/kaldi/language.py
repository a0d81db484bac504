"""The words and phones of Kaldi's `lang` and `graph` folders."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.utf8 import composed, utf8_lines
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.search.words import place_words


def read_words(path: str | Path) -> dict[int, str]:
    """The word of each label in NFC, from `words.txt`: lines of `word label`.

    Raises:
        KaldiError: A line has another form.
        OSError: The file cannot be read.
    """
    words = {}
    for number, fields in _fields(Path(path)):
        if len(fields) != 2 or not fields[1].isdecimal():
            raise KaldiError(f"{path}:{number}: expected `word label`, got {fields}")
        words[int(fields[1])] = composed(fields[0])
    return words


def _fields(path: Path) -> list[tuple[int, list[str]]]:
    lines = utf8_lines(path, KaldiError)
    return [(number, line.split()) for number, line in lines if line.strip()]


class Boundaries(NamedTuple):
    """Rules by which the phones of a path make words.

    Attributes:
        kinds: Kind of each phone: `begin`, `end`, `internal`, `singleton` or `nonword`;
            empty where phones do not tell their place in a word.
        pronunciations: Pronunciations of each word.
        silence: The phone between words, where `kinds` is empty.
    """

    kinds: dict[int, str]
    pronunciations: dict[int, list[list[int]]]
    silence: int

    def spans(
        self, phones: Sequence[int], words: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        """The positions of each word's first phone and of the phone after its last one.

        None if phones and words do not fit, for example on an unfinished path.
        """
        if self.kinds:
            found = self._by_kind(phones)
            return found if len(found) == len(words) else None
        if any(word not in self.pronunciations for word in words):
            return None
        several = [self.pronunciations[word] for word in words]
        return place_words(list(phones), several, self.silence)

    def _by_kind(self, phones: Sequence[int]) -> list[tuple[int, int]]:
        spans, begin = [], 0
        for position, phone in enumerate(phones):
            kind = self.kinds.get(phone, "nonword")
            if kind in ("begin", "singleton"):
                begin = position
            if kind in ("end", "singleton"):
                spans.append((begin, position + 1))
        return spans


def read_boundaries(folder: str | Path) -> Boundaries:
    """Reads a folder `phones` with `word_boundary.int` or `align_lexicon.int`.

    Raises:
        KaldiError: Neither file exists, or a line cannot be used.
    """
    folder = Path(folder)
    if (path := folder / "word_boundary.int").exists():
        return Boundaries(_read_kinds(path), {}, 0)
    if (path := folder / "align_lexicon.int").exists():
        return _read_lexicon(path)
    raise KaldiError(
        f"{folder}: expected word_boundary.int or align_lexicon.int, without which "
        "words have no times"
    )


def _read_kinds(path: Path) -> dict[int, str]:
    known = ("nonword", "begin", "end", "internal", "singleton")
    kinds = {}
    for number, fields in _fields(path):
        if len(fields) != 2 or not fields[0].isdecimal() or fields[1] not in known:
            problem = f"expected `phone {'|'.join(known)}`, got {fields}"
            raise KaldiError(f"{path}:{number}: {problem}")
        kinds[int(fields[0])] = fields[1]
    return kinds


def _read_lexicon(path: Path) -> Boundaries:
    """Reads lines `word word phone phone ...`; the word 0 is the silence."""
    pronunciations: dict[int, list[list[int]]] = {}
    silence = 0
    for number, fields in _fields(path):
        if len(fields) < 3 or not all(field.isdecimal() for field in fields):
            problem = f"expected `word word phone ...`, got {fields}"
            raise KaldiError(f"{path}:{number}: {problem}")
        word, phones = int(fields[0]), [int(field) for field in fields[2:]]
        if word == 0:
            silence = phones[0]
        else:
            pronunciations.setdefault(word, []).append(phones)
    return Boundaries({}, pronunciations, silence)
