"""Stage `check`: look at every file of the corpus before anything is computed.

A missing disc, a truncated copy or an unreadable transcript is known in the first
minutes and not in the tenth hour. The report says for each source what was found, with
the hours here and of the whole corpus, then what is missing or damaged, with file, line
and remedy. It also lists the usable recordings for `prepare`, with their lengths.
"""

from collections.abc import Iterator
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.hub5 import PARTS, part_of
from lightning_adpsgd.asr.corpora.sources import TRAINING, Discs, Holding
from lightning_adpsgd.asr.language.lexicon import read_entries
from lightning_adpsgd.files import write_json
from recipes.hybrid.data.discs import REPORT, discs_of
from recipes.hybrid.data.inspection import (
    SHORTENED,
    Recording,
    Speech,
    check_callers,
    check_test,
    compare,
    inspect_recordings,
    inspect_transcripts,
    missing_calls,
)
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError, say

_PARTS = {"swb": "SWB", "ch": "CallHome"}
_FILES = {
    "dictionary": "LDC97S62, sw-ms98-dict.text: pronunciations",
    "pem": "LDC2002S09, hub5e_00.pem: segments of the test set",
    "stm": "LDC2002T43, hub5e00*.stm: reference of the test set",
    "glm": "LDC2002T43, en20000405_hub5.glm: rules of scoring",
}


def check(settings: Settings, output: Path) -> None:
    """Report what is there, what is missing and what is broken.

    Raises:
        StageError: There is nothing to train on in one of the sources asked for, or no
            usable dictionary.
    """
    if settings.uses_kaldi:
        _check_kaldi(settings)
    problems = Skipped()
    discs = discs_of(settings, problems)
    recordings: dict[str, Recording] = {}
    lines: list[str] = []
    for name in settings.sources:
        holding = discs.holding(name)
        found = inspect_recordings(holding, settings.cores, problems)
        speech = inspect_transcripts(holding, found, settings.cores, problems)
        compare(holding, found, speech, problems)
        callers = check_callers(holding, speech, problems)
        lines += [*_describe(holding, found, speech, bool(callers))]
        lines += missing_calls(holding)
        recordings |= found
    tested = inspect_recordings(discs.holding("hub5"), settings.cores, problems)
    check_test(discs, tested, problems)
    for path in discs.archives:
        remedy = "unpack or mount it; nothing in it is used"
        problems.add("packed archive", str(path), remedy=remedy)
    unusable = _wrong_dictionary(settings, discs, problems)
    lines += [*_describe_test(tested), *_describe_files(discs)]
    lines += _unused(settings, discs)
    lines += [f"WARNING: {line}" for line in problems.report()]
    say(lines)
    for name in settings.sources:
        holding = discs.holding(name)
        if not holding.transcripts.keys() & recordings.keys():
            raise StageError(_nothing_of(settings, holding, problems))
    if unusable:
        raise StageError(unusable)
    _write(output / REPORT, recordings | tested, lines)


def _check_kaldi(settings: Settings) -> None:
    from recipes.hybrid.data.kaldi import find_kaldi  # loads torch

    find_kaldi(settings)


def _describe(
    holding: Holding,
    recordings: dict[str, Recording],
    speech: dict[str, Speech],
    has_callers: bool,
) -> Iterator[str]:
    source = holding.source
    wanted = " or ".join(map(str, source.num_recordings))
    complete = f"complete: {wanted} recordings, about {source.hours:.0f} h"
    hours = sum(r.seconds for r in recordings.values()) / 3600
    found = f"{len(recordings)} usable of {len(holding.recordings)}, {hours:.2f} h"
    missing = "" if holding.recordings else "MISSING, "
    yield f"{source.audio}, training audio: {missing}{found} ({complete})"
    turns = sum(s.num_turns for s in speech.values())
    said = sum(s.seconds for s in speech.values()) / 3600
    found = f"{len(speech)} conversations, {turns} utterances, {said:.2f} h"
    yield f"{source.text}: {found if speech else 'MISSING'}"
    if source.callers:
        without = "MISSING, each side counts as a speaker of its own"
        yield f"{source.name}, table of callers: {'there' if has_callers else without}"


def _describe_test(recordings: dict[str, Recording]) -> Iterator[str]:
    for part in PARTS:
        lengths = [r.seconds for stem, r in recordings.items() if part_of(stem) == part]
        found = (
            f"{len(lengths)} files, {sum(lengths) / 3600:.2f} h (complete: 20 files)"
        )
        what = f"LDC2002S09, {_PARTS[part]} part of the test set"
        yield f"{what}: {found if lengths else 'MISSING'}"


def _describe_files(discs: Discs) -> Iterator[str]:
    for name, meaning in _FILES.items():
        yield f"{meaning}: {getattr(discs, name) or 'MISSING'}"


def _unused(settings: Settings, discs: Discs) -> Iterator[str]:
    for name, holding in discs.holdings.items():
        if name in TRAINING and name not in settings.sources and holding.recordings:
            found = f"{len(holding.recordings)} recordings of {holding.source.audio}"
            yield f"not used: {found}; `sources` does not name {name}"


def _wrong_dictionary(
    settings: Settings, discs: Discs, problems: Skipped
) -> str | None:
    """The reason why the dictionary cannot be used, if any; counts broken lines."""
    if discs.dictionary is None:
        return (
            f"{settings.corpus}: expected the dictionary sw-ms98-dict.text, which "
            "belongs to the MS-State transcripts; without it no word has a "
            "pronunciation"
        )
    try:
        read_entries(discs.dictionary, problems)
    except CorpusError as error:
        return f"the dictionary cannot be used: {error}"
    return None


def _nothing_of(settings: Settings, holding: Holding, problems: Skipped) -> str:
    source = holding.source
    pattern = source.transcript.pattern if source.transcript else ""
    shortened = problems.counts.get(SHORTENED, 0)
    why = (
        f"; {shortened} are compressed, {problems.remedies[SHORTENED]}"
        if shortened
        else ""
    )
    return (
        f"{', '.join(map(str, settings.roots))}: expected recordings "
        f"{source.recording.pattern} ({source.audio}) with transcripts {pattern} "
        f"({source.text}); of {len(holding.transcripts)} transcribed conversations "
        f"none has a usable recording, so there is nothing to train on{why}. Give the "
        f"folder that holds them, or leave {source.name} out of `sources`"
    )


def _write(path: Path, recordings: dict[str, Recording], lines: list[str]) -> None:
    values = {stem: [str(r.path), *r[1:]] for stem, r in recordings.items()}
    write_json(path, {"recordings": values, "report": lines})
