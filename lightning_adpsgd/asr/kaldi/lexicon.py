"""The lexicon of a Kaldi recipe, `data/local/dict`: phones as they are written.

Case and digits tell phones apart: X-SAMPA has `s` and `S`, Mandarin `a1` and `a4`. Only
the names of silence are those that every recipe here has: `SIL` is `sil`, and so on.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.turns import read_lines
from lightning_adpsgd.asr.corpora.utf8 import composed
from lightning_adpsgd.asr.language.lexicon import (
    SILENCE_PHONES,
    Dictionary,
    Pronunciation,
    problem_of,
    word_of,
)

_FOLDERS = ("dict", "dict_nosp")
_WITH_PROBABILITIES = "lexiconp.txt"
_FILES = ("lexicon.txt", _WITH_PROBABILITIES)
SILENCES = "silence_phones.txt"
_CAPITALS = {phone.upper(): phone for phone in SILENCE_PHONES}


class KaldiLexicon(NamedTuple):
    """Words with their phones.

    Attributes:
        pronunciations: Pronunciations by word, words in lower case.
        silence_phones: Phones of `silence_phones.txt` beside those of every recipe.
    """

    pronunciations: Dictionary
    silence_phones: tuple[str, ...]


def find_lexicon(data: Path) -> Path | None:
    """The lexicon beside data directories; none if there is none.

    Args:
        data: Folder with `local/dict` or `local/dict_nosp`.
    """
    folders = (data / "local" / name for name in _FOLDERS)
    paths = (folder / name for folder in folders for name in _FILES)
    return next((path for path in paths if path.exists()), None)


def read_lexicon(path: Path, skipped: Skipped) -> KaldiLexicon:
    """Reads `lexicon.txt`, or `lexiconp.txt` without its probabilities.

    Lines without phones, and those with names that are reserved for the search graph,
    are counted in `skipped`.

    Raises:
        CorpusError: The file cannot be read or holds no pronunciation, a probability is
            none, or a phone has the name of a silence and is none.
    """
    listed = _listed(path.with_name(SILENCES))
    found: dict[str, dict[Pronunciation, None]] = {}
    for number, word, phones in _entries(path, skipped):
        said = tuple(_CAPITALS.get(phone, phone) for phone in phones)
        for written, phone in zip(phones, said, strict=True):
            if listed is not None and phone in SILENCE_PHONES and written not in listed:
                raise CorpusError.at(path, number, _no_silence(written))
        found.setdefault(word_of(word), {})[said] = None
    if not found:
        raise CorpusError(f"{path}: expected lines of `word phone ...`, found none")
    others = {_CAPITALS.get(phone, phone) for phone in listed or ()}
    return KaldiLexicon(
        {word: tuple(several) for word, several in found.items()},
        tuple(sorted(others - set(SILENCE_PHONES))),
    )


def _listed(path: Path) -> frozenset[str] | None:
    if not path.exists():
        return None
    lines = read_lines(path, Skipped())
    return frozenset(phone for _, line in lines for phone in composed(line).split())


def _no_silence(phone: str) -> str:
    names = ", ".join(SILENCE_PHONES)
    return (
        f"the phone {phone!r} has the name of a silence ({names}), but {SILENCES} "
        "does not list it; give it another name, or list it there"
    )


def _entries(path: Path, skipped: Skipped) -> Iterator[tuple[int, str, Pronunciation]]:
    """Number of the line, word and phones, as they are written but in NFC."""
    for number, line in read_lines(path, skipped):
        word, *phones = composed(line).split()
        if path.name == _WITH_PROBABILITIES:
            _check_probability(path, number, phones[:1])
            phones = phones[1:]
        if problem := problem_of(line, word, phones):
            where = f"{path}:{number}: {word}"
            skipped.add(problem, where, remedy="the line is left out")
        else:
            yield number, word, tuple(phones)


def _check_probability(path: Path, number: int, written: list[str]) -> None:
    try:
        is_one = bool(written) and 0 < float(written[0]) <= 1
    except ValueError:
        is_one = False
    if not is_one:
        expected = "expected `word probability phone ...`"
        raise CorpusError.at(path, number, f"{expected}, got {' '.join(written)!r}")
