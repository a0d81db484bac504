# ruff: noqa: RUF001  (IPA looks like other letters)
import random
from itertools import pairwise

import pytest

from recipes.generated import espeak, grammar, pronunciations
from recipes.generated.rules import PARTIAL_WORDS, TOPICS


@pytest.fixture(scope="module")
def sentences() -> list[list[str]]:
    rng = random.Random(3)
    topics = [grammar.topic_rules(topic) for topic in TOPICS]
    return [grammar.sentence(topics[k % len(topics)], rng) for k in range(3000)]


@pytest.fixture(scope="module")
def dictionary() -> dict[str, list[list[str]]]:
    entries: dict[str, list[list[str]]] = {}
    for line in pronunciations.dictionary():
        word, *phones = line.split()
        entries.setdefault(word, []).append(phones)
    return entries


def test_grammar_says_at_least_300_words(sentences):
    said = {word for tokens in sentences for word in tokens}
    assert len(said & set(grammar.vocabulary())) >= 300


def test_every_word_said_is_in_the_dictionary(sentences, dictionary):
    said = {
        grammar.laughed_word(word) or word for tokens in sentences for word in tokens
    }
    assert said - set(grammar.NOISES) <= set(dictionary)


def test_sentences_have_two_to_fourteen_words(sentences):
    lengths = {sum(t not in grammar.NOISES for t in tokens) for tokens in sentences}
    assert min(lengths) == 2
    assert max(lengths) == 14


def test_every_mark_of_disfluent_speech_occurs(sentences):
    said = {token for tokens in sentences for token in tokens}
    assert set(grammar.NOISES) <= said
    assert {"uh", "um", "uh-huh"} <= said
    assert any(grammar.is_partial(token) for token in said)
    assert any(grammar.laughed_word(token) for token in said)


def test_the_commonest_tenth_of_the_words_makes_half_of_the_speech(sentences):
    tokens = [token for sentence in sentences for token in sentence]
    counts = sorted((tokens.count(word) for word in set(tokens)), reverse=True)
    assert sum(counts[: len(counts) // 10]) > 0.5 * len(tokens)


def test_partial_words_are_words_of_the_grammar_broken_at_their_spelling():
    assert set(PARTIAL_WORDS) <= set(grammar.vocabulary())
    spelled = {
        token.replace("[", "").replace("]-", "") for token, _ in PARTIAL_WORDS.values()
    }
    assert spelled == set(PARTIAL_WORDS)


def test_partial_words_begin_as_their_whole_words_do(dictionary):
    for word, (token, _) in PARTIAL_WORDS.items():
        for phones in dictionary[token]:
            wholes = [whole[: len(phones)] for whole in dictionary[word]]
            assert phones in wholes


def test_dictionary_lists_no_pronunciation_twice():
    lines = pronunciations.dictionary()
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize(
    ("ipa", "phones"),
    [
        ("bˈɔːt", "b ao t"),
        ("tʃˈɪldɹən", "ch ih l d r ax n"),
        ("p_ˈiː_p_əl", "p iy p el"),
        ("dˈʊɹɹɪŋ", "d uh r ih ng"),
        ("fˈaɪɚ", "f ay er"),
    ],
)
def test_ipa_becomes_ms_state_phones(ipa, phones):
    assert pronunciations.phones_of_ipa(ipa) == tuple(phones.split())


def test_an_unknown_ipa_symbol_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match="ǂ"):
        pronunciations.phones_of_ipa("bǂt")


def test_a_voice_that_does_not_exist_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="xx-none"):
        espeak.speak("hello", voice="xx-none", rate=170, pitch=50)


def test_a_broken_word_is_shorter_than_the_whole():
    broken = pronunciations.spoken_partial("daughter", "en-us")
    lengths = [
        len(espeak.speak(text, voice="en-us+m1", rate=170, pitch=50))
        for text in (broken, "daughter")
    ]
    assert 0.1 * lengths[1] < lengths[0] < 0.9 * lengths[1]


def test_speech_begins_and_ends_without_silence():
    samples = espeak.speak("hello", voice="en-us+f1", rate=170, pitch=50)
    assert abs(samples[:1]) > 0.004
    assert abs(samples[-1:]) > 0.004
    assert 0.2 < len(samples) / espeak.SAMPLE_RATE < 1.0


def test_the_article_fits_the_word_after_it(sentences):
    pairs = [pair for tokens in sentences for pair in pairwise(tokens)]
    nouns = {after for before, after in pairs if before == "an"}
    assert nouns & {"office", "engine", "island"}
    assert not any(before == "a" and after == "office" for before, after in pairs)
