"""Stage `prepare`: cut the recordings into utterances for training and test.

The last speakers by name form `dev`, on which the acoustic scale is chosen and the
held-out loss measured; nobody of them is in `train`. Whatever cannot be used is counted
with its file and line, and the count is said at the end.
"""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from lightning_adpsgd.asr.corpus import (
    CorpusTree,
    Skipped,
    Utterance,
    find_tree,
    utterance_id,
    write_utterances,
)
from lightning_adpsgd.asr.hub5 import (
    PARTS,
    EvalSegment,
    assign,
    part_of,
    read_pem,
    read_stm,
    reference_words,
)
from lightning_adpsgd.asr.transcripts import (
    Segment,
    read_speakers,
    read_transcript,
    side_of,
)
from lightning_adpsgd.files import write_json
from recipes.switchboard.check_stage import Recording, read_recordings
from recipes.switchboard.pipeline import StageError
from recipes.switchboard.settings import PrepareSettings, Settings


def prepare(settings: Settings, output: Path) -> None:
    """Write one list of utterances per split, and copies of the reference.

    Raises:
        StageError: No usable utterance, or too few speakers to hold some out.
    """
    tree = find_tree(settings.corpus)
    recordings = read_recordings(settings)
    skipped = Skipped()
    every = _training(tree, recordings, settings.prepare, skipped)
    spoken = list(distinct(every, skipped))
    train, dev = hold_out(spoken, settings.prepare)
    splits = {
        "train": list(limit_repeats(train, settings.prepare.max_repeats, skipped)),
        "dev": dev,
        **_test(tree, recordings, settings.prepare, skipped),
    }
    for split, utterances in splits.items():
        write_utterances(output / f"{split}.jsonl", utterances)
    for source, name in ((tree.stm, "eval.stm"), (tree.glm, "eval.glm")):
        if source is not None:
            shutil.copyfile(source, output / name)
    _say(output, splits, skipped)


def _training(
    tree: CorpusTree,
    recordings: dict[str, Recording],
    settings: PrepareSettings,
    skipped: Skipped,
) -> Iterator[Utterance]:
    speakers = read_speakers(tree.speakers) if tree.speakers else {}
    for path in tqdm(tree.transcripts, desc="transcripts", unit="side"):
        stem, channel = side_of(path)
        speaker = speakers.get((stem, channel), f"{stem}-{'AB'[channel]}")
        for segment in read_transcript(path, skipped):
            utterance = _utterance(stem, channel, segment, speaker, path)
            yield from _fitted(utterance, recordings.get(stem), settings, skipped)


def _utterance(
    stem: str, channel: int, segment: Segment, speaker: str, path: Path
) -> Utterance:
    return Utterance(
        id=utterance_id(stem, channel, segment.start_s, segment.end_s),
        recording=Path(),
        channel=channel,
        start_s=segment.start_s,
        end_s=segment.end_s,
        words=segment.words,
        speaker=speaker,
        source=f"{path}:{segment.line}",
    )


def _fitted(
    utterance: Utterance,
    recording: Recording | None,
    settings: PrepareSettings,
    skipped: Skipped,
) -> Iterator[Utterance]:
    """The utterance within its audio; nothing, and a count, if it does not fit."""
    end_s = min(utterance.end_s, recording.seconds) if recording else utterance.end_s
    reason = None
    if recording is None or utterance.channel >= recording.num_channels:
        reason = "no usable recording for the transcript"
    elif utterance.end_s > recording.seconds + settings.clip_s:
        reason = "transcript beyond the end of its audio"
    elif end_s - utterance.start_s < settings.min_utterance_s:
        reason = f"shorter than {settings.min_utterance_s} s"
    if reason or recording is None:
        skipped.add(reason or "", utterance.source, utterance.duration_s)
        return
    yield dataclasses.replace(utterance, recording=recording.path, end_s=end_s)


def distinct(utterances: Iterable[Utterance], skipped: Skipped) -> Iterator[Utterance]:
    """Pass on the first utterance of every id, that is of every side and time."""
    seen: set[str] = set()
    for utterance in utterances:
        if utterance.id in seen:
            reason = "transcribed a second time"
            skipped.add(reason, utterance.source, utterance.duration_s)
        else:
            seen.add(utterance.id)
            yield utterance


def hold_out(
    utterances: list[Utterance], settings: PrepareSettings
) -> tuple[list[Utterance], list[Utterance]]:
    """Split into training and held-out utterances, with no speaker in both.

    The last speakers by name are held out, until they have `dev_fraction` of the
    conversation sides and at least `min_dev_sides`.

    Raises:
        StageError: No speaker would remain for training.
    """
    sides = {(u.speaker, u.side) for u in utterances}
    per_speaker = Counter(speaker for speaker, _ in sides)
    wanted = max(settings.min_dev_sides, round(settings.dev_fraction * len(sides)))
    held_out: set[str] = set()
    for speaker in sorted(per_speaker, reverse=True):
        if sum(per_speaker[s] for s in held_out) >= wanted:
            break
        held_out.add(speaker)
    if not per_speaker.keys() - held_out:
        raise StageError(
            f"expected speakers for training beside {wanted} held-out conversation "
            f"sides, found {len(sides)} sides of {len(per_speaker)} speakers in all"
        )
    train = [u for u in utterances if u.speaker not in held_out]
    return train, [u for u in utterances if u.speaker in held_out]


def limit_repeats(
    utterances: Iterable[Utterance], limit: int, skipped: Skipped
) -> Iterator[Utterance]:
    """Pass on at most `limit` utterances of the same words; 0 passes on all."""
    seen: Counter[tuple[str, ...]] = Counter()
    for utterance in utterances:
        seen[utterance.words] += 1
        if limit and seen[utterance.words] > limit:
            reason = f"same words heard more than {limit} times"
            skipped.add(reason, utterance.source, utterance.duration_s)
        else:
            yield utterance


def _test(
    tree: CorpusTree,
    recordings: dict[str, Recording],
    settings: PrepareSettings,
    skipped: Skipped,
) -> dict[str, list[Utterance]]:
    parts: dict[str, list[Utterance]] = {part: [] for part in PARTS}
    if tree.stm is None:
        return {}
    stm = read_stm(tree.stm, skipped)
    pem = read_pem(tree.pem, skipped) if tree.pem else stm
    for segment, references in assign(pem, stm, skipped, tree.stm):
        part = part_of(segment.recording)
        if part is None or any(reference.is_ignored for reference in references):
            continue
        source = f"{tree.pem or tree.stm}:{segment.line}"
        if not references:
            seconds = segment.end_s - segment.start_s
            skipped.add("test segment without a reference", source, seconds)
            continue
        utterance = _test_utterance(segment, references, source)
        recording = recordings.get(segment.recording)
        parts[part] += _fitted(utterance, recording, settings, skipped)
    unique = {part: list(distinct(parts[part], skipped)) for part in parts}
    return {part: utterances for part, utterances in unique.items() if utterances}


def _test_utterance(
    segment: EvalSegment, references: list[EvalSegment], source: str
) -> Utterance:
    stem, channel = segment.recording, segment.channel
    return Utterance(
        id=utterance_id(stem, channel, segment.start_s, segment.end_s),
        recording=Path(),
        channel=channel,
        start_s=segment.start_s,
        end_s=segment.end_s,
        words=tuple(w for r in references for w in reference_words(r.text)),
        speaker=f"{stem}-{'AB'[channel]}",
        source=source,
    )


def _say(output: Path, splits: dict[str, list[Utterance]], skipped: Skipped) -> None:
    lines = [_describe(split, utterances) for split, utterances in splits.items()]
    if len(missing := PARTS.keys() - splits.keys()):
        lines.append(f"WARNING: no test utterances for {', '.join(sorted(missing))}")
    lines += [f"WARNING: left out: {line}" for line in skipped.report()]
    print("\n".join(f"  {line}" for line in lines), flush=True)
    counts = {"counts": skipped.counts, "seconds": skipped.seconds}
    write_json(output / "summary.json", {"report": lines, "skipped": counts})


def _describe(split: str, utterances: list[Utterance]) -> str:
    hours = sum(u.duration_s for u in utterances) / 3600
    sides = len({u.side for u in utterances})
    words = sum(len(u.words) for u in utterances)
    return (
        f"{split}: {len(utterances)} utterances, {sides} conversation sides, "
        f"{words} words, {hours:.2f} h"
    )
