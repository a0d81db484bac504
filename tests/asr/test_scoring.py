import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_adpsgd.asr.scoring import (
    NO_RULES,
    Errors,
    Glm,
    ScoringError,
    count_errors,
    read_glm,
    score,
    scored_words,
)

RULES = """;; a comment [a] => [b]
* name "test"
[OKAY] => [ok] / [ ] __ [ ]
[i'm] => {i'm / [i am]} / [ ] __ [ ]
[all right] => [alright] / [ ] __ [ ]
[all] => [everything] / [ ] __ [ ]
[gonna] => [going to] / [ ] __ [ ]
[uhhuh] => [%hesitation] / [ ] __ [ ]
[read] => [red] / [have] __ [ ]
"""

words = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=6)


@pytest.fixture
def glm(tmp_path) -> Glm:
    path = tmp_path / "rules.glm"
    path.write_text(RULES)
    return read_glm(path)


def edit_distance(one: list[str], other: list[str]) -> int:
    row = list(range(len(other) + 1))
    for i, mine in enumerate(one, start=1):
        last, row[0] = row[0], i
        for j, its in enumerate(other, start=1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (mine != its))
    return row[-1]


@given(words, words)
def test_errors_are_the_edit_distance(reference, hypothesis):
    errors = count_errors(reference, hypothesis)
    assert errors.num_words == len(reference)
    assert sum(errors[1:]) == edit_distance(reference, hypothesis)


def test_substitutions_deletions_and_insertions_are_told_apart():
    assert count_errors(["a", "b", "c"], ["a", "x", "c"]) == Errors(3, 1, 0, 0)
    assert count_errors(["a", "b", "c"], ["a", "c"]) == Errors(3, 0, 1, 0)
    assert count_errors(["a", "b", "c"], ["a", "b", "x", "c"]) == Errors(3, 0, 0, 1)


def test_word_error_rate_can_exceed_one():
    assert count_errors(["a"], ["b", "c", "d"]).wer == 3.0


def test_noises_hesitations_and_broken_words_count_on_neither_side():
    reference = ["uh", "so", "[laughter]", "i", "wa-", "want", "<unk>"]
    hypothesis = ["so", "um", "i", "[noise]", "want", "[vocalized-noise]"]
    assert scored_words(reference) == ("so", "i", "want")
    assert count_errors(reference, hypothesis) == Errors(3, 0, 0, 0)


def test_case_does_not_matter():
    assert count_errors(["YES"], ["yes"]) == Errors(1, 0, 0, 0)


def test_rules_bring_both_sides_to_one_spelling(glm):
    assert count_errors(["okay"], ["ok"], glm) == Errors(1, 0, 0, 0)
    assert count_errors(["going", "to"], ["gonna"], glm) == Errors(2, 0, 0, 0)


def test_either_alternative_is_right(glm):
    for hypothesis in ("i'm here", "i am here"):
        errors = count_errors(["i'm", "here"], hypothesis.split(), glm)
        assert sum(errors[1:]) == 0


def test_the_longest_rule_applies(glm):
    assert glm.variants(["all", "right"]) == [("alright",)]
    assert glm.variants(["all", "wrong"]) == [("everything", "wrong")]


def test_what_a_rule_makes_a_hesitation_does_not_count(glm):
    assert count_errors(["uhhuh", "yes"], ["yes"], glm) == Errors(1, 0, 0, 0)


def test_rules_with_a_context_are_counted_and_left_out(glm):
    assert glm.num_skipped == 1
    assert glm.variants(["have", "read"]) == [("have", "read")]


def test_many_alternatives_stay_bounded(glm):
    assert len(glm.variants(["i'm"] * 200)) <= 64


@pytest.mark.parametrize("line", ["okay => ok", "[a] => {b / c / [ ] __ [ ]"])
def test_a_malformed_rule_is_named_with_its_line(tmp_path, line):
    path = tmp_path / "bad.glm"
    path.write_text(f";; first line\n{line}\n")
    with pytest.raises(ScoringError, match=r"bad\.glm:2"):
        read_glm(path)


def test_errors_of_utterances_add_up():
    references = {"u1": ["a", "b"], "u2": ["c"]}
    hypotheses = {"u1": ["a"], "u2": ["d"]}
    assert score(references, hypotheses) == Errors(3, 1, 1, 0)


def test_an_utterance_without_hypothesis_is_deleted():
    assert score({"u1": ["a", "b"], "u2": ["c"]}, {"u2": ["c"]}) == Errors(3, 0, 2, 0)


def test_an_empty_reference_is_refused_with_its_line():
    with pytest.raises(ScoringError, match=r"ref\.stm:7"):
        score({"u1": []}, {}, glm=NO_RULES, sources={"u1": "ref.stm:7"})


def test_references_without_a_word_that_counts_are_refused():
    with pytest.raises(ScoringError, match="1 references"):
        score({"u1": ["uh"]}, {"u1": ["a"]})


def test_a_hypothesis_of_no_reference_is_refused_by_name():
    with pytest.raises(ScoringError, match="u9"):
        score({"u1": ["a"]}, {"u9": ["a"]})


def test_without_reference_words_the_rate_is_not_a_number():
    assert math.isnan(Errors().wer)
