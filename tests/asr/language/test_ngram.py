"""The language model is a distribution, and Kneser-Ney's in a case done by hand."""

import itertools
import math
import random
from pathlib import Path

import kaldilm
import pytest

from lightning_adpsgd.asr.language.arpa import check_arpa
from lightning_adpsgd.asr.language.ngram import estimate, read_arpa, write_arpa

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]


def _sentences(number: int, seed: int = 0) -> list[list[str]]:
    draw = random.Random(seed)
    weights = [2.0**-i for i in range(len(WORDS))]
    return [draw.choices(WORDS, weights, k=draw.randrange(0, 7)) for _ in range(number)]


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [1, 3, 40, 400])
def test_probabilities_sum_to_one_after_every_history(order: int, number: int):
    model = estimate(_sentences(number), order, vocabulary=[*WORDS, "never"])
    for length in range(order):
        for history in itertools.product(
            ["<s>", "a", "c", "h", "never"], repeat=length
        ):
            total = sum(
                10 ** model.log10_probability(w, history)
                for w in [*WORDS, "never", "</s>"]
            )
            assert total == pytest.approx(1.0, abs=1e-9)


def test_a_bigram_model_done_by_hand():
    # Bigrams: <s> a 2, a b 1, a </s> 1, b </s> 1. Counts of counts n1 = 3, n2 = 1, so
    # D = 3/5. Left neighbours: a 1, b 1, </s> 2; n1 = 2, n2 = 1, D = 1/2.
    model = estimate([["a", "b"], ["a"]], order=2)
    uniform = 1 / 3
    gamma = (0.5 + 0.5 + 0.5) / 4
    p_b, p_end = 0.5 / 4 + gamma * uniform, 1.5 / 4 + gamma * uniform
    gamma_a = (0.6 + 0.6) / 2

    def probability(word: str, *history: str) -> float:
        return 10 ** model.log10_probability(word, history)

    assert probability("b") == pytest.approx(p_b)
    assert probability("b", "a") == pytest.approx(0.4 / 2 + gamma_a * p_b)
    assert probability("</s>", "a") == pytest.approx(0.4 / 2 + gamma_a * p_end)
    assert 10 ** model.log10_backoffs[("a",)] == pytest.approx(gamma_a)
    # "b b" was never seen: back off
    assert probability("b", "b") == pytest.approx(0.6 * p_b)


def test_words_seen_in_few_contexts_are_rare_when_backing_off():
    # Kneser-Ney's idea: "francisco" is frequent, yet only ever after "san".
    sentences = [["san", "francisco"]] * 50
    sentences += [[left, "house"] for left in WORDS]
    model = estimate(sentences, order=2)
    assert model.log10_probability("house", ("zoo",)) > (
        model.log10_probability("francisco", ("zoo",)) + math.log10(4)
    )


def test_a_word_that_was_heard_more_is_likelier():
    model = estimate(_sentences(400), order=3)
    assert model.log10_probability("a", ("b",)) > model.log10_probability("g", ("b",))


def test_a_larger_order_fits_the_sentences_better():
    sentences = [["a", "b", "c", "d"], ["b", "a", "d", "c"]] * 5

    def fit(order: int) -> float:
        model = estimate(sentences, order)
        words = ["<s>", *sentences[0], "</s>"]
        return sum(
            model.log10_probability(word, tuple(words[:i]))
            for i, word in enumerate(words[1:], start=1)
        )

    assert fit(1) < fit(2) < fit(3)


def test_silent_utterances_alone_still_give_a_model():
    model = estimate([[], []], order=3, vocabulary=["a"])
    end = model.log10_probability("</s>", ("<s>",))
    assert end > model.log10_probability("a", ("<s>",))


def test_no_sentence_is_refused():
    with pytest.raises(ValueError, match="must have at least one"):
        estimate([], order=2)


def test_an_order_below_one_is_refused():
    with pytest.raises(ValueError, match="`order` must be at least 1, got 0"):
        estimate([["a"]], order=0)


def test_a_sentence_with_the_mark_of_its_end_is_refused():
    with pytest.raises(ValueError, match="sentence 2 must not contain"):
        estimate([["a"], ["</s>"]])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_arpa_file_says_what_the_model_says(tmp_path: Path, order: int):
    model = estimate(_sentences(40), order)
    write_arpa(tmp_path / "lm.arpa", model)
    rows = [
        line.split("\t")
        for line in (tmp_path / "lm.arpa").read_text().splitlines()
        if "\t" in line
    ]
    found = {tuple(row[1].split()): float(row[0]) for row in rows}
    assert found == pytest.approx(model.log10_probabilities, abs=1e-6)
    backoffs = {tuple(row[1].split()): float(row[2]) for row in rows if len(row) > 2}
    assert backoffs == pytest.approx(model.log10_backoffs, abs=1e-6)


def test_kaldis_arpa_reader_takes_the_file(tmp_path: Path):
    write_arpa(tmp_path / "lm.arpa", estimate(_sentences(40), 3, [*WORDS, "never"]))
    words = ["<eps>", *WORDS, "never", "#0", "<s>", "</s>"]
    symbols = "".join(f"{word} {i}\n" for i, word in enumerate(words))
    (tmp_path / "words.txt").write_text(symbols)
    graph = kaldilm.arpa2fst(
        input_arpa=str(tmp_path / "lm.arpa"),
        read_symbol_table=str(tmp_path / "words.txt"),
        disambig_symbol="#0",
        max_order=3,
    )
    arcs = [line.split() for line in graph.splitlines()]
    assert {arc[2] for arc in arcs if len(arc) > 3} >= {
        str(words.index(w)) for w in [*WORDS, "never"]
    }


def test_a_byte_order_mark_is_no_part_of_a_model_but_kaldilm_is_spared_it(
    tmp_path: Path,
):
    path = tmp_path / "lm.arpa"
    write_arpa(path, estimate(_sentences(40), 2))
    expected = read_arpa(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_arpa(path) == expected
    # It ends the whole process.
    with pytest.raises(ValueError, match=r"lm\.arpa:1: expected no byte order mark"):
        check_arpa(path)


def test_a_model_that_is_not_utf_8_is_named_with_the_line(tmp_path: Path):
    path = tmp_path / "lm.arpa"
    write_arpa(path, estimate([["a", "grün"]], 1))
    text = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="latin-1")
    line = text[: text.index("ü")].count("\n") + 1
    for read in (read_arpa, check_arpa):
        with pytest.raises(ValueError, match=rf"lm\.arpa:{line}: expected UTF-8"):
            read(path)


def _with(path: Path, old: str, new: str) -> None:
    """Changes an ARPA file of bigrams over one word in one place."""
    write_arpa(path, estimate([["yes"]], 2))
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


WRONG = {
    "-99.000000\t<s>": [("nan\t<s>", "'nan' is not a number")],
    "\n\\2-grams:": [
        ("\n\\3-grams:", r"expected \\2-grams:, got '\\\\3-grams:'"),
        ("\n\\1-grams:", r"expected \\2-grams:, got '\\\\1-grams:'"),
        ("0.5 yes\n\\2-grams:", "expected a log10 probability, at most 0, got '0.5'"),
    ],
    "\\end\\": [("\\3-grams:\n\\end\\", r"expected \\end\\, got '\\\\3-grams:'")],
}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [(old, *change) for old, changes in WRONG.items() for change in changes],
)
def test_what_is_no_model_is_named_with_the_line(
    tmp_path: Path, old: str, new: str, problem: str
):
    path = tmp_path / "lm.arpa"
    _with(path, old, new)
    for read in (read_arpa, check_arpa):
        with pytest.raises(ValueError, match=rf"lm\.arpa:\d+: {problem}"):
            read(path)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("-99.000000\t<s>", "-inf\t<s>", "expected -99 for none, got '-inf'"),
        ("\tyes </s>", "\tyes </s>\t0", "no back-off weight of the longest n-grams"),
    ],
)
def test_kaldilm_is_spared_what_would_end_the_process(
    tmp_path: Path, old: str, new: str, problem: str
):
    path = tmp_path / "lm.arpa"
    _with(path, old, new)
    assert read_arpa(path).order == 2
    with pytest.raises(ValueError, match=rf"lm\.arpa:\d+: .*{problem}"):
        check_arpa(path)
