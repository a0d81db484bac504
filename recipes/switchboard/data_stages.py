"""Stages `lexicon`, `lm` and `features`: what is known of words, and of sound."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lightning_adpsgd.asr.corpora.acronyms import pronounce_letters
from lightning_adpsgd.asr.corpora.corpus import (
    CorpusError,
    Skipped,
    Utterance,
    read_utterances,
)
from lightning_adpsgd.asr.language.lexicon import (
    SPECIAL_WORDS,
    UNKNOWN,
    Dictionary,
    Lexicon,
    Pronunciation,
    build_lexicon,
    count_unknown,
    find_missing,
    read_cmudict,
    read_dictionary,
    read_lexicon,
    write_lexicon,
)
from lightning_adpsgd.asr.language.ngram import NgramModel, estimate, write_arpa
from lightning_adpsgd.asr.language.pruning import prune
from recipes.switchboard.check_stage import discs_of, say
from recipes.switchboard.pipeline import StageError
from recipes.switchboard.settings import Settings


def utterances(settings: Settings, split: str) -> list[Utterance]:
    """The utterances of one split, as `prepare` wrote them."""
    return read_utterances(settings.directory("prepare") / f"{split}.jsonl")


def lexicon(settings: Settings, output: Path) -> None:
    """Write the dictionary with the special words; say which words it lacks.

    Raises:
        StageError: A dictionary is missing or holds nothing.
    """
    skipped = Skipped()
    complete_lexicon(settings, output, _dictionary(settings, skipped), skipped)


def complete_lexicon(
    settings: Settings,
    output: Path,
    dictionary: Dictionary,
    skipped: Skipped,
    default: Path | None = None,
) -> None:
    """Write a dictionary with the words of the training that it lacks.

    Args:
        settings: Name the other places where pronunciations are looked for.
        output: Folder of the lexicon.
        dictionary: What comes first.
        skipped: Gets lines that cannot be read.
        default: A dictionary in CMUdict's form, if `lexicon.cmudict` is not set.

    Raises:
        StageError: The other dictionary cannot be read, or most words have no
            pronunciation.
    """
    spoken = utterances(settings, "train")
    for how, more in _more(settings, default, skipped):
        missing = find_missing(dictionary, spoken)
        found = {word: said for word in missing if (said := more(word, missing[word]))}
        dictionary |= found
        if found:
            print(f"  {len(found)} of {len(missing)} missing words {how}")
    words = build_lexicon(dict(sorted(dictionary.items())))
    _check_language(words, spoken)
    write_lexicon(output, words)
    say_lexicon(settings, words, skipped)


def _check_language(words: Lexicon, spoken: Iterable[Utterance]) -> None:
    """Refuses a lexicon that lacks most of what is said."""
    said = Counter(word for utterance in spoken for word in utterance.words)
    missing = Counter({word: said[word] for word in said if word not in words})
    if missing.total() > said.total() / 2:
        (word, count), *_ = missing.most_common(1)
        raise StageError(
            f"{missing.total()} of {said.total()} words of the training transcripts "
            f"have no pronunciation, {word!r} {count} times: the dictionary must be "
            "that of the corpus; `lexicon.cmudict` names another one, "
            "`lexicon.synthesise=true` lets eSpeak pronounce them"
        )


def _dictionary(settings: Settings, skipped: Skipped) -> Dictionary:
    path = discs_of(settings, Skipped()).dictionary
    if path is None:
        raise StageError(f"{settings.corpus}: expected sw-ms98-dict.text, it is gone")
    try:
        return read_dictionary(path, skipped, repair=settings.lexicon.repair)
    except CorpusError as error:
        raise StageError(str(error)) from error


Pronouncer = Callable[[str, int], tuple[Pronunciation, ...]]
"""From a word and how often it is heard to its pronunciations, none if unknown."""


def _more(
    settings: Settings, default: Path | None, skipped: Skipped
) -> Iterator[tuple[str, Pronouncer]]:
    """How words that the dictionary lacks get their pronunciations, in this order."""
    yield (
        "are spelled out",
        lambda word, _: tuple(filter(None, [pronounce_letters(word)])),
    )
    path = settings.lexicon.cmudict or default
    if path is not None:
        try:
            other = read_cmudict(path, skipped)
        except CorpusError as error:
            raise StageError(f"`lexicon.cmudict`: {error}") from error
        yield f"are in {path.name}", lambda word, _: other.get(word, ())
    if settings.lexicon.synthesise:
        yield "are pronounced by eSpeak", synthesiser(settings.lexicon.min_count)


def synthesiser(min_count: int) -> Pronouncer:
    """eSpeak's pronunciations of words that are heard at least `min_count` times."""
    # only here, since it loads the package espeakng-loader
    from recipes.generated.pronunciations import pronounce

    def said(word: str, count: int) -> tuple[Pronunciation, ...]:
        if count < min_count or not word.replace("'", "").replace("-", "").isalpha():
            return ()
        try:
            return tuple(pronounce(word))
        except ValueError:  # a sound that MS-State's phones do not have
            return ()

    return said


def say_lexicon(settings: Settings, words: Lexicon, skipped: Skipped) -> None:
    """Print the size of the lexicon and the words that splits have and it has not."""
    lines = [f"{len(words.pronunciations)} words, {len(words.phones)} phones"]
    lines += [f"WARNING: left out: {line}" for line in skipped.report()]
    for split in settings.splits():
        unknown = count_unknown(words, utterances(settings, split)).report()
        lines += [f"WARNING: {split}: taken as {UNKNOWN}: {line}" for line in unknown]
    say(lines)


def lm(settings: Settings, output: Path) -> None:
    """Write ARPA models of the training transcripts over all words of the lexicon.

    `lm.arpa` is for the search graph; `large.arpa`, if it is asked for, for weighing
    what the search has found.
    """
    words = read_lexicon(settings.directory("lexicon"))
    spoken = _sentences(words, utterances(settings, "train"))
    held_out = _sentences(words, utterances(settings, "dev"))
    vocabulary = [w for w in words.pronunciations if w not in SPECIAL_WORDS]
    model = estimate(spoken, settings.lm.order, vocabulary)
    _say_model(model, held_out)
    if settings.lm.prune:
        model = prune(model, settings.lm.prune, spoken)
        _say_model(model, held_out, ", pruned")
    write_arpa(output / "lm.arpa", model)
    if settings.lm.large_order:
        large = estimate(spoken, settings.lm.large_order, vocabulary)
        _say_model(large, held_out, ", for n-best lists")
        write_arpa(output / "large.arpa", large)


def _say_model(
    model: NgramModel, held_out: list[tuple[str, ...]], kind: str = ""
) -> None:
    print(
        f"  {len(model.log10_probabilities)} n-grams up to {model.order} words{kind}, "
        f"perplexity on held-out speakers {perplexity(model, held_out):.0f}",
        flush=True,
    )


def _sentences(words: Lexicon, spoken: Iterable[Utterance]) -> list[tuple[str, ...]]:
    return [words.known(utterance.words) for utterance in spoken]


def perplexity(model: NgramModel, sentences: Iterable[tuple[str, ...]]) -> float:
    """Of the words that the model knows and of the ends of sentences."""
    logs = []
    for sentence in sentences:
        history = ("<s>",)
        for word in (*sentence, "</s>"):
            if (word,) in model.log10_probabilities:
                logs.append(model.log10_probability(word, history))
            history = (*history, word)
    return 10 ** (-math.fsum(logs) / len(logs)) if logs else math.nan
