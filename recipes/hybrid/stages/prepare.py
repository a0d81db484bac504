"""Stage `prepare`: cut the recordings into utterances for training and test.

The acoustic scale is chosen and the held-out loss measured on the split `dev`. It has
the last speakers by name, none of whom is in `train`; or, as in Kaldi's recipe, the
first utterances by id. What cannot be used is counted with its file and line, and the
report at the end shows the counts.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tqdm import tqdm

from lightning_adpsgd.asr.corpora.acronyms import acronyms_in
from lightning_adpsgd.asr.corpora.corpus import (
    CorpusError,
    Skipped,
    Utterance,
    misfit,
    utterance_id,
)
from lightning_adpsgd.asr.corpora.hub5 import (
    PARTS,
    EvalSegment,
    assign,
    extended,
    part_of,
    read_pem,
    read_stm,
    reference_words,
    repaired,
)
from lightning_adpsgd.asr.corpora.sources import (
    Callers,
    Discs,
    Holding,
    read_callers,
    read_turns,
)
from lightning_adpsgd.asr.corpora.turns import Turn, all_lines
from lightning_adpsgd.asr.language.dictionary_repairs import added
from lightning_adpsgd.asr.language.lexicon import read_entries
from lightning_adpsgd.files import written_whole
from recipes.hybrid.data.directories import write_directories
from recipes.hybrid.data.discs import discs_of, read_recordings
from recipes.hybrid.data.inspection import Recording
from recipes.hybrid.data.selection import (
    distinct,
    first_utterances,
    hold_out,
    limit_repeats,
)
from recipes.hybrid.data.splits import say_splits, write_splits
from recipes.hybrid.pipeline.groups import PrepareSettings
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError


def prepare(settings: Settings, output: Path) -> None:
    """Write one list of utterances per split, and copies of the reference.

    Raises:
        StageError: There is no usable utterance, there are too few speakers to hold
            some out, or the rules of scoring are not a text file.
    """
    skipped = Skipped()
    discs = discs_of(settings, skipped)
    recordings = read_recordings(settings)
    callers = _callers(settings, discs, skipped)
    spoken = _training(settings, discs, recordings, callers, skipped)
    train, dev = _divide(spoken, settings)
    splits = {
        "train": list(limit_repeats(train, settings.prepare.max_repeats, skipped)),
        "dev": dev,
        **_test(discs, recordings, settings.prepare, skipped),
    }
    write_splits(output, splits)
    _write_sexes(output / "sexes.txt", callers, (*train, *dev))
    for source, name in ((discs.stm, "eval.stm"), (discs.glm, "eval.glm")):
        if source is not None:
            _copy_text(source, output / name)
    write_directories(output, splits)
    missing = sorted(PARTS.keys() - splits.keys())
    warnings = (
        [f"WARNING: no test utterances for {', '.join(missing)}"] if missing else []
    )
    say_splits(output, splits, skipped, warnings)


def _copy_text(source: Path, target: Path) -> None:
    """Copy a reference or rules, the reference with the repairs of Kaldi's recipe.

    It becomes UTF-8 with the line ends of this system; on others NIST's tools stumble.

    Raises:
        StageError: The rules are not a text file. A reference that is not one is left
            out, because nothing is tested by it.
    """
    try:
        lines = all_lines(source, Skipped())
    except CorpusError as error:
        if target.suffix == ".stm":
            return
        raise StageError(f"rules of scoring: {error}; or remove the file") from error
    text = "\n".join(line.rstrip() for line in lines)
    text = text.rstrip("\n") + "\n"
    with written_whole(target) as file:
        file.write(repaired(text) if target.suffix == ".stm" else text)


def _callers(settings: Settings, discs: Discs, skipped: Skipped) -> Callers:
    tables = [read_callers(discs.holding(n), skipped) for n in settings.sources]
    return {side: caller for table in tables for side, caller in table.items()}


def _write_sexes(path: Path, callers: Callers, spoken: Iterable[Utterance]) -> None:
    """Write `speaker m|f` where the sex is known, in the form of Kaldi's spk2gender."""
    used = {utterance.speaker for utterance in spoken}
    known = {c.name: c.sex for c in callers.values() if c.name in used and c.sex}
    with written_whole(path) as file:
        file.writelines(f"{name} {known[name]}\n" for name in sorted(known))


def _training(
    settings: Settings,
    discs: Discs,
    recordings: dict[str, Recording],
    callers: Callers,
    skipped: Skipped,
) -> dict[str, list[Utterance]]:
    """Utterances of each source, sorted by id; each id once."""
    acronyms = _acronyms(discs)
    return {
        name: sorted(
            distinct(
                _spoken(
                    discs.holding(name),
                    acronyms,
                    callers,
                    recordings,
                    settings,
                    skipped,
                ),
                skipped,
            ),
            key=lambda utterance: utterance.id,
        )
        for name in settings.sources
    }


def _acronyms(discs: Discs) -> dict[str, str]:
    """The words of the dictionary that are spelled out, with their written form.

    The repairs count whether the lexicon applies them or not: some correct how an
    acronym is spelled, and a written form has a pronunciation without a dictionary.
    """
    if discs.dictionary is None:
        return {}
    entries = read_entries(discs.dictionary, Skipped())
    return acronyms_in((*entries, *added()))


def _spoken(
    holding: Holding,
    acronyms: Mapping[str, str],
    callers: Callers,
    recordings: dict[str, Recording],
    settings: Settings,
    skipped: Skipped,
) -> Iterator[Utterance]:
    bar = tqdm(holding.transcripts.items(), desc=holding.source.name, unit="call")
    for stem, files in bar:
        recording = recordings.get(stem)
        for file in files:
            for turn in read_turns(holding.source, file, skipped, acronyms):
                utterance = _utterance(stem, turn, callers, file.path)
                yield from _fitted(utterance, recording, settings.prepare, skipped)


def _utterance(stem: str, turn: Turn, callers: Callers, path: Path) -> Utterance:
    """The utterance of a turn, without its recording.

    A second talker at one telephone, `A1`, is a speaker of its own.
    """
    caller = None if turn.talker[1:] else callers.get((stem, turn.channel))
    talker = turn.talker or "AB"[turn.channel]
    return Utterance(
        id=utterance_id(stem, turn.channel, turn.start_s, turn.end_s),
        recording=Path(),
        channel=turn.channel,
        start_s=turn.start_s,
        end_s=turn.end_s,
        words=turn.words,
        speaker=caller.name if caller else f"{stem}-{talker}",
        source=f"{path}:{turn.line}",
    )


def _fitted(
    utterance: Utterance,
    recording: Recording | None,
    settings: PrepareSettings,
    skipped: Skipped,
) -> Iterator[Utterance]:
    """The utterance within its audio; nothing, and a count, if it does not fit."""
    if recording is None or utterance.channel >= recording.num_channels:
        reason = "no usable recording for the transcript"
        skipped.add(reason, utterance.source, utterance.duration_s)
        return
    start_s, end_s, sound_s = utterance.start_s, utterance.end_s, recording.seconds
    bounds = settings.clip_s, settings.min_utterance_s
    if reason := misfit(start_s, end_s, sound_s, *bounds):
        skipped.add(reason, utterance.source, utterance.duration_s)
        return
    end_s = min(end_s, sound_s)
    yield dataclasses.replace(utterance, recording=recording.path, end_s=end_s)


def _divide(
    spoken: dict[str, list[Utterance]], settings: Settings
) -> tuple[list[Utterance], list[Utterance]]:
    """Training and held-out utterances; the latter come from the first source.

    No speaker of another source is among them: each has names of its own.
    """
    first, *others = (spoken[name] for name in settings.sources)
    if settings.prepare.dev_utterances:
        train, dev = first_utterances(first, settings.prepare.dev_utterances)
    else:
        other_way = "hold out utterances by `prepare.dev_utterances`"
        train, dev = hold_out(first, settings.prepare, other_way=other_way)
    return [*itertools.chain(train, *others)], dev


def _test(
    discs: Discs,
    recordings: dict[str, Recording],
    settings: PrepareSettings,
    skipped: Skipped,
) -> dict[str, list[Utterance]]:
    parts: dict[str, list[Utterance]] = {part: [] for part in PARTS}
    if discs.stm is None:
        return {}
    stm = _segments(read_stm, discs.stm, skipped)
    pem = (_segments(read_pem, discs.pem, skipped) if discs.pem else []) or stm
    written = dict(zip(extended(pem, settings.extend_s), pem, strict=True))
    for segment, references in assign(written, stm, skipped, discs.stm):
        part = part_of(segment.recording)
        if part is None or any(reference.is_ignored for reference in references):
            continue
        source = f"{discs.pem or discs.stm}:{segment.line}"
        if not references:
            seconds = segment.end_s - segment.start_s
            skipped.add("test segment without a reference", source, seconds)
            continue
        name = utterance_id(*written[segment][1:5])
        recording = recordings.get(segment.recording)
        within = _clipped(segment, written[segment], recording, settings.clip_s)
        utterance = _test_utterance(name, within, references, source)
        parts[part] += _fitted(utterance, recording, settings, skipped)
    unique = {part: list(distinct(parts[part], skipped)) for part in parts}
    return {part: utterances for part, utterances in unique.items() if utterances}


def _clipped(
    extended: EvalSegment,
    written: EvalSegment,
    recording: Recording | None,
    clip_s: float,
) -> EvalSegment:
    """An extended segment within its audio, if it fits as it is written."""
    if recording is None or written.end_s > recording.seconds + clip_s:
        return extended
    return extended._replace(end_s=min(extended.end_s, recording.seconds))


def _segments(
    read: Callable[[Path, Skipped], list[EvalSegment]], path: Path, skipped: Skipped
) -> list[EvalSegment]:
    try:
        return read(path, skipped)
    except CorpusError as error:
        skipped.add("unreadable segments of the test", str(error))
        return []


def _test_utterance(
    name: str, segment: EvalSegment, references: list[EvalSegment], source: str
) -> Utterance:
    stem, channel = segment.recording, segment.channel
    return Utterance(
        id=name,
        recording=Path(),
        channel=channel,
        start_s=segment.start_s,
        end_s=segment.end_s,
        words=tuple(w for r in references for w in reference_words(r.text)),
        speaker=f"{stem}-{'AB'[channel]}",
        source=source,
    )
