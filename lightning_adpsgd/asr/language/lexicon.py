"""Pronunciations: the MS-State dictionary, the noises, and a word for the unknown.

Silence phones: `sil` between words, `spn` for speech without known phones (unknown and
broken-off words, vocalised noise), `nsn` for other noise, `lau` for laughter.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import category

from lightning_adpsgd.asr.corpora.acronyms import LETTERS_AND_WORDS, acronym_of
from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped, Utterance
from lightning_adpsgd.asr.corpora.transcripts import normalise_word
from lightning_adpsgd.asr.corpora.turns import COPY_AGAIN, LINE_LEFT_OUT, read_lines
from lightning_adpsgd.asr.corpora.utf8 import in_one_form
from lightning_adpsgd.asr.language.dictionary_repairs import added, taken_away
from lightning_adpsgd.files import written_whole

UNKNOWN = "<unk>"
SILENCE = "sil"
SPECIAL_WORDS = {
    "[noise]": "nsn",
    "[vocalized-noise]": "spn",
    "[laughter]": "lau",
    UNKNOWN: "spn",
}
SILENCE_PHONES = (SILENCE, "spn", "nsn", "lau")
_OF_SPEECH = (
    "aa ae ah ao aw ax ay b ch d dh eh el en er ey f g hh ih iy jh k l m n ng ow oy p "
    "r s sh t th uh uw v w y z zh"
)
MS_STATE_PHONES = frozenset(_OF_SPEECH.split(" "))
"""The phones of speech in the MS-State dictionary."""

_VARIANT = re.compile(r"\(\d+\)$")
# Names that are reserved for the search graph.
_RESERVED_WORDS = {"<eps>", "#0", "<s>", "</s>"}
_RESERVED_PHONES = re.compile(r"#\d+|<eps>")
_ODD_BLANK = re.compile(r"[^\S \t\r\f\v]")  # such as U+00A0 inside of `10 000`

Pronunciation = tuple[str, ...]


@dataclass(frozen=True)
class Lexicon:
    """Words with their pronunciations.

    Attributes:
        pronunciations: One or several sequences of phones per word.
        silence_phones: `sil` first.
        nonsilence_phones: In alphabetical order.
    """

    pronunciations: dict[str, tuple[Pronunciation, ...]]
    silence_phones: tuple[str, ...]
    nonsilence_phones: tuple[str, ...]

    @property
    def phones(self) -> tuple[str, ...]:
        """All phones, those of silence first."""
        return self.silence_phones + self.nonsilence_phones

    def __contains__(self, word: str) -> bool:
        return word in self.pronunciations

    def known(self, words: Iterable[str]) -> tuple[str, ...]:
        """The words, with `<unk>` in place of those without a pronunciation."""
        return tuple(w if w in self.pronunciations else UNKNOWN for w in words)


Dictionary = dict[str, tuple[Pronunciation, ...]]


def read_entries(path: Path, skipped: Skipped) -> list[tuple[str, Pronunciation]]:
    """Words and phones of an MS-State dictionary as they are written.

    `#` begins a comment. Lines without phones, and those with names that are reserved
    for the search graph, are counted in `skipped`.

    Raises:
        CorpusError: The file cannot be read or holds no pronunciation.
    """
    entries = []
    for number, line in read_lines(path, skipped):
        word, *phones = line.split()
        if word.startswith("#"):
            continue
        problem = problem_of(line, word, phones)
        if problem:
            where = f"{path}:{number}: {word}"
            skipped.add(problem, where, remedy=LINE_LEFT_OUT)
        else:
            entries.append((word, tuple(phone.lower() for phone in phones)))
    if not entries:
        raise CorpusError(
            f"{path}: expected lines of `word phone ...`, found none; {COPY_AGAIN}"
        )
    return entries


def problem_of(line: str, word: str, phones: Sequence[str]) -> str:
    """The reason why a line of a dictionary is left out; empty if it is not."""
    if not phones:
        return "dictionary line without phones"
    if _ODD_BLANK.search(line):  # which makes phones of a part of the word
        return "dictionary line with a blank that is neither space nor tab"
    is_reserved = word.lower() in _RESERVED_WORDS
    if is_reserved or any(map(_RESERVED_PHONES.fullmatch, phones)):
        return "dictionary line with a name of the search graph"
    return ""


def read_dictionary(path: Path, skipped: Skipped, repair: bool = False) -> Dictionary:
    """Pronunciations of an MS-State dictionary: lines of `word phone phone ...`.

    Words are normalised as in the transcripts, acronyms too.

    Args:
        path: `sw-ms98-dict.text`.
        skipped: Counter of lines without phones.
        repair: Whether to apply `dictionary_repairs`.

    Raises:
        CorpusError: See `read_entries`.
    """
    entries = read_entries(path, skipped)
    if repair:
        wrong = set(taken_away())
        entries = [entry for entry in entries if entry not in wrong] + [*added()]
    found: dict[str, dict[Pronunciation, None]] = {}
    for written, phones in entries:
        for word in _words_of(written, phones):
            if word not in SPECIAL_WORDS:
                found.setdefault(word, {})[phones] = None
    return {word: tuple(found[word]) for word in sorted(found)}


def _words_of(written: str, phones: Pronunciation) -> Iterator[str]:
    """The word of an entry; for `I ay` both the letter and the word."""
    acronym, word = acronym_of(written, phones), normalise_word(written)
    if acronym:
        yield acronym
    if word and (not acronym or written in LETTERS_AND_WORDS):
        yield word


def read_cmudict(path: Path, skipped: Skipped) -> Dictionary:
    """Pronunciations of the CMU dictionary, or one of its form, in MS-State's phones.

    Lines of `WORD  W ER1 D`, other pronunciations as `WORD(1)` or once more; `;;;` and
    `#` begin a comment. Stress is dropped, except that `AH0` becomes MS-State's `ax`.

    Raises:
        CorpusError: The file cannot be read or holds no pronunciation, or nothing but
            stress is left of a phone.
    """
    found: dict[str, dict[Pronunciation, None]] = {}
    for number, line in read_lines(path, skipped):
        entry = line.partition(" #")[0]
        fields = entry.split()
        if line.startswith((";;;", "# ")) or not fields:
            continue
        written, *phones = fields
        if problem := problem_of(entry, written, phones):
            where = f"{path}:{number}: {written}"
            skipped.add(problem, where, remedy=LINE_LEFT_OUT)
            continue
        said = tuple(map(_without_stress, phones))
        if "" in said:
            empty = phones[said.index("")]
            problem = f"expected phones of CMUdict in {written!r}, got {empty!r}"
            raise CorpusError.at(path, number, problem)
        found.setdefault(word_of(written), {})[said] = None
    if not found:
        raise CorpusError(f"{path}: expected lines of `WORD W ER1 D`, found none")
    return {word: tuple(found[word]) for word in sorted(found)}


def word_of(written: str) -> str:
    """The word of an entry in the form of words, without a pronunciation's number."""
    return _VARIANT.sub("", in_one_form(written))


def _without_stress(phone: str) -> str:
    return "ax" if phone == "AH0" else phone.rstrip("012").lower()


def find_missing(
    dictionary: Dictionary, utterances: Iterable[Utterance]
) -> Counter[str]:
    """The spoken words that the dictionary lacks, with their counts.

    Broken-off words are excluded, because their endings are unknown.
    """
    said = Counter(word for utterance in utterances for word in utterance.words)
    return Counter(
        {
            word: count
            for word, count in said.items()
            if word not in dictionary
            and word not in SPECIAL_WORDS
            and not is_broken_off(word)
        }
    )


def is_broken_off(word: str) -> bool:
    """Whether only the start or the end of a word was spoken: `ab-`, `-ly`."""
    return word.startswith("-") or word.endswith("-")


def build_lexicon(
    dictionary: Dictionary, silence_phones: Iterable[str] = ()
) -> Lexicon:
    """The dictionary with the special words.

    Args:
        dictionary: Pronunciations by word.
        silence_phones: Phones of the dictionary that are silence as well.
    """
    special = {word: ((phone,),) for word, phone in SPECIAL_WORDS.items()}
    phones = phones_of(dictionary) - set(SILENCE_PHONES)
    more = phones & set(silence_phones)
    return Lexicon(
        pronunciations={**special, **dictionary},
        silence_phones=(*SILENCE_PHONES, *sorted(more)),
        nonsilence_phones=tuple(sorted(phones - more)),
    )


def phones_of(dictionary: Dictionary) -> set[str]:
    """All phones of a dictionary."""
    return {p for several in dictionary.values() for one in several for p in one}


def count_unknown(lexicon: Lexicon, utterances: Iterable[Utterance]) -> Skipped:
    """Counts words that are not in the lexicon, with their places.

    Broken-off words (`ab-`) are counted separately: they are expected to be missing.
    So are those of the lexicon that a mark of punctuation stands at (`yes,`).
    """
    unknown = Skipped()
    for utterance in utterances:
        for word in utterance.words:
            if word not in lexicon:
                where = f"{word!r} at {utterance.source or utterance.id}"
                unknown.add(*_why_unknown(word, lexicon, where))
    return unknown


def _why_unknown(
    word: str, lexicon: Lexicon, where: str
) -> tuple[str, str, float, str]:
    if is_broken_off(word):
        return "broken-off words", where, 0.0, ""
    if _is_in_brackets(word) or _without_marks(word) not in lexicon:
        return "out-of-vocabulary words", where, 0.0, ""
    remedy = "write the text without marks at words"
    return "words of the lexicon with punctuation", where, 0.0, remedy


def _is_in_brackets(word: str) -> bool:
    return f"{word[0]}{word[-1]}" in ("[]", "<>")


def _without_marks(word: str) -> str:
    """The word without punctuation and symbols at its ends."""
    letters = [place for place, one in enumerate(word) if category(one)[0] not in "PS"]
    return word[letters[0] : letters[-1] + 1] if letters else word


def write_lexicon(folder: Path, lexicon: Lexicon) -> None:
    """Writes `lexicon.txt` and `phones.txt`, silence phones first."""
    lines = [
        " ".join((word, *phones))
        for word, several in lexicon.pronunciations.items()
        for phones in several
    ]
    _write(folder / "lexicon.txt", lines)
    _write(folder / "silence_phones.txt", lexicon.silence_phones)
    _write(folder / "phones.txt", lexicon.phones)


def _write(path: Path, lines: Iterable[str]) -> None:
    with written_whole(path) as file:
        file.writelines(f"{line}\n" for line in lines)


def read_lexicon(folder: Path) -> Lexicon:
    """Reads the files of `write_lexicon`.

    Raises:
        CorpusError: A line has no word, no phones, or phones that `phones.txt` does not
            list.
        OSError: A file is missing or cannot be read.
    """
    phones = _lines(folder / "phones.txt")
    silence = _lines(folder / "silence_phones.txt")
    pronunciations: dict[str, tuple[Pronunciation, ...]] = {}
    path = folder / "lexicon.txt"
    for number, line in enumerate(_lines(path), start=1):
        word, *pronunciation = line.split() or [""]
        if not pronunciation or not set(pronunciation) <= set(phones):
            problem = f"expected a word and phones of phones.txt, got {line!r}"
            raise CorpusError.at(path, number, problem)
        several = pronunciations.get(word, ())
        pronunciations[word] = (*several, tuple(pronunciation))
    others = tuple(phone for phone in phones if phone not in silence)
    return Lexicon(pronunciations, silence, others)


def _lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8").split("\n")[:-1])
