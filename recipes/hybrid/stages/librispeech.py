"""Stages `check`, `prepare`, `lexicon` for LibriSpeech; the others are Switchboard's.

All splits whose names begin with `train` are trained on, the others are tested. The
acoustic scale is chosen on `dev`: the last readers of the training, as always. Splits
overlap (`dev-clean` holds all of `dev-clean-2`), and an utterance is used once: in the
first test set that has it.
"""

import json
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from tqdm import tqdm

from lightning_adpsgd.asr.corpora.corpus import (
    CorpusError,
    Skipped,
    Utterance,
    utterance_id,
)
from lightning_adpsgd.asr.corpora.hub5 import PARTS
from lightning_adpsgd.asr.corpora.librispeech import (
    Library,
    ReadUtterance,
    find_library,
)
from lightning_adpsgd.asr.parallel import fork_map
from lightning_adpsgd.asr.sound.channels import ChannelError, SoundFacts, read_facts
from lightning_adpsgd.files import write_json, written_whole
from recipes.hybrid.data.directories import write_directories
from recipes.hybrid.data.discs import REPORT
from recipes.hybrid.data.selection import distinct, hold_out
from recipes.hybrid.data.splits import say_splits, write_splits
from recipes.hybrid.pipeline.settings import TEST_SPLITS, Settings
from recipes.hybrid.pipeline.stage import StageError, say
from recipes.hybrid.stages.lexicon import complete_lexicon, sources_of

Splits = dict[str, list[Utterance]]

#: Hours of each split, for comparison; of the corpus's own description.
HOURS = {
    **{"train-clean-100": 100.6, "train-clean-360": 363.6, "train-other-500": 496.7},
    **{"dev-clean": 5.4, "dev-other": 5.3, "test-clean": 5.4, "test-other": 5.1},
}


def check(settings: Settings, output: Path) -> None:
    """Report the splits with their hours, and what is missing or damaged.

    Raises:
        StageError: No split to train on.
    """
    problems = Skipped()
    library = _library(settings, problems)
    seconds = _seconds(settings, library, problems)
    lines = []
    for split, spoken in library.splits.items():
        usable = [seconds[u.name] for u in spoken if u.name in seconds]
        complete = f" (complete: {HOURS[split]} h)" if split in HOURS else ""
        hours = f"{sum(usable) / 3600:.2f} h{complete}"
        lines.append(f"{split}: {len(usable)} of {len(spoken)} utterances, {hours}")
    lines.append(f"librispeech-lexicon.txt: {library.lexicon or 'MISSING'}")
    lines += _unused(library)
    lines += [f"WARNING: {line}" for line in problems.report()]
    say(lines)
    if not any(split.startswith("train") for split in library.splits):
        raise StageError(
            f"{settings.corpus}: expected folders like train-clean-5/1088/134315 with "
            f"FLAC files and transcripts, found splits {sorted(library.splits)}; "
            "python -m recipes.librispeech.download fetches the corpus"
        )
    write_json(output / REPORT, {"seconds": seconds, "report": lines})


def prepare(settings: Settings, output: Path) -> None:
    """Write one list of utterances per split.

    Raises:
        StageError: No usable utterance, or too few readers to hold some out.
    """
    skipped = Skipped()
    library = _library(settings, skipped)
    report = json.loads((settings.directory("check") / REPORT).read_text())
    splits = {
        split: [
            _utterance(u, report["seconds"][u.name])
            for u in sorted(spoken)
            if u.name in report["seconds"]
        ]
        for split, spoken in library.splits.items()
    }
    training = (
        u for split in splits if split.startswith("train") for u in splits[split]
    )
    train, dev = hold_out([*distinct(training, skipped)], settings.prepare)
    every = {"train": train, "dev": dev, **_tests(splits, skipped)}
    write_splits(output, every)
    write_directories(output, every)
    with written_whole(output / "sexes.txt") as file:
        file.writelines(
            f"{name} {sex}\n" for name, sex in sorted(library.sexes.items())
        )
    say_splits(output, every, skipped, [*_unused(library)])


def _unused(library: Library) -> Iterator[str]:
    """Warns of splits that are neither trained on nor tested."""
    names = ", ".join(TEST_SPLITS[len(PARTS) :])
    for split in library.splits:
        if not split.startswith("train") and split not in TEST_SPLITS:
            yield (
                f"WARNING: {split}: not used; a split that is trained on is named "
                f"train..., one that is tested is one of {names}"
            )


def _tests(splits: Splits, skipped: Skipped) -> Splits:
    """The test sets that have an utterance of their own: scores tell files by name."""
    seen: set[str] = set()
    found: Splits = {}
    for split in TEST_SPLITS:
        spoken = distinct(splits.get(split, ()), skipped)
        found[split] = [*_unseen(split, spoken, seen, skipped)]
        seen |= {one.id for one in found[split]}
    return {split: spoken for split, spoken in found.items() if spoken}


def _unseen(
    split: str, spoken: Iterable[Utterance], seen: Set[str], skipped: Skipped
) -> Iterator[Utterance]:
    for one in spoken:
        if one.id in seen:
            reason = f"in {split} and in a test set before it"
            skipped.add(reason, one.source, one.duration_s)
        else:
            yield one


def lexicon(settings: Settings, output: Path) -> None:
    """Write the words of the training with pronunciations.

    They come from `lexicon.cmudict`, by default the corpus's own lexicon, and from
    eSpeak where that lacks a word or is not there.

    Raises:
        StageError: The dictionary holds nothing.
    """
    library, skipped = _library(settings, Skipped()), Skipped()
    sources = sources_of(settings, skipped, library.lexicon)
    complete_lexicon(settings, output, {}, sources, skipped)


def _library(settings: Settings, skipped: Skipped) -> Library:
    try:
        return find_library(settings.roots, skipped)
    except CorpusError as error:
        raise StageError(f"--corpus: {error}") from error


def _seconds(
    settings: Settings, library: Library, problems: Skipped
) -> dict[str, float]:
    """Length of every usable sound by the name of its utterance."""
    spoken = [utterance for split in library.splits.values() for utterance in split]
    found: dict[int, SoundFacts | str] = {}
    with tqdm(total=len(spoken), desc="headers", unit="file") as bar:
        for index, facts in fork_map(_facts, spoken, settings.cores):
            found[index] = facts
            bar.update()
    seconds = {}
    for index, utterance in enumerate(spoken):
        facts = found[index]
        if isinstance(facts, str):
            remedy = "its utterance is left out"
            problems.add("unusable sound", facts, remedy=remedy)
        else:
            seconds[utterance.name] = facts.seconds
            if facts.num_channels > 1:
                where, remedy = str(utterance.sound), "the first channel is read"
                problems.add("sound of several channels", where, remedy=remedy)
    return seconds


def _facts(utterance: ReadUtterance) -> SoundFacts | str:
    try:
        return read_facts(utterance.sound)
    except ChannelError as error:
        return str(error)


def _utterance(read: ReadUtterance, seconds: float) -> Utterance:
    return Utterance(
        id=utterance_id(read.name, 0, 0.0, seconds),
        recording=read.sound,
        channel=0,
        start_s=0.0,
        end_s=seconds,
        words=read.words,
        speaker=read.reader,
        source=read.source,
    )
