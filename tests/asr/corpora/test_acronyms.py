"""Acronyms: written together, said letter by letter, scored apart."""

import pytest

from lightning_adpsgd.asr.corpora.acronyms import (
    acronym_of,
    acronyms_in,
    letters_of,
    pronounce_letters,
    spell,
)


@pytest.mark.parametrize(
    ("word", "phones", "written"),
    [
        ("IBM", "ay b iy eh m", "i._b._m."),
        ("IBM's", "ay b iy eh m z", "i._b._m.'s"),
        ("CDs", "s iy d iy z", "c._d.s"),
        ("B", "b iy", "b."),
        ("US", "y uw eh s", "u._s."),
        ("US", "ah s", None),
        ("us", "y uw eh s", None),
        ("NASA", "n ae s ax", None),
        ("W", "d ah b ax l y uw", "w."),
        ("April", "ey p r ax l", None),
    ],
)
def test_capitals_said_letter_by_letter_are_an_acronym(
    word: str, phones: str, written: str | None
):
    assert acronym_of(word, phones.split()) == written


@pytest.mark.parametrize(
    ("word", "letters"),
    [
        ("i._b._m.", "i b m"),
        ("i._b._m.'s", "i b m's"),
        ("c._d.s", "c d's"),
        ("b.", "b"),
        ("uh-huh", "uh-huh"),
        ("mr.", "mr."),
    ],
)
def test_references_have_the_letters_apart(word: str, letters: str):
    assert letters_of(word) == tuple(letters.split())


@pytest.mark.parametrize("word", ["i._b._m.", "i._b._m.'s", "c._d.s", "b."])
def test_what_is_pronounced_is_found_again(word: str):
    phones = pronounce_letters(word)
    assert phones is not None
    plain = word.replace(".", "").replace("_", "")
    ending = next((e for e in ("'s", "s") if plain.endswith(e)), "")
    capitals = plain.removesuffix(ending).upper() + ending
    assert acronym_of(capitals, phones) == word


def test_plurals_of_hissing_letters_have_a_vowel():
    assert pronounce_letters("h.s") == ("ey", "ch", "ih", "z")
    assert pronounce_letters("f.s") == ("eh", "f", "s")
    assert pronounce_letters("word") is None


def test_a_and_i_are_words_unless_beside_a_letter():
    acronyms = acronyms_in([("TV", ["t", "iy", "v", "iy"])])
    tokens = ["I", "saw", "A", "TV", "A", "T", "and", "T", "said", "I", "B", "M"]
    spelled = [
        "I",
        "saw",
        "A",
        "t._v.",
        "a.",
        "t.",
        "and",
        "t.",
        "said",
        "i.",
        "b.",
        "m.",
    ]
    assert spell(tokens, acronyms) == spelled
