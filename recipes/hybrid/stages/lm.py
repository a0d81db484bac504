"""Stage `lm`: the n-gram language models of the training transcripts."""

import math
from collections.abc import Iterable
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import Utterance
from lightning_adpsgd.asr.language.lexicon import SPECIAL_WORDS, Lexicon, read_lexicon
from lightning_adpsgd.asr.language.ngram import NgramModel, estimate, write_arpa
from lightning_adpsgd.asr.language.pruning import prune
from recipes.hybrid.data.splits import utterances
from recipes.hybrid.pipeline.settings import Settings


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
    """The perplexity of the words that the model knows and of the ends of sentences."""
    logs = []
    for sentence in sentences:
        history = ("<s>",)
        for word in (*sentence, "</s>"):
            if (word,) in model.log10_probabilities:
                logs.append(model.log10_probability(word, history))
            history = (*history, word)
    return 10 ** (-math.fsum(logs) / len(logs)) if logs else math.nan
