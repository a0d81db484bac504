"""Stage `lexicon`: the pronunciations of every word."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.acronyms import pronounce_letters
from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped, Utterance
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
    write_lexicon,
)
from recipes.hybrid.data.discs import discs_of
from recipes.hybrid.data.splits import utterances
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError, say

Pronouncer = Callable[[str, int], tuple[Pronunciation, ...]]
"""Maps a word and its number of occurrences to its pronunciations, none if unknown."""


class Source(NamedTuple):
    """Where pronunciations come from.

    Attributes:
        how: it, in words.
        pronounce: what gives them.
        words: all words that it has, if it has a list of them.
    """

    how: str
    pronounce: Pronouncer
    words: Collection[str] = ()


SPELLED = Source(
    "are spelled out",
    lambda word, _: tuple(filter(None, [pronounce_letters(word)])),
)


def lexicon(settings: Settings, output: Path) -> None:
    """Write the dictionary with the special words; say which words it lacks.

    Raises:
        StageError: A dictionary is missing or holds nothing.
    """
    skipped = Skipped()
    dictionary = _dictionary(settings, skipped)
    sources = sources_of(settings, skipped)
    complete_lexicon(settings, output, dictionary, sources, skipped)


def complete_lexicon(
    settings: Settings,
    output: Path,
    dictionary: Dictionary,
    sources: Iterable[Source],
    skipped: Skipped,
    silence_phones: Iterable[str] = (),
) -> None:
    """Write a dictionary with the words of the training that it lacks, or with all.

    Args:
        settings: settings of the experiment.
        output: folder of the lexicon.
        dictionary: pronunciations that come first.
        sources: sources of pronunciations for other words, the preferred one first.
        skipped: count of the lines that cannot be read.
        silence_phones: phones of the dictionary that are silence, beside those of
            every recipe.

    Raises:
        StageError: A source cannot be read, or most words have no pronunciation.
    """
    spoken = utterances(settings, "train")
    for how, more, listed in sources:
        missing = find_missing(dictionary, spoken)
        found = {word: said for word in missing if (said := more(word, missing[word]))}
        dictionary |= found
        if found:
            print(f"  {len(found)} of {len(missing)} missing words {how}")
        if settings.wider and listed:
            others = set(listed) - dictionary.keys() - SPECIAL_WORDS.keys()
            dictionary |= {word: more(word, 0) for word in others}
            print(f"  {len(others)} further words {how}")
    words = build_lexicon(dict(sorted(dictionary.items())), silence_phones)
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


def sources_of(
    settings: Settings, skipped: Skipped, default: Path | None = None
) -> Iterator[Source]:
    """How words that a dictionary lacks get pronunciations in MS-State's phones.

    Args:
        settings: settings that name the sources.
        skipped: count of the lines that cannot be read.
        default: dictionary in CMUdict's form, if `lexicon.cmudict` is not set.

    Raises:
        StageError: The other dictionary cannot be read.
    """
    yield SPELLED
    path = settings.lexicon.cmudict or default
    if path is not None:
        try:
            other = read_cmudict(path, skipped)
        except CorpusError as error:
            raise StageError(f"`lexicon.cmudict`: {error}") from error
        yield Source(f"are in {path.name}", lambda word, _: other.get(word, ()), other)
    yield from synthesised(settings)


def synthesised(settings: Settings) -> Iterator[Source]:
    """eSpeak, if it is asked for."""
    if settings.lexicon.synthesise:
        yield Source(
            "are pronounced by eSpeak", synthesiser(settings.lexicon.min_count)
        )


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
    """Print the size of the lexicon, and the words of splits that it lacks."""
    lines = [f"{len(words.pronunciations)} words, {len(words.phones)} phones"]
    lines += [f"WARNING: left out: {line}" for line in skipped.report()]
    for split in settings.splits():
        unknown = count_unknown(words, utterances(settings, split)).report()
        lines += [f"WARNING: {split}: taken as {UNKNOWN}: {line}" for line in unknown]
    say(lines)
