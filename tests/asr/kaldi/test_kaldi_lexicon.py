"""The lexicon of a Kaldi recipe keeps the phones that it has."""

from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.kaldi.lexicon import find_lexicon, read_lexicon
from lightning_adpsgd.asr.language.lexicon import (
    build_lexicon,
    read_cmudict,
    read_dictionary,
)


def _write(folder: Path, text: str, name: str = "lexicon.txt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_case_and_digits_tell_phones_apart(tmp_path: Path):
    path = _write(
        tmp_path, "Schön S 2: n\nson s o~ n\n妈 m a1\n骂 m a4\nAbt AH0 AH1 2\n"
    )
    assert read_lexicon(path, Skipped()).pronunciations == {
        "schön": (("S", "2:", "n"),),
        "son": (("s", "o~", "n"),),
        "妈": (("m", "a1"),),
        "骂": (("m", "a4"),),
        "abt": (("AH0", "AH1", "2"),),
    }


def test_a_word_has_all_of_its_pronunciations_once(tmp_path: Path):
    path = _write(tmp_path, "a A\nA E\na(2) A\nb\n#1 x\nc #1\n")
    skipped = Skipped()
    found = read_lexicon(path, skipped).pronunciations
    assert found == {"a": (("A",), ("E",)), "#1": (("x",),)}
    assert skipped.examples == {
        "dictionary line without phones": [f"{path}:4: b"],
        "dictionary line with a name of the search graph": [f"{path}:6: c"],
    }


@pytest.mark.parametrize("read", [read_lexicon, read_dictionary, read_cmudict])
def test_a_blank_inside_a_word_makes_no_phones_of_its_rest(tmp_path: Path, read):
    path = _write(tmp_path, "10\u00a0000 d i\nvingt\u3000un v e~\nun\te~\n")
    skipped = Skipped()
    found = read(path, skipped)
    words = found.pronunciations if read is read_lexicon else found
    assert words == {"un": (("e~",),)}
    reason = "dictionary line with a blank that is neither space nor tab"
    assert skipped.examples == {reason: [f"{path}:1: 10", f"{path}:2: vingt"]}


def test_probabilities_are_no_phones(tmp_path: Path):
    path = _write(tmp_path, "a 1.0 A\na 0.5 2\n", "lexiconp.txt")
    assert read_lexicon(path, Skipped()).pronunciations == {"a": (("A",), ("2",))}
    for wrong in ("b B b", "b 0.0 B", "b nan B", "b"):
        path.write_text(f"a 1.0 A\n{wrong}\n")
        with pytest.raises(CorpusError, match=r"lexiconp\.txt:2: expected `word prob"):
            read_lexicon(path, Skipped())


def test_silences_are_those_of_its_list(tmp_path: Path):
    path = _write(tmp_path, "!SIL SIL\n<NOISE> NSN\n<BREATH> brh\nla l a\n")
    _write(tmp_path, "SIL\nNSN\nbrh clk\n", "silence_phones.txt")
    found = read_lexicon(path, Skipped())
    assert found.pronunciations["!sil"] == (("sil",),)
    lexicon = build_lexicon(found.pronunciations, found.silence_phones)
    assert lexicon.silence_phones == ("sil", "spn", "nsn", "lau", "brh")
    assert lexicon.nonsilence_phones == ("a", "l")


def test_a_phone_with_the_name_of_a_silence_is_refused_with_its_line(tmp_path: Path):
    path = _write(tmp_path, "!SIL SIL\nlau lau\n")
    _write(tmp_path, "SIL\n", "silence_phones.txt")
    problem = r"lexicon\.txt:2: the phone 'lau' has the name of a silence"
    with pytest.raises(CorpusError, match=problem):
        read_lexicon(path, Skipped())


def test_a_lexicon_without_words_is_refused(tmp_path: Path):
    with pytest.raises(CorpusError, match=r"lexicon\.txt: expected lines of `word ph"):
        read_lexicon(_write(tmp_path, "\n"), Skipped())


def test_it_is_found_where_recipes_keep_it(tmp_path: Path):
    assert find_lexicon(tmp_path) is None
    for folder, name in (
        ("dict_nosp", "lexiconp.txt"),
        ("dict_nosp", "lexicon.txt"),
        ("dict", "lexiconp.txt"),
        ("dict", "lexicon.txt"),
    ):
        path = _write(tmp_path / "local" / folder, "a A\n", name)
        assert find_lexicon(tmp_path) == path
