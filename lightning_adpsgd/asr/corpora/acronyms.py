"""Words that are spelled out, `IBM`, in the written form of Fisher: `i._b._m.`.

MS-State writes them in capitals, and only capitals distinguish `US` from `us`. A
dictionary word in capitals is an acronym if it is pronounced as the names of its
letters. Its plural is `c._d.s`, its genitive `i._b._m.'s`, and a single letter is `b.`.
References have separate letters, so a recognised acronym is split again before scoring.
The rules are those of Kaldi's Switchboard recipe, except that only words in capitals
are considered.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

#: How the letters are said, in the phones of MS-State.
LETTERS = {
    "a": "ey", "b": "b iy", "c": "s iy", "d": "d iy", "e": "iy", "f": "eh f",
    "g": "jh iy", "h": "ey ch", "i": "ay", "j": "jh ey", "k": "k ey", "l": "eh l",
    "m": "eh m", "n": "eh n", "o": "ow", "p": "p iy", "q": "k y uw", "r": "aa r",
    "s": "eh s", "t": "t iy", "u": "y uw", "v": "v iy", "w": "d ah b ax l y uw",
    "x": "eh k s", "y": "w ay", "z": "z iy",
}  # fmt: skip
_CAPITALS = re.compile(r"([A-Z]+)('s|s|'S)?")
#: The written form of a word that is spelled out: letters, and an ending.
WRITTEN = re.compile(r"((?:[a-z]\._)*[a-z]\.)('s|s)?")
_PLURAL = {"f": ("s",), "s": ("ih", "z"), "ch": ("ih", "z")}
#: Letters that are words of their own, unless they stand beside another letter.
LETTERS_AND_WORDS = frozenset({"A", "I"})


def acronym_of(word: str, phones: Sequence[str]) -> str | None:
    """The written form of a dictionary word; None if it is not spelled out.

    Args:
        word: Word as in the dictionary, in capitals: `IBM`, `CDs`, `IBM's`.
        phones: Pronunciation of the word.
    """
    match = _CAPITALS.fullmatch(word)
    if match is None:
        return None
    ending = (match[2] or "").lower()
    said = " ".join(LETTERS[letter] for letter in match[1].lower()).split()
    pronounced = list(phones)
    if ending and pronounced[-1:] in (["s"], ["z"]):
        pronounced = pronounced[:-1]
    return _written(match[1]) + ending if pronounced == said else None


def _written(letters: str) -> str:
    return "._".join(letters.lower()) + "."


def spell(tokens: Sequence[str], acronyms: Mapping[str, str]) -> list[str]:
    """The tokens of a transcript with acronyms in their written form.

    `A` and `I` are words unless they are next to another single capital: `A T and T`.
    """
    return [
        token
        if token not in acronyms
        or (token in LETTERS_AND_WORDS and not _is_spelled(tokens, place))
        else acronyms[token]
        for place, token in enumerate(tokens)
    ]


def _is_spelled(tokens: Sequence[str], place: int) -> bool:
    beside = [*tokens[max(0, place - 1) : place], *tokens[place + 1 : place + 2]]
    return any(len(token) == 1 and "A" <= token <= "Z" for token in beside)


def letters_of(word: str) -> tuple[str, ...]:
    """The words of a reference for a written form: `i._b._m.'s` is `i`, `b`, `m's`."""
    match = WRITTEN.fullmatch(word)
    if match is None:
        return (word,)
    letters = match[1].replace(".", "").split("_")
    return (*letters[:-1], letters[-1] + ("'s" if match[2] else ""))


def pronounce_letters(word: str) -> tuple[str, ...] | None:
    """The phones of a word in written form; None for any other word."""
    match = WRITTEN.fullmatch(word)
    if match is None:
        return None
    letters = match[1].replace(".", "").split("_")
    phones = " ".join(LETTERS[letter] for letter in letters).split()
    if not match[2]:
        return tuple(phones)
    return (*phones, *_PLURAL.get(phones[-1], ("z",)))


def acronyms_in(entries: Iterable[tuple[str, Sequence[str]]]) -> dict[str, str]:
    """The written forms by dictionary word, from entries (word, phones)."""
    found = ((word, acronym_of(word, phones)) for word, phones in entries)
    letters = {letter.upper(): f"{letter}." for letter in LETTERS}
    return letters | {word: written for word, written in found if written}
