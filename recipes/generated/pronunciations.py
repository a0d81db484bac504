"""The dictionary of the generated corpus: eSpeak's IPA rewritten in MS-State's phones.

A word has a pronunciation for each accent and each place where the grammar may put it:
alone, in the middle of a sentence, before a vowel ("the apple"). Words broken off have
the first phones of their whole word.
"""

import re

from recipes.generated import espeak
from recipes.generated.grammar import vocabulary
from recipes.generated.rules import PARTIAL_WORDS

ACCENTS = ("en-us", "en-gb-x-rp")

# ruff: noqa: RUF001  (IPA looks like other letters)
#: Longest match first. Stress, length and syllable marks are dropped beforehand.
PHONES_OF_IPA = {
    "aɪɚ": "ay er", "aɪə": "ay er", "aʊɚ": "aw er", "aʊɐ": "aw er",
    "tʃ": "ch", "dʒ": "jh", "eɪ": "ey", "aɪ": "ay", "aʊ": "aw", "ɔɪ": "oy",
    "oʊ": "ow", "əʊ": "ow", "əl": "el", "n̩": "ax n", "iə": "iy ax", "eə": "eh r",
    "ʊə": "uh r", "ɑ": "aa", "ɒ": "aa", "æ": "ae", "a": "ae", "ʌ": "ah", "ɔ": "ao",
    "o": "ow", "ə": "ax", "ɐ": "ax", "ɛ": "eh", "e": "eh", "ɚ": "er", "ɜ": "er",
    "ɪ": "ih", "ᵻ": "ih", "i": "iy", "ʊ": "uh", "u": "uw", "b": "b", "d": "d",
    "ð": "dh", "f": "f", "ɡ": "g", "h": "hh", "k": "k", "l": "l", "m": "m", "n": "n",
    "ŋ": "ng", "p": "p", "ɹ": "r", "s": "s", "ʃ": "sh", "t": "t", "ɾ": "t", "ʔ": "t",
    "θ": "th", "v": "v", "w": "w", "j": "y", "z": "z", "ʒ": "zh",
}  # fmt: skip
_SYMBOL = re.compile("|".join(sorted(PHONES_OF_IPA, key=len, reverse=True)) + "|.")
_MARKS = re.compile("[ˈˌːː_ ]")


def phones_of_ipa(ipa: str) -> tuple[str, ...]:
    """Rewrite one word's IPA in MS-State's phones.

    Raises:
        ValueError: a symbol has no phone in `PHONES_OF_IPA`.
    """
    phones: list[str] = []
    for symbol in _SYMBOL.findall(_MARKS.sub("", ipa)):
        if symbol not in PHONES_OF_IPA:
            raise ValueError(f"`ipa` must be made of known symbols, got {ipa!r}")
        phones += PHONES_OF_IPA[symbol].split()
    return _without_double_r(phones)


def pronounce(word: str) -> list[tuple[str, ...]]:
    """Return the pronunciations of a whole word, the commonest first."""
    spoken = [
        ipa
        for accent in ACCENTS
        for carrier in ("so {} now", "so {} apples", "{}")
        if (ipa := _inside(carrier, word, accent)) is not None
    ]
    return list(dict.fromkeys(phones_of_ipa(ipa) for ipa in spoken))


def spoken_partial(word: str, accent: str) -> str:
    """Return what eSpeak has to be given to say the start of `word` and break off."""
    names = espeak.phonemes(word, voice=accent, ipa=False).split("_")
    return "[[" + "".join(names[: PARTIAL_WORDS[word][1]]) + "]]"


def dictionary() -> list[str]:
    """Return the sorted lines `word phone phone ...` for all that the grammar says."""
    whole = {word: pronounce(word) for word in vocabulary()}
    partial = {
        token: list(dict.fromkeys(_first_sounds(word, accent) for accent in ACCENTS))
        for word, (token, _) in PARTIAL_WORDS.items()
    }
    entries = sorted((whole | partial).items())
    return [" ".join((word, *phones)) for word, many in entries for phones in many]


def _first_sounds(word: str, accent: str) -> tuple[str, ...]:
    symbols = espeak.phonemes(word, voice=accent, ipa=True).split("_")
    return phones_of_ipa("".join(symbols[: PARTIAL_WORDS[word][1]]))


def _inside(carrier: str, word: str, accent: str) -> str | None:
    """Return the IPA of `word` in `carrier`, None where eSpeak runs words together."""
    spoken = espeak.phonemes(carrier.format(word), voice=accent).split()
    place = carrier.split().index("{}")
    return spoken[place] if len(spoken) == len(carrier.split()) else None


def _without_double_r(phones: list[str]) -> tuple[str, ...]:
    """Drop the second of two `r`, which eSpeak writes for one sound (`during`)."""
    pairs = zip(["", *phones], phones, strict=False)
    return tuple(phone for before, phone in pairs if (before, phone) != ("r", "r"))
