"""The lexicon: read from MS-State's form, complete with special words, and back."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_adpsgd.asr.corpora.acronyms import LETTERS
from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped, Utterance
from lightning_adpsgd.asr.kaldi.lexicon import read_lexicon as read_kaldi
from lightning_adpsgd.asr.language.dictionary_repairs import added, taken_away
from lightning_adpsgd.asr.language.lexicon import (
    MS_STATE_PHONES,
    SILENCE_PHONES,
    build_lexicon,
    count_unknown,
    read_cmudict,
    read_dictionary,
    read_lexicon,
    write_lexicon,
)


@pytest.fixture
def dictionary(tmp_path: Path) -> Path:
    path = tmp_path / "sw-ms98-dict.text"
    path.write_text(
        "# a comment\n\nA ah\na EY\na ah\nab[solute]- ae b\nthem_1 dh eh m\n"
        "[silence] sil\nbroken\n"
    )
    return path


def test_words_are_normalised_and_variants_kept_once(dictionary: Path):
    assert read_dictionary(dictionary, Skipped()) == {
        "a": (("ah",), ("ey",)),
        "ab-": (("ae", "b"),),
        "them": (("dh", "eh", "m"),),
    }


def test_letters_in_capitals_are_apart_from_words(tmp_path: Path):
    path = tmp_path / "dict"
    path.write_text("I ay\na ax\nA ey\nB b iy\nTV t iy v iy\nus ah s\nUS y uw eh s\n")
    assert read_dictionary(path, Skipped()) == {
        "a": (("ax",), ("ey",)),
        "a.": (("ey",),),
        "b.": (("b", "iy"),),
        "i": (("ay",),),
        "i.": (("ay",),),
        "t._v.": (("t", "iy", "v", "iy"),),
        "u._s.": (("y", "uw", "eh", "s"),),
        "us": (("ah", "s"),),
    }


def test_the_dictionary_is_repaired_where_it_is_asked_for(tmp_path: Path):
    path = tmp_path / "dict"
    path.write_text("Creek k r ih k\nB ay zh aa n iy z\nAugust ao g ah s t\n")
    repaired = read_dictionary(path, Skipped(), repair=True)
    assert repaired["creek"] == (("k", "r", "iy", "k"),)
    assert repaired["uh-hum"] == (("ah", "m", "hh", "ah", "m"),)
    assert repaired["n._a._a._c._p."] == (
        ("eh", "n", "ey", "ey", "s", "iy", "p", "iy"),
    )
    assert repaired["august"] == (("ao", "g", "ah", "s", "t"),)
    assert "b" not in repaired


def test_no_repair_takes_away_what_it_adds():
    assert not set(taken_away()) & set(added())
    assert len([*added()]) == 166
    assert len([*taken_away()]) == 31


def test_cmudict_is_read_in_the_phones_of_ms_state(tmp_path: Path):
    path = tmp_path / "cmudict"
    path.write_text(
        ";;; CMUdict\nABOUT  AH0 B AW1 T\nABOUT(2)  AH0 B AW1 T\n"
        "CUP K AH1 P\nCUP(1) K AH0 P\nvoila v w aa l aa # foreign\nBROKEN\n"
    )
    skipped = Skipped()
    assert read_cmudict(path, skipped) == {
        "about": (("ax", "b", "aw", "t"),),
        "cup": (("k", "ah", "p"), ("k", "ax", "p")),
        "voila": (("v", "w", "aa", "l", "aa"),),
    }
    assert skipped.counts == {"dictionary line without phones": 1}


def test_a_comment_of_cmudict_may_stand_alone_and_behind_blanks(tmp_path: Path):
    path = tmp_path / "cmudict"
    path.write_text("# of the year 1998\n\t # ours\nYES Y EH1 S\n")
    skipped = Skipped()
    assert read_cmudict(path, skipped) == {"yes": (("y", "eh", "s"),)}
    assert skipped.counts == {}


@pytest.mark.parametrize("word", ["<eps>", "#0", "<s>", "</S>"])
@pytest.mark.parametrize("read", [read_cmudict, read_kaldi])
def test_a_word_of_the_search_graph_is_left_out_and_counted(
    tmp_path: Path, read: Callable[[Path, Skipped], object], word: str
):
    path, skipped = tmp_path / "lexicon.txt", Skipped()
    path.write_text(f"yes Y EH1 S\n{word} N OW1\n")
    read(path, skipped)
    reason = "dictionary line with a name of the search graph"
    assert skipped.examples == {reason: [f"{path}:2: {word}"]}


def test_a_phone_that_is_nothing_but_stress_is_refused_with_its_line(tmp_path: Path):
    path = tmp_path / "cmudict"
    path.write_text("ABOUT AH0 B AW1 T\nPEU p 2\n")
    problem = r"cmudict:2: expected phones of CMUdict in 'PEU', got '2'"
    with pytest.raises(CorpusError, match=problem):
        read_cmudict(path, Skipped())


def test_letters_and_repairs_are_in_the_phones_of_ms_state():
    spelled = {phone for said in LETTERS.values() for phone in said.split()}
    repaired = {phone for _, phones in added() for phone in phones}
    assert (spelled | repaired) - {*SILENCE_PHONES} <= MS_STATE_PHONES


def test_a_word_without_phones_is_counted_with_its_line(dictionary: Path):
    skipped = Skipped()
    read_dictionary(dictionary, skipped)
    assert skipped.examples == {
        "dictionary line without phones": [f"{dictionary}:9: broken"]
    }


def test_a_dictionary_without_words_is_refused(tmp_path: Path):
    path = tmp_path / "empty"
    path.write_text("# nothing\n")
    with pytest.raises(CorpusError, match=r"empty: expected lines of `word phone"):
        read_dictionary(path, Skipped())


def test_noises_and_the_unknown_word_have_phones_of_silence(dictionary: Path):
    lexicon = build_lexicon(read_dictionary(dictionary, Skipped()))
    assert lexicon.pronunciations["[laughter]"] == (("lau",),)
    assert lexicon.pronunciations["<unk>"] == (("spn",),)
    assert lexicon.phones[:4] == ("sil", "spn", "nsn", "lau")
    assert lexicon.nonsilence_phones == ("ae", "ah", "b", "dh", "eh", "ey", "m")


def test_words_without_pronunciation_become_unknown(dictionary: Path):
    lexicon = build_lexicon(read_dictionary(dictionary, Skipped()))
    assert lexicon.known(("a", "ab-", "zu-", "zebra")) == ("a", "ab-", "<unk>", "<unk>")


def test_unknown_words_are_counted_with_file_and_line(dictionary: Path):
    lexicon = build_lexicon(read_dictionary(dictionary, Skipped()))
    words = ("a", "zebra", "zu-", "zebra")
    spoken = Utterance("u", Path("a.sph"), 0, 0.0, 1.0, words, "s", "x.text:3")
    unknown = count_unknown(lexicon, [spoken])
    assert unknown.counts == {"out-of-vocabulary words": 2, "broken-off words": 1}
    assert unknown.examples["broken-off words"] == ["'zu-' at x.text:3"]


def test_unknown_words_that_are_known_without_punctuation_are_told_apart():
    lexicon = build_lexicon({"ja": (("j", "a"),), "noise": (("n",),)})
    words = ("ja", "ja,", "„ja“", "(ja)", "ja!?", "nein,", "—", "[noise]", "<noise>")
    spoken = Utterance("u", Path("a.sph"), 0, 0.0, 1.0, words, "s", "text:3")
    unknown = count_unknown(lexicon, [spoken])
    reason = "words of the lexicon with punctuation"
    assert unknown.counts == {reason: 4, "out-of-vocabulary words": 3}
    assert unknown.examples[reason][0] == "'ja,' at text:3"
    assert unknown.remedies == {reason: "write the text without marks at words"}


def test_a_lexicon_survives_its_files(dictionary: Path, tmp_path: Path):
    lexicon = build_lexicon(read_dictionary(dictionary, Skipped()))
    write_lexicon(tmp_path, lexicon)
    assert read_lexicon(tmp_path) == lexicon


def test_a_phone_that_is_not_listed_is_refused(dictionary: Path, tmp_path: Path):
    write_lexicon(tmp_path, build_lexicon(read_dictionary(dictionary, Skipped())))
    path = tmp_path / "lexicon.txt"
    whole = path.read_text()
    for line in ("a xx", "a", ""):
        path.write_text(f"{line}\n{whole}")
        expected = (
            f"lexicon.txt:1: expected a word and phones of phones.txt, got {line!r}"
        )
        with pytest.raises(CorpusError, match=re.escape(expected)):
            read_lexicon(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"lexicon\.txt"):
        read_lexicon(tmp_path)
