"""Stage `features`: turn the sound of every utterance into stored log-mel frames.

One conversation side is one piece of work: its channel is read once, its utterances are
cut out and normalised together. Sides are done by several processes into one array per
split; a journal of finished sides lets an interrupted stage go on.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from lightning_adpsgd.asr.channels import read_channel
from lightning_adpsgd.asr.corpus import Skipped, Utterance
from lightning_adpsgd.asr.features import log_mel, normalise_side, num_frames
from lightning_adpsgd.asr.parallel import fork_map
from lightning_adpsgd.asr.sphere import SAMPLE_RATE
from lightning_adpsgd.asr.store import FramePlace, FrameWriter
from recipes.switchboard.data_stages import utterances
from recipes.switchboard.pipeline import StageError
from recipes.switchboard.settings import FeatureSettings, Settings

_JOURNAL = ".sides.done"


class Side(NamedTuple):
    """The utterances of one conversation side.

    Attributes:
        spoken: All of one recording and channel.
        positions: Their places in the list of the split.
    """

    spoken: list[Utterance]
    positions: list[int]

    @property
    def name(self) -> str:
        """Recording and channel."""
        first = self.spoken[0]
        return f"{first.recording} {'AB'[first.channel]}"

    @property
    def duration_s(self) -> float:
        """Seconds of speech."""
        return sum(u.duration_s for u in self.spoken)


class Job(NamedTuple):
    """One conversation side to compute, with where its frames go."""

    side: Side
    places: list[FramePlace]
    num_mels: int


def features(settings: Settings, output: Path) -> None:
    """Write a frame store per split.

    Raises:
        StageError: Not one side of a split could be read.
    """
    for split in settings.splits():
        if not (output / split / "frames.npy").exists():
            _split(settings, split, output / split)


def _split(settings: Settings, split: str, folder: Path) -> None:
    spoken = utterances(settings, split)
    writer = _writer(folder, spoken, settings.features)
    if not writer.is_begun():
        (folder / _JOURNAL).unlink(missing_ok=True)
    writer.create()
    lost = Skipped()
    present = [True] * len(spoken)
    for side, problem in _work(settings, split, sides_of(spoken), writer):
        if problem is not None:
            lost.add("unreadable conversation side", problem, side.duration_s)
            for position in side.positions:
                present[position] = False
    if not any(present):
        raise StageError(f"{split}: nothing could be read: {lost.report()[0]}")
    writer.finish(present)
    (folder / _JOURNAL).unlink(missing_ok=True)
    for line in lost.report():
        print(f"  WARNING: {split}: left out: {line}", flush=True)


def _writer(
    folder: Path, spoken: list[Utterance], settings: FeatureSettings
) -> FrameWriter:
    lengths = [num_frames(end - start) for start, end in map(_samples, spoken)]
    ids = [utterance.id for utterance in spoken]
    return FrameWriter(folder, ids, lengths, settings.num_mels, settings.dtype)


def _samples(utterance: Utterance) -> tuple[int, int]:
    return round(utterance.start_s * SAMPLE_RATE), round(utterance.end_s * SAMPLE_RATE)


def sides_of(spoken: Sequence[Utterance]) -> list[Side]:
    """The utterances by conversation side, in the order of their first ones."""
    sides: dict[tuple[Path, int], Side] = {}
    for position, utterance in enumerate(spoken):
        side = sides.setdefault(utterance.side, Side([], []))
        side.spoken.append(utterance)
        side.positions.append(position)
    return list(sides.values())


def _work(
    settings: Settings, split: str, sides: list[Side], writer: FrameWriter
) -> Iterator[tuple[Side, str | None]]:
    """Every side with what was wrong with it, or None; finished ones are noted."""
    journal = writer.folder / _JOURNAL
    done = set(journal.read_text().splitlines()) if journal.exists() else set()
    todo = [side for side in sides if side.name not in done]
    num_mels = settings.features.num_mels
    jobs = [Job(side, [*map(writer.place, side.positions)], num_mels) for side in todo]
    work = write_side if settings.cores == 1 else _write_side_alone
    bar = tqdm(total=len(sides), initial=len(done), desc=f"{split} sound", unit="side")
    with bar, journal.open("a") as file:
        for index, problem in fork_map(work, jobs, settings.cores):
            if problem is None:
                file.write(f"{todo[index].name}\n")
                file.flush()
            bar.update()
            yield todo[index], problem


def _write_side_alone(job: Job) -> str | None:
    # A forked process has none of the threads that torch believes it has.
    torch.set_num_threads(1)
    return write_side(job)


def write_side(job: Job) -> str | None:
    """Compute and store the frames of one side; what was wrong, or None."""
    first = job.side.spoken[0]
    try:
        channel = read_channel(first.recording, first.channel)
        cuts = [channel[slice(*_samples(u))] for u in job.side.spoken]
        frames = normalise_side([log_mel(cut, job.num_mels) for cut in cuts])
        for place, utterance in zip(job.places, frames, strict=True):
            place.put(utterance.numpy())
    except (OSError, ValueError) as error:
        return f"{job.side.name}: {error}"
    return None
