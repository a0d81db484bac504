"""Stages `check`, `prepare`, `lexicon` for Kaldi data directories.

`CORPUS/train` is trained on, `CORPUS/test` is tested, `CORPUS/dev` is `dev` if it is
there; otherwise the last speakers of the training are held out.
"""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped, Utterance
from lightning_adpsgd.asr.kaldi.data import read_data
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.lexicon import (
    KaldiLexicon,
    find_lexicon,
    read_lexicon,
)
from lightning_adpsgd.asr.language.lexicon import (
    MS_STATE_PHONES,
    SILENCE_PHONES,
    SPECIAL_WORDS,
    Dictionary,
    phones_of,
)
from lightning_adpsgd.asr.sound.channels import read_facts
from lightning_adpsgd.files import write_json
from recipes.hybrid.data.discs import REPORT
from recipes.hybrid.data.kaldi import find_kaldi
from recipes.hybrid.data.selection import distinct, hold_out
from recipes.hybrid.data.splits import say_splits, utterances, write_splits
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError, say
from recipes.hybrid.stages.lexicon import (
    SPELLED,
    Source,
    complete_lexicon,
    sources_of,
    synthesised,
)

Splits = dict[str, list[Utterance]]
_MEANINGS = {
    "dev": "scales and weights are chosen on speech that the network knows",
    "test": "the error rate is not that of new speech",
}


def check(settings: Settings, output: Path) -> None:
    """Report the hours of each directory, and what cannot be used.

    Raises:
        StageError: A file is missing or damaged, of the data, the lexicon or the
            experiment.
    """
    if settings.uses_kaldi:
        find_kaldi(settings)
    skipped = Skipped()
    splits = _splits(settings, skipped)
    lines = [
        f"{settings.corpus / split}: {len(spoken)} utterances, "
        f"{sum(one.duration_s for one in spoken) / 3600:.2f} h"
        for split, spoken in splits.items()
    ]
    if "test" not in splits:
        lines.append(f"{settings.corpus / 'test/text'}: MISSING, nothing is tested")
    lines += _without_dev(settings)
    lines.append(_about_lexicon(settings, skipped))
    lines += _trained_on(splits)
    lines += [f"WARNING: left out: {line}" for line in skipped.report()]
    say(lines)
    write_json(output / REPORT, {"report": lines})


def _without_dev(settings: Settings) -> Iterator[str]:
    """Tells of a folder `dev` that is not used."""
    if (settings.corpus / "dev").is_dir() and not _is_there(settings, "dev"):
        instead = "the last speakers of the training are held out in its place"
        yield f"WARNING: {settings.corpus / 'dev/text'}: MISSING, {instead}"


def _about_lexicon(settings: Settings, skipped: Skipped) -> str:
    if settings.lexicon.cmudict is not None:
        return f"{settings.lexicon.cmudict}: read as CMUdict, in place of a lexicon"
    path = _lexicon_of(settings)
    if path is None:
        return f"{settings.corpus / 'local/dict/lexicon.txt'}: MISSING"
    dictionary = _written(path, skipped).pronunciations
    return f"{path}: {len(dictionary)} words, {len(phones_of(dictionary))} phones"


def _lexicon_of(settings: Settings) -> Path | None:
    """The lexicon of the corpus; none if another takes its place."""
    return None if settings.lexicon.cmudict else find_lexicon(settings.corpus)


def prepare(settings: Settings, output: Path) -> None:
    """Write one list of utterances per split.

    Raises:
        StageError: No usable utterance, or too few speakers to hold some out.
    """
    skipped = Skipped()
    splits = _splits(settings, skipped)
    warnings = [*_trained_on(splits)]
    if "dev" not in splits:
        other_way = f"move utterances to a data directory {settings.corpus / 'dev'}"
        train, dev = hold_out(splits["train"], settings.prepare, other_way=other_way)
        splits = {**splits, "train": train, "dev": dev}
    write_splits(output, splits)
    say_splits(output, splits, skipped, warnings)


def lexicon(settings: Settings, output: Path) -> None:
    """Write the words of the training, or all that a lexicon has, with pronunciations.

    They come from `CORPUS/local/dict`, with phones as they are written there, or from
    `lexicon.cmudict`, in MS-State's phones.

    Raises:
        StageError: The dictionary holds nothing, cannot be read, or has other phones
            than eSpeak, which is asked for.
    """
    path, skipped = _lexicon_of(settings), Skipped()
    if path is None:
        sources = sources_of(settings, skipped)
        complete_lexicon(settings, output, {}, sources, skipped)
        return
    written = _written(path, skipped)
    known = _spoken(settings, path, written.pronunciations)
    silence = written.silence_phones
    if settings.wider:
        known = _spoken_of(written) | known
    sources = _in_the_same_phones(settings, path, phones_of(known) - {*silence})
    complete_lexicon(settings, output, known, sources, skipped, silence)


def _written(path: Path, skipped: Skipped) -> KaldiLexicon:
    try:
        return read_lexicon(path, skipped)
    except CorpusError as error:
        raise StageError(f"--corpus: {error}") from error


def _spoken(settings: Settings, path: Path, dictionary: Dictionary) -> Dictionary:
    """The words of the training that a dictionary has."""
    said = {word for one in utterances(settings, "train") for word in one.words}
    said -= SPECIAL_WORDS.keys()
    known = {word: dictionary[word] for word in said if word in dictionary}
    print(f"  {len(known)} of {len(said)} words are in {path.name}")
    return known


def _spoken_of(written: KaldiLexicon) -> Dictionary:
    """The words of a lexicon but those for silence and noise, such as `!SIL`."""
    silence = {*SILENCE_PHONES, *written.silence_phones}
    return {
        word: several
        for word, several in written.pronunciations.items()
        if not all(silence.issuperset(one) for one in several)
    }


def _in_the_same_phones(
    settings: Settings, path: Path, phones: set[str]
) -> tuple[Source, ...]:
    """Sources for the words that a lexicon lacks: none if its phones are others.

    Raises:
        StageError: eSpeak is asked for, which writes MS-State's phones.
    """
    others = sorted(phones - {*SILENCE_PHONES} - MS_STATE_PHONES)
    if not others:
        return SPELLED, *synthesised(settings)
    if settings.lexicon.synthesise:
        raise StageError(
            f"`lexicon.synthesise` must be false: {path} has the phone {others[0]!r}, "
            "and eSpeak's pronunciations are in the phones of MS-State, which lack it. "
            f"If its phones are CMUdict's, `lexicon.cmudict={path}` reads it in "
            "MS-State's"
        )
    return ()


def _splits(settings: Settings, skipped: Skipped) -> Splits:
    _refuse_one_directory(settings.corpus)
    names = ["train", *(n for n in ("dev", "test") if _is_there(settings, n))]
    facts_of = functools.cache(read_facts)
    bounds = settings.prepare.clip_s, settings.prepare.min_utterance_s
    try:
        found = {
            name: read_data(settings.corpus / name, facts_of, skipped, *bounds)
            for name in names
        }
    except KaldiError as error:
        raise StageError(f"--corpus: {error}") from error
    splits = {name: [*distinct(spoken, skipped)] for name, spoken in found.items()}
    _refuse_alike(splits.get("test", ()))
    return splits


def _refuse_one_directory(corpus: Path) -> None:
    if (corpus / "wav.scp").exists() and not (corpus / "train").exists():
        raise StageError(
            f"--corpus: {corpus} is a data directory itself; name a folder that has "
            "data directories `train` and `test`"
        )


def _trained_on(splits: Splits) -> Iterator[str]:
    """Warns of utterances of `dev` and `test` whose sound is trained on."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for one in splits["train"]:
        spans.setdefault(one.side, []).append((one.start_s, one.end_s))
    for split, meaning in _MEANINGS.items():
        both = [one for one in splits.get(split, ()) if _is_within(one, spans)]
        if both:
            yield (
                f"WARNING: {split}: {len(both)} of {len(splits[split])} utterances are "
                f"trained on too, for example {both[0].source}: {meaning}; take them "
                "out of one of the two directories"
            )


def _is_within(one: Utterance, spans: dict[str, list[tuple[float, float]]]) -> bool:
    """Whether more than half of an utterance is in a span of its side."""
    return any(
        2 * (min(end, one.end_s) - max(begin, one.start_s)) > one.end_s - one.start_s
        for begin, end in spans.get(one.side, ())
    )


def _refuse_alike(tested: Iterable[Utterance]) -> None:
    """Refuses names that are one in lower case, in which scoring compares them."""
    names: dict[str, str] = {}
    for name in (one.conversation for one in tested):
        other = names.setdefault(name.lower(), name)
        if other != name:
            raise StageError(
                f"--corpus: the utterances {other} and {name} of `test` differ in case "
                "alone, and would be scored as one: rename one of them in all tables"
            )


def _is_there(settings: Settings, name: str) -> bool:
    return (settings.corpus / name / "text").exists()
