"""The inspection of every file of the discs, with what is wrong and its remedy.

It reads the header of each recording, compares it with the size of the file, and
listens to some seconds if the samples are 16-bit PCM. It reads every line of the
transcripts. Several processes share the work. Problems are counted by kind, with file
and line, the hours that they cost and their remedy.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.discs import DiscFile
from lightning_adpsgd.asr.corpora.hub5 import (
    EvalSegment,
    assign,
    read_pem,
    read_stm,
    repaired,
)
from lightning_adpsgd.asr.corpora.sources import (
    Callers,
    Discs,
    Holding,
    Source,
    missing_numbers,
    read_callers,
    read_turns,
)
from lightning_adpsgd.asr.corpora.turns import (
    COPY_AGAIN,
    SIDES,
    Turn,
    all_lines,
    overlapping,
    read_lines,
)
from lightning_adpsgd.asr.parallel import fork_map
from lightning_adpsgd.asr.scoring import NO_RULES, ScoringError, parse_glm
from lightning_adpsgd.asr.scoring.scorer import score_lines
from lightning_adpsgd.asr.sound.sphere import (
    SphereError,
    SphereHeader,
    read_header,
    wrong_samples,
)

SPH2PIPE = "sph2pipe"
SHORTENED = "recording compressed with shorten"
OVERLAP_S = 0.5
BEYOND_S = 0.1
_NUM_SIDES = 2
_GET_SPH2PIPE = (
    "the LDC gives away the source of the program sph2pipe: build it with a C compiler "
    "and put it on PATH"
)


class Recording(NamedTuple):
    """A recording whose header and size are right.

    Attributes:
        path: SPHERE file.
        seconds: length of the recording.
        num_channels: number of channels, usually two.
    """

    path: Path
    seconds: float
    num_channels: int


class Sound(NamedTuple):
    """One recording: the copy to use, if any, and its problems."""

    recording: Recording | None
    problems: Skipped


class Speech(NamedTuple):
    """The contents of the transcripts of one conversation."""

    num_turns: int
    seconds: float
    sides: frozenset[int]
    problems: Skipped


def inspect_recordings(
    holding: Holding, cores: int, problems: Skipped
) -> dict[str, Recording]:
    """The usable recordings of a source by stem."""
    stems = sorted(holding.recordings)
    copies = [holding.recordings[stem] for stem in stems]
    bar = tqdm(total=len(stems), desc=f"{holding.source.name} headers", unit="file")
    found: dict[str, Sound] = {}
    with bar:
        for index, sound in fork_map(_best_copy, copies, cores):
            found[stems[index]] = sound
            bar.update()
    for stem in stems:
        problems.merge(found[stem].problems)
    return {stem: r for stem in stems if (r := found[stem].recording) is not None}


def _best_copy(copies: Sequence[Path]) -> Sound:
    """The first usable copy of a recording; others are counted."""
    problems = Skipped()
    chosen: Recording | None = None
    for path in copies:
        if chosen is not None:
            remedy = f"{chosen.path} is used; remove the others"
            reason = "second recording of the same name"
            problems.add(reason, str(path), remedy=remedy)
            continue
        chosen = _usable(path, problems)
    return Sound(chosen, problems)


def _usable(path: Path, problems: Skipped) -> Recording | None:
    try:
        header = read_header(path)
    except SphereError as error:
        remedy = "its conversation is left out"
        problems.add("unusable recording", str(error), remedy=remedy)
        return None
    if header.is_shortened and shutil.which(SPH2PIPE) is None:
        problems.add(SHORTENED, str(path), header.duration_s, _GET_SPH2PIPE)
        return None
    if not header.is_shortened and (refusal := wrong_samples(path)):
        remedy = f"its conversation is left out; {COPY_AGAIN}"
        where = f"{path}: {refusal}"
        problems.add("unusable recording", where, header.duration_s, remedy)
        return None
    _check_channels(path, header, problems)
    return Recording(path, header.duration_s, header.num_channels)


def _check_channels(path: Path, header: SphereHeader, problems: Skipped) -> None:
    if header.num_channels != _NUM_SIDES:
        where = f"{path}: the header says {header.num_channels}"
        remedy = f"only sides that have a channel are used; {COPY_AGAIN}"
        reason = "recording without two channels"
        problems.add(reason, where, header.duration_s, remedy)


class _Conversation(NamedTuple):
    source: Source
    stem: str
    files: tuple[DiscFile, ...]
    recording: Recording | None


def inspect_transcripts(
    holding: Holding, recordings: dict[str, Recording], cores: int, problems: Skipped
) -> dict[str, Speech]:
    """The speech of each conversation that has transcripts."""
    jobs = [
        _Conversation(holding.source, stem, files, recordings.get(stem))
        for stem, files in sorted(holding.transcripts.items())
    ]
    bar = tqdm(total=len(jobs), desc=f"{holding.source.name} transcripts", unit="call")
    found: dict[str, Speech] = {}
    with bar:
        for index, speech in fork_map(_listen, jobs, cores):
            found[jobs[index].stem] = speech
            bar.update()
    for job in jobs:
        problems.merge(found[job.stem].problems)
    return found


def _listen(job: _Conversation) -> Speech:
    problems = Skipped()
    seconds, sides, num_turns = 0.0, set[int](), 0
    for file in job.files:
        turns = read_turns(job.source, file, problems, {})
        _check_times(file.path, turns, job.recording, problems)
        seconds += sum(turn.end_s - turn.start_s for turn in turns)
        sides |= {turn.channel for turn in turns}
        num_turns += len(turns)
    return Speech(num_turns, seconds, frozenset(sides), problems)


def _check_times(
    path: Path, turns: list[Turn], recording: Recording | None, problems: Skipped
) -> None:
    for turn in turns:
        seconds = turn.end_s - turn.start_s
        if recording and turn.end_s > recording.seconds + BEYOND_S:
            where = f"{path}:{turn.line}: {turn.end_s} s of {recording.seconds:.2f} s"
            remedy = f"left out; if there are many, {recording.path} is another call"
            problems.add("times beyond the end of the audio", where, seconds, remedy)
    for turn in overlapping(turns, OVERLAP_S):
        where = f"{path}:{turn.line}: from {turn.start_s} s"
        remedy = "used as it is; if there are many, " + COPY_AGAIN
        problems.add("times that overlap on one side", where, remedy=remedy)


def compare(
    holding: Holding,
    recordings: dict[str, Recording],
    speech: dict[str, Speech],
    problems: Skipped,
) -> None:
    """Count recordings without transcripts, transcripts without recordings, etc."""
    for stem, files in sorted(holding.transcripts.items()):
        if stem not in holding.recordings:
            remedy = f"copy the disc that holds {stem}.sph"
            where, seconds = str(files[0].path), speech[stem].seconds
            problems.add("transcript without its recording", where, seconds, remedy)
        elif not speech[stem].sides:
            remedy = "left out; " + COPY_AGAIN
            problems.add(
                "conversation without words", str(files[0].path), remedy=remedy
            )
        elif len(speech[stem].sides) == 1:
            where = f"{files[0].path}: nothing of side {_other_side(speech[stem])}"
            remedy = "the other side is used; " + COPY_AGAIN
            problems.add(
                "conversation with words of one side only", where, remedy=remedy
            )
    for stem, recording in recordings.items():
        if stem not in holding.transcripts:
            remedy = f"copy its transcript, from {holding.source.text}"
            where, seconds = str(recording.path), recording.seconds
            problems.add("recording without a transcript", where, seconds, remedy)


def _other_side(speech: Speech) -> str:
    return SIDES[1 - min(speech.sides)]


def check_callers(
    holding: Holding, speech: dict[str, Speech], problems: Skipped
) -> Callers:
    """The callers; sides of transcripts that have none are counted."""
    callers = read_callers(holding, problems)
    if callers:
        for stem, found in speech.items():
            for channel in sorted(found.sides):
                if (stem, channel) not in callers:
                    where = f"{stem} {SIDES[channel]}, not in {holding.callers[0]}"
                    remedy = "the side counts as a speaker of its own"
                    problems.add("side of an unknown speaker", where, remedy=remedy)
    return callers


def check_test(
    discs: Discs, recordings: dict[str, Recording], problems: Skipped
) -> None:
    """Read pem, stm and glm whole, and compare them with one another and the sound."""
    copies = discs.holding("hub5").recordings
    pem = _segments(discs.pem, read_pem, problems)
    stm = _segments(discs.stm, read_stm, problems)
    for path, segments in ((discs.pem, pem), (discs.stm, stm)):
        if path is not None:
            _check_segments(path, segments, recordings, copies, problems)
            _check_overlaps(path, segments, problems)
    if discs.pem is not None and discs.stm is not None and pem and stm:
        for segment, references in assign(pem, stm, problems, discs.stm):
            if not references:
                where = f"{discs.pem}:{segment.line}"
                seconds = segment.end_s - segment.start_s
                problems.add("test segment without a reference", where, seconds)
    if discs.stm is not None:
        _check_brackets(discs.stm, stm, problems)
    _check_rules(discs.glm, problems)


def _segments(
    path: Path | None,
    read: Callable[[Path, Skipped], list[EvalSegment]],
    problems: Skipped,
) -> list[EvalSegment]:
    if path is None:
        return []
    try:
        return read(path, problems)
    except CorpusError as error:
        remedy = "without it nothing is tested, or all of the stm; " + COPY_AGAIN
        problems.add("unreadable segments of the test", str(error), remedy=remedy)
        return []


def _check_brackets(
    path: Path, segments: Iterable[EvalSegment], problems: Skipped
) -> None:
    """Alternatives and optional words of the reference must be closed."""
    for segment in segments:
        line = segment.line, f"file A speaker 0 1 {repaired(segment.text)}"
        try:
            score_lines([line], [], NO_RULES, names=(path, path))
        except ScoringError as error:
            remedy = "repair the line, or scoring will stop there"
            problems.add("reference with wrong brackets", str(error), remedy=remedy)


def _check_segments(
    path: Path,
    segments: list[EvalSegment],
    recordings: dict[str, Recording],
    copies: dict[str, tuple[Path, ...]],
    problems: Skipped,
) -> None:
    missing: set[str] = set()
    for segment in segments:
        where = f"{path}:{segment.line}: {segment.recording}"
        recording = recordings.get(segment.recording)
        if recording is None:
            if segment.recording not in missing | copies.keys():
                remedy = "copy its recording from LDC2002S09; it is not tested"
                problems.add("test segments without a recording", where, remedy=remedy)
            missing.add(segment.recording)
        elif segment.end_s > recording.seconds + BEYOND_S and not segment.is_ignored:
            remedy = f"not tested; compare {recording.path} with the disc"
            problems.add("test segment beyond its audio", where, remedy=remedy)


def _check_overlaps(
    path: Path, segments: Iterable[EvalSegment], problems: Skipped
) -> None:
    """Each second of a side may be tested once."""
    turns = (
        Turn(segment.line, segment.channel, *segment[3:5], (), segment.recording)
        for segment in segments
        if not segment.is_ignored
    )
    for turn in overlapping(turns, BEYOND_S):
        where = f"{path}:{turn.line}: {turn.talker} from {turn.start_s} s"
        remedy = "its words may count twice; remove the surplus line"
        problems.add("test segments that overlap on one side", where, remedy=remedy)


def _check_rules(path: Path | None, problems: Skipped) -> None:
    if path is None:
        return
    try:
        read_lines(path, problems)
        parse_glm(all_lines(path, Skipped()), str(path))
    except (CorpusError, ScoringError) as error:
        remedy = f"repair the line, or scoring will stop there; {COPY_AGAIN}"
        problems.add("unreadable rules of scoring", str(error), remedy=remedy)


def missing_calls(holding: Holding) -> Iterator[str]:
    """Which of Fisher's numbered calls have no recording or no transcript."""
    if holding.source.name != "fisher" or not holding.recordings:
        return
    wanted = range(1, holding.source.num_recordings[0] + 1)
    for what, stems in (
        ("recordings", holding.recordings),
        ("transcripts", holding.transcripts),
    ):
        runs = missing_numbers(stems, wanted)
        if runs:
            longest = sorted(runs, key=lambda run: run[0] - run[1])[:3]
            named = ", ".join(f"fe_03_{a:05d} to fe_03_{b:05d}" for a, b in longest)
            number = sum(b - a + 1 for a, b in runs)
            yield (
                f"WARNING: {number} of {len(wanted)} {what} of Fisher are missing, the "
                f"longest gaps: {named}; copy the discs that hold them"
            )
