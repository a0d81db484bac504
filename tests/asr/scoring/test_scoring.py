import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_adpsgd.asr.corpora.acronyms import letters_of
from lightning_adpsgd.asr.scoring import (
    NO_RULES,
    Errors,
    Glm,
    Scores,
    ScoringError,
    read_glm,
    score,
    score_files,
)
from lightning_adpsgd.asr.scoring.glm import Rule
from lightning_adpsgd.asr.scoring.nist import NistError, find_hubscr, run_hubscr
from lightning_adpsgd.asr.scoring.reports import confusions, table
from lightning_adpsgd.asr.scoring.utterances import reference_text, written_words

RULES = """;; a comment [a] => [b]
* name "test"
* case_sensitive = "F"
[OKAY] => [ok] / [ ] __ [ ]
GONNA => GOING TO ;; inside words too
[read] => [red] / [have ] __ [ ]
;; INPUT_DEPENDENT_APPLICATION = "hyp"
[he's] => [{he is / he has}] / [ ] __ [ ]
"""

words = st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=6)


@pytest.fixture
def glm(tmp_path: Path) -> Glm:
    path = tmp_path / "rules.glm"
    path.write_text(RULES)
    return read_glm(path)


def scores_of(folder: Path, stm: str, ctm: str, glm: Glm | None = NO_RULES) -> Scores:
    (folder / "ref.stm").write_text(stm)
    (folder / "hyp.ctm").write_text(ctm)
    return score_files(folder / "ref.stm", folder / "hyp.ctm", glm)


def errors_of(folder: Path, reference: str, hypothesis: str, glm: Glm = NO_RULES):
    ctm = "".join(f"f A {t} 1 {word}\n" for t, word in enumerate(hypothesis.split()))
    return scores_of(folder, f"f A s 0 9 <o> {reference}\n", ctm, glm).total


def least_cost(one: list[str], other: list[str]) -> int:
    row = [3 * j for j in range(len(other) + 1)]
    for i, mine in enumerate(one, start=1):
        last, row[0] = row[0], 3 * i
        for j, its in enumerate(other, start=1):
            match = last + 4 * (mine != its)
            last, row[j] = row[j], min(row[j] + 3, row[j - 1] + 3, match)
    return row[-1]


@given(words, words)
def test_the_alignment_has_the_least_cost(reference, hypothesis):
    errors = score({"u": reference}, {"u": hypothesis})
    unaligned = errors.deletions + errors.insertions
    assert 4 * errors.substitutions + 3 * unaligned == least_cost(reference, hypothesis)
    assert errors.num_words == len(reference)
    assert errors.deletions - errors.insertions == len(reference) - len(hypothesis)


def test_substitutions_deletions_and_insertions_are_told_apart(tmp_path):
    assert errors_of(tmp_path, "a b c", "a x c") == Errors(3, 1, 0, 0, 1, 1)
    assert errors_of(tmp_path, "a b c", "a c") == Errors(3, 0, 1, 0, 1, 1)
    assert errors_of(tmp_path, "a b c", "a b x c") == Errors(3, 0, 0, 1, 1, 1)


def test_word_error_rate_can_exceed_one():
    assert score({"u": ["a"]}, {"u": ["b", "c", "d"]}).wer == 3.0


def test_an_optional_word_may_be_missing_and_counts_as_correct(tmp_path):
    assert errors_of(tmp_path, "(uh) a (b c) d", "a d") == Errors(5, 0, 0, 0, 1, 0)
    assert errors_of(tmp_path, "(uh) a", "x a").substitutions == 1


def test_a_broken_off_word_matches_what_it_begins(tmp_path):
    assert errors_of(tmp_path, "dog- -ing", "doggie going").num_errors == 0
    assert errors_of(tmp_path, "dog- -ing", "do in").substitutions == 2


def test_of_alternatives_any_is_right_and_nothing_is_no_word(tmp_path):
    reference = "{ i'm / i am / @ } here"
    for hypothesis, num_words in (("i'm here", 2), ("i am here", 3), ("here", 1)):
        assert errors_of(tmp_path, reference, hypothesis) == Errors(
            num_words, 0, 0, 0, 1, 0
        )


def test_hyphens_part_words_on_both_sides(tmp_path):
    assert errors_of(tmp_path, "cat-fish a-", "cat fish a-") == Errors(3, 0, 0, 0, 1, 0)


def test_rules_bring_both_sides_to_one_spelling(tmp_path, glm):
    assert errors_of(tmp_path, "OKAY", "ok", glm).num_errors == 0
    assert errors_of(tmp_path, "going to", "gonna", glm) == Errors(2, 0, 0, 0, 1, 0)


def test_a_rule_with_a_context_needs_it(tmp_path, glm):
    assert errors_of(tmp_path, "have read", "have red", glm).num_errors == 0
    assert errors_of(tmp_path, "will read", "will red", glm).num_errors == 1


def test_a_rule_for_hypotheses_leaves_references_alone(tmp_path, glm):
    assert errors_of(tmp_path, "he has", "he's", glm).num_errors == 0
    assert errors_of(tmp_path, "he's", "he has", glm).num_errors == 2


def test_rules_are_read_with_their_contexts(glm):
    assert glm.reference.rules == (
        Rule("OKAY", "ok", " ", " "),
        Rule("GONNA", "GOING TO"),
        Rule("read", "red", "have ", " "),
    )
    assert glm.hypothesis.rules[3] == Rule("he's", "{he is / he has}", " ", " ")


@pytest.mark.parametrize(
    "line", ["okay", "* name without quotes", "* format = 'NIST2'", " ;; indented"]
)
def test_a_malformed_rule_is_named_with_its_line(tmp_path, line):
    path = tmp_path / "bad.glm"
    path.write_text(f";; first line\n{line}\n")
    with pytest.raises(ScoringError, match=r"bad\.glm:2"):
        read_glm(path)


STM = """;; a comment
f A s1 0.0 1.0 <o> a
f A s1 2.0 3.0 <o> IGNORE_TIME_SEGMENT_IN_SCORING
f A s2 3.0 4.0 <o> b
f B s3 0.0 1.0 <o> c
"""


def test_a_word_goes_to_the_first_segment_that_ends_after_its_middle(tmp_path):
    ctm = "f A 0.8 0.3 a\nf A 1.5 0.2 x\nf A 2.9 0.2 b\nf A 9 1 y\n"
    scores = scores_of(tmp_path, STM, ctm)
    assert scores.by_speaker == {
        "s1": Errors(1, 0, 0, 0, 1, 0),  # x fell to the ignored segment
        "s2": Errors(1, 0, 0, 1, 1, 1),  # y after all segments to the last one
        "s3": Errors(1, 0, 1, 0, 1, 1),
    }


def test_a_word_whose_middle_is_the_end_of_a_segment_is_in_the_next(tmp_path):
    ctm = "f A 0.9 0.2 a\nf A 3.5 0.1 b\nf B 0.1 0.1 c\n"
    assert scores_of(tmp_path, STM, ctm).by_speaker["s1"].deletions == 1


def test_a_choice_lies_where_the_last_of_its_words_does(tmp_path, glm):
    stm = "f A s1 0 1 <o> a\nf A s2 1 4 <o> he is\n"
    # the middle of he's is 0.95, but that of `is` is 1.025
    scores = scores_of(tmp_path, stm, "f A 0.8 0.3 he's\n", glm)
    assert scores.by_speaker["s1"] == Errors(1, 0, 1, 0, 1, 1)
    assert scores.by_speaker["s2"] == Errors(2, 0, 0, 0, 1, 0)


def test_an_open_choice_of_a_hypothesis_is_named(tmp_path):
    ctm = "f A * * <ALT_BEGIN>\nf A 0.1 0.2 x\n"
    with pytest.raises(ScoringError, match=r"hyp\.ctm:1: <ALT_BEGIN>"):
        scores_of(tmp_path, "f A s 0 1 <o> a\n", ctm, None)


@pytest.mark.parametrize(
    ("stm", "ctm", "where"),
    [
        ("f A s 0 1 <o> { a / b\n", "", r"ref\.stm:1: .*not closed"),
        ("\nf A s 0 1 <o> {  }\n", "", r"ref\.stm:2: .*no word"),
        ("f A s 0 1 <o> ((a)\n", "", r"ref\.stm:1: parentheses"),
        ("f A s 0 x <o> a\n", "", r"ref\.stm:1: .*'x'"),
        ("f A s 0\n", "", r"ref\.stm:1: too few"),
        ("f A s 0 1 a\n", "f A 0 1\n", r"hyp\.ctm:1: expected"),
        ("f A s 0 1 a\n", "f A zero 1 a\n", r"hyp\.ctm:1: .*'zero'"),
        ("f A s 0 1 a\n", "f B 0 1 a\n", "file 'f', channel 'b'"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, stm, ctm, where):
    with pytest.raises(ScoringError, match=where):
        scores_of(tmp_path, stm, ctm)


def test_a_length_of_a_word_that_a_rule_parts_is_named_if_it_is_no_number(
    tmp_path, glm
):
    with pytest.raises(ScoringError, match=r"hyp\.ctm:1: expected a time.*'long'"):
        scores_of(tmp_path, "f A s 0 1 <o> a\n", "f A 0 long gonna\n", glm)


def test_noises_and_hesitations_count_on_neither_side_in_hub5():
    reference = ["uh", "so", "[laughter]", "i", "wa-", "want", "<unk>"]
    hypothesis = ["so", "um", "i", "[noise]", "want", "[vocalized-noise]"]
    errors = score({"u": reference}, {"u": hypothesis}, glm=NO_RULES)
    assert errors.num_errors == 0
    assert errors.num_words == 5  # those that may be missing count as correct


@pytest.mark.parametrize("glm", [None, NO_RULES])
def test_noises_of_kaldis_other_recipes_are_no_insertions(glm):
    """WSJ's and LibriSpeech's graphs write them, and their recipes leave them out."""
    heard = ["<NOISE>", "YES", "<SPOKEN_NOISE>", "<UNK>"]
    assert score({"u": ["yes"]}, {"u": heard}, glm=glm).num_errors == 0


def test_an_acronym_of_the_lexicon_is_written_as_its_letters():
    assert written_words("u._s.") == ["u", "s"]
    assert written_words("uh", NO_RULES) == written_words("[noise]", NO_RULES) == []


def test_letters_are_told_apart_alike_in_references_and_hypotheses():
    """Decoding leaves the letters of what was recognised: `u`, `s`, `c`, `d's`."""
    said = ("the", "u.", "S.", "won", "c._d.s", "i._b._m.'s", "mr.", "uh-huh")
    heard = [letter for word in said for letter in letters_of(word.lower())]
    apart = "the u s won c d's i b m's mr. uh-huh"
    assert " ".join(reference_text(said)) == apart
    assert score({"u": said}, {"u": heard}) == Errors(11, 0, 0, 0, 1, 0)
    assert score({"u": said}, {"u": heard}, glm=NO_RULES).num_errors == 0


@pytest.mark.parametrize("glm", [None, NO_RULES])
def test_a_word_in_another_unicode_form_is_no_error(glm):
    forms = {"u": ["caf\xe9", "e\u0301t\xe9", "q\u0307\u0323"]}
    others = {"u": ["cafe\u0301", "\xe9te\u0301", "q\u0323\u0307"]}
    assert score(forms, others, glm=glm).num_errors == 0


def test_outside_of_hub5_only_noises_count_on_neither_side():
    """In German `er`, `um` and `ach` are words, and `Vor-` is one of its spellings."""
    reference = ["er", "geht", "um", "acht", "[noise]", "Vor-", "und", "(ach)", "nach"]
    without = ["geht", "acht", "vorlesung", "und", "nach", "<unk>"]
    assert score({"u": reference}, {"u": reference}) == Errors(8, 0, 0, 0, 1, 0)
    assert score({"u": reference}, {"u": without}) == Errors(8, 1, 3, 0, 1, 1)
    assert score({"u": ["er"]}, {"u": ["er", "um", "-"]}).insertions == 2
    assert score({"u": ["über"]}, {"u": ["ÜBER"]}).num_errors == 0
    assert written_words("uh") == ["uh"]
    assert written_words("[noise]") == []


@pytest.mark.parametrize(
    ("said", "heard", "wrong"),
    [
        ("{laugh} yes", "{laugh} yes", 0),
        ("{left-brace yes", "{left-brace yes", 0),
        ("a{b (uh)", "a{b (uh)", 0),
        ("c* yes", "c yes", 1),
        ("a;b yes", "a;c yes", 1),
        ("a\\b", "ab", 1),
        ("mail @ home", "mail @ home", 0),
        ("mail @ home", "mail home", 1),
        ("<alt_begin> yes", "<alt_begin> yes", 0),
    ],
)
def test_outside_of_hub5_no_mark_has_a_meaning(said: str, heard: str, wrong: int):
    reference, hypothesis = said.split(), heard.split()
    errors = score({"u": reference}, {"u": hypothesis})
    assert errors.num_words == len(reference)
    assert errors.num_errors == wrong


def test_errors_of_utterances_add_up():
    references = {"u1": ["a", "b"], "u2": ["c"]}
    hypotheses = {"u1": ["a"], "u2": ["d"]}
    assert score(references, hypotheses) == Errors(3, 1, 1, 0, 2, 2)


def test_an_utterance_without_hypothesis_is_deleted():
    errors = score({"u1": ["a", "b"], "u2": ["c"]}, {"u2": ["c"]})
    assert errors == Errors(3, 0, 2, 0, 2, 1)


def test_an_empty_reference_is_refused_with_its_line():
    with pytest.raises(ScoringError, match=r"ref\.stm:7"):
        score({"u1": []}, {}, sources={"u1": "ref.stm:7"})


@pytest.mark.parametrize("words", [["a", "(b"], ["{a", "b"], ["a{b"]])
def test_a_bracket_that_is_not_closed_is_refused_with_its_line(words):
    with pytest.raises(ScoringError, match=r"ref\.stm:7: (the alt|an alt|parenth)"):
        score({"u0": ["a"], "u1": words}, {}, glm=NO_RULES, sources={"u1": "ref.stm:7"})
    assert score({"u1": words}, {"u1": words}).wer == 0


def test_a_bracket_that_the_scorer_does_not_read_is_no_error():
    ignored = ["{", "IGNORE_TIME_SEGMENT_IN_SCORING"]
    assert score({"u0": ["a"], "u1": ignored}, {"u0": ["a"]}, glm=NO_RULES).wer == 0


def test_references_without_a_word_that_counts_are_refused():
    with pytest.raises(ScoringError, match="1 references"):
        score({"u1": ["[noise]"]}, {"u1": ["a"]})


def test_a_hypothesis_of_no_reference_is_refused_by_name():
    with pytest.raises(ScoringError, match="u9"):
        score({"u1": ["a"]}, {"u9": ["a"]})


def test_without_reference_words_the_rate_is_not_a_number():
    assert math.isnan(Errors().wer)


def test_the_table_has_percents_and_counts_where_there_are_no_words():
    rows = {"SWB": Errors(200, 10, 4, 6, 20, 5), "CH": Errors(0, 0, 0, 2, 1, 1)}
    lines = table("system", rows).split("\n")
    percents = ["93.0", "5.0", "2.0", "3.0", "10.0", "25.0"]
    assert lines[5].split() == ["|", "SWB", "|", "20", "200", "|", *percents, "|"]
    assert lines[6].split()[6:12] == ["0*", "0*", "0*", "2*", "2*", "100.0"]


def test_confusions_are_ranked_by_how_often_they_occur(tmp_path):
    stm = "f A s 0 1 <o> a b a\nf A s 1 2 <o> a d\n"
    ctm = "f A 0 .1 x\nf A .1 .1 b\nf A .2 .1 x\nf A 1.1 .1 x\nf A 1.2 .1 e\n"
    text = confusions(scores_of(tmp_path, stm, ctm))
    assert text.split("\n")[:3] == [
        "CONFUSION PAIRS: 4 (2 different)",
        "     3  a ==> x",
        "     1  d ==> e",
    ]


def test_a_failure_of_hubscr_is_reported_with_what_it_said(tmp_path):
    hubscr = tmp_path / "hubscr.pl"
    hubscr.write_text("#!/bin/sh\necho no such disc\nexit 3\n")
    hubscr.chmod(0o755)
    (tmp_path / "h.ctm").write_text("")
    with pytest.raises(NistError, match=r"failed \(3\): no such disc"):
        run_hubscr(hubscr, tmp_path / "r.stm", tmp_path / "h.ctm", None)


def test_hubscr_is_found_on_the_path(tmp_path, monkeypatch):
    hubscr = tmp_path / "hubscr.pl"
    hubscr.write_text("#!/bin/sh\n")
    hubscr.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_hubscr() == hubscr
