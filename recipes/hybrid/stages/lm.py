"""Stage `lm`: the n-gram language models of the training transcripts.

Sentences of a text (`lm.text`) and a model from elsewhere (`lm.arpa`) are mixed in,
with given weights or those with which `dev` is likeliest.
"""

import math
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import Utterance
from lightning_adpsgd.asr.corpora.utf8 import in_one_form, utf8_lines
from lightning_adpsgd.asr.language.interpolation import (
    in_lower_case,
    in_nfc,
    interpolate,
    likeliest_weights,
    restricted,
)
from lightning_adpsgd.asr.language.lexicon import SPECIAL_WORDS, Lexicon, read_lexicon
from lightning_adpsgd.asr.language.ngram import (
    BEGIN,
    END,
    NgramModel,
    estimate,
    read_arpa,
    write_arpa,
)
from lightning_adpsgd.asr.language.pruning import prune_to
from recipes.hybrid.data.splits import utterances
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError

Sentences = list[tuple[str, ...]]


def lm(settings: Settings, output: Path) -> None:
    """Write ARPA models of the training transcripts over all words of the lexicon.

    `lm.arpa` is for the search graph; `large.arpa`, if it is asked for, for weighing
    what the search has found.

    Raises:
        StageError: The text or the model from elsewhere cannot be used.
    """
    chosen, begin = settings.lm, time.monotonic()
    try:
        sources = _Sources(settings)
        model = sources.model(chosen.order)
        _say_model(model, sources.held_out)
        model = _pruned(settings, model, sources)
        write_arpa(output / "lm.arpa", model)
        if chosen.large_order:
            large = sources.model(chosen.large_order)
            _say_model(large, sources.held_out, ", for n-best lists")
            write_arpa(output / "large.arpa", large)
    except (ValueError, OSError) as error:
        raise StageError(f"`lm`: {error}") from error
    words = sum(map(len, sources.spoken))
    print(f"  {words} words in {time.monotonic() - begin:.0f} s", flush=True)


class _Sources:
    """The sentences and models that there are."""

    def __init__(self, settings: Settings) -> None:
        words = read_lexicon(settings.directory("lexicon"))
        self._chosen = settings.lm
        self._vocabulary = [w for w in words.pronunciations if w not in SPECIAL_WORDS]
        self._words = [*words.pronunciations]
        self.held_out = _sentences(words, utterances(settings, "dev"))
        self.texts = [_sentences(words, utterances(settings, "train"))]
        if self._chosen.text is not None:
            self.texts.append(read_text(self._chosen.text, words))

    @property
    def spoken(self) -> Sentences:
        """The sentences of all texts."""
        return [sentence for text in self.texts for sentence in text]

    def model(self, order: int) -> NgramModel:
        """The model of all sources."""
        models = [estimate(text, order, self._vocabulary) for text in self.texts]
        if self._chosen.arpa is not None:
            models.append(self._from_elsewhere(self._chosen.arpa))
        if len(models) == 1:
            return models[0]
        weights = self._chosen.weights or likeliest_weights(models, self.held_out)
        for name, one, weight in zip(self._names(), models, weights, strict=True):
            _say_model(one, self.held_out, f", {name}, weight {weight:.3f}")
        return interpolate(models, weights)

    def _from_elsewhere(self, path: Path) -> NgramModel:
        """A model of the words of the lexicon; one in capitals is read in lower case.

        Raises:
            ValueError: It has none of them; names the file.
        """
        wanted = set(self._vocabulary)
        model = _composed(path, wanted)
        found = {ngram[0] for ngram in model.log10_probabilities if len(ngram) == 1}
        if found & wanted:
            return restricted(model, self._words)
        if not {word.lower() for word in found} & wanted:
            raise ValueError(
                f"{path} has none of the lexicon's {len(wanted)} words, such as "
                f"{min(wanted)}; it has words such as {min(found)}"
            )
        print(f"  {path}: its words are taken in lower case, as the lexicon's are")
        try:
            return restricted(in_lower_case(model), self._words)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def _names(self) -> Iterator[str]:
        yield "transcripts"
        if self._chosen.text is not None:
            yield str(self._chosen.text)
        if self._chosen.arpa is not None:
            yield str(self._chosen.arpa)


def _composed(path: Path, words: Collection[str]) -> NgramModel:
    """The model of a file, with the lexicon's words in NFC as they are there."""
    try:
        return in_nfc(read_arpa(path), words)
    except ValueError as error:
        named = str(error).startswith(str(path))
        raise error if named else ValueError(f"{path}: {error}") from error


def read_text(path: Path, words: Lexicon) -> Sentences:
    """The sentences of a text, with `<unk>` for words that the lexicon lacks.

    Raises:
        ValueError: It is empty, or not UTF-8, or a line has <s> or </s>; names the
            line.
        OSError: It cannot be read.
    """
    sentences: Sentences = []
    for number, line in utf8_lines(path):
        found = in_one_form(line).split()
        if BEGIN in found or END in found:
            raise ValueError(f"{path}:{number}: must not have {BEGIN} or {END}")
        if found:
            sentences.append(words.known(tuple(found)))
    if not sentences:
        raise ValueError(f"{path} has no sentence")
    return sentences


def _pruned(settings: Settings, model: NgramModel, sources: _Sources) -> NgramModel:
    """The model without what `prune` and `max_ngrams` leave out."""
    chosen = settings.lm
    if not chosen.prune and not chosen.max_ngrams:
        return model
    most = chosen.max_ngrams or len(model.log10_probabilities)
    pruned, threshold = prune_to(model, most, sources.spoken, chosen.prune)
    _say_model(pruned, sources.held_out, f", pruned with {threshold:.2g}")
    return pruned


def _say_model(
    model: NgramModel, held_out: list[tuple[str, ...]], kind: str = ""
) -> None:
    print(
        f"  {len(model.log10_probabilities)} n-grams up to {model.order} words{kind}, "
        f"perplexity on dev {perplexity(model, held_out):.0f}",
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
