"""Stages `lexicon`, `lm` and `features`: what is known of words, and of sound."""

import math
from collections.abc import Iterable
from pathlib import Path

from lightning_adpsgd.asr.corpus import (
    CorpusError,
    Skipped,
    Utterance,
    find_tree,
    read_utterances,
)
from lightning_adpsgd.asr.lexicon import (
    SPECIAL_WORDS,
    UNKNOWN,
    Lexicon,
    build_lexicon,
    count_unknown,
    read_dictionary,
    read_lexicon,
    write_lexicon,
)
from lightning_adpsgd.asr.ngram import NgramModel, estimate, write_arpa
from lightning_adpsgd.asr.pruning import prune
from recipes.switchboard.pipeline import StageError
from recipes.switchboard.settings import Settings


def utterances(settings: Settings, split: str) -> list[Utterance]:
    """The utterances of one split, as `prepare` wrote them."""
    return read_utterances(settings.directory("prepare") / f"{split}.jsonl")


def lexicon(settings: Settings, output: Path) -> None:
    """Write the dictionary with the special words; say which words it lacks.

    Raises:
        StageError: The dictionary is missing or holds nothing.
    """
    path = find_tree(settings.corpus).dictionary
    if path is None:
        raise StageError(f"{settings.corpus}: expected sw-ms98-dict.text, it is gone")
    skipped = Skipped()
    try:
        words = build_lexicon(read_dictionary(path, skipped))
    except CorpusError as error:
        raise StageError(str(error)) from error
    write_lexicon(output, words)
    print(f"  {len(words.pronunciations)} words, {len(words.phones)} phones")
    for line in skipped.report():
        print(f"  WARNING: left out: {line}")
    for split in settings.splits():
        for line in count_unknown(words, utterances(settings, split)).report():
            print(f"  WARNING: {split}: taken as {UNKNOWN}: {line}", flush=True)


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
