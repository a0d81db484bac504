"""Stage `features`: turn the sound of every utterance into stored log-mel frames.

One conversation side is one unit of work: its channel is read once, and its utterances
are cut out and normalised together. Its copies at another speed are a separate unit.
Several processes write into one array per split. A journal of finished sides lets an
interrupted stage continue.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from lightning_adpsgd.asr.corpora.corpus import Skipped, Utterance
from lightning_adpsgd.asr.frames.writing import FramePlace, FrameWriter, is_stored
from lightning_adpsgd.asr.parallel import fork_map
from lightning_adpsgd.asr.sound.audio import AudioError
from lightning_adpsgd.asr.sound.channels import read_channel
from lightning_adpsgd.asr.sound.features import (
    DIGITAL_SILENCE,
    log_mel,
    normalise_side,
    num_frames,
)
from lightning_adpsgd.asr.sound.noise import add_noise, dice_of, noise_files
from lightning_adpsgd.asr.sound.speeds import at_speed, samples_at
from lightning_adpsgd.asr.sound.sphere import SAMPLE_RATE, NoSph2pipeError
from recipes.hybrid.data.splits import speeds_of, with_copies
from recipes.hybrid.pipeline.crew import finished, shared
from recipes.hybrid.pipeline.groups import FeatureSettings
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError, say

_JOURNAL = ".sides.done"
_SYNC_S = 10.0  # of sides that a kill makes the next attempt compute again


class Side(NamedTuple):
    """The utterances of one conversation side.

    Attributes:
        spoken: all utterances of one recording and channel at one speed.
        positions: places of these utterances in the list of the split.
    """

    spoken: list[Utterance]
    positions: list[int]

    @property
    def name(self) -> str:
        """Recording and channel, and the speed of copies."""
        return self.spoken[0].side

    @property
    def duration_s(self) -> float:
        """Seconds of speech."""
        return sum(u.duration_s for u in self.spoken)


class _Journal:
    """The finished sides, a line for each, from which the next attempt continues.

    A side is noted when its frames would outlast a power failure: otherwise the lines
    might, and the frames be zeros. The disk is waited for once in a while.

    Args:
        path: file of the lines.
        writer: writer of the frames.
    """

    def __init__(self, path: Path, writer: FrameWriter) -> None:
        self._path, self._writer = path, writer
        self._waiting: list[str] = []
        self._since = time.monotonic()

    def names(self) -> set[str]:
        """The sides that are noted; a line that was cut off is none."""
        if not self._path.exists():
            return set()
        return {*self._path.read_text("utf-8", "surrogateescape").split("\n")[:-1]}

    def add(self, name: str) -> None:
        """Notes a side, at once or with later ones."""
        self._waiting.append(name)
        if time.monotonic() - self._since >= _SYNC_S:
            self.save()

    def save(self) -> None:
        """Notes all sides that were added.

        Raises:
            OSError: Their frames or their lines cannot get onto the disk.
        """
        if self._waiting:
            self._writer.sync()
            # The line before may have been cut off.
            lines = "\n".join(["", *self._waiting, ""])
            try:
                with self._path.open("ab") as file:
                    # A path may hold bytes that are not valid text.
                    file.write(lines.encode("utf-8", "surrogateescape"))
            except OSError as error:
                error.filename = str(self._path)
                raise
        self._waiting.clear()
        self._since = time.monotonic()


class SideTask(NamedTuple):
    """One conversation side to compute, with the places of its frames."""

    side: Side
    places: list[FramePlace]
    num_mels: int
    noise: "Noise | None" = None


class Noise(NamedTuple):
    """Noise that is added to some training sides; see `FeatureSettings`."""

    files: list[Path]
    share: float
    decibels: tuple[float, float]
    seed: int

    @classmethod
    def of(cls, settings: FeatureSettings) -> "Noise | None":
        """The noise that the settings ask for; none by default."""
        if not settings.noise_share:
            return None
        folder = settings.noise_files
        files = [] if folder is None else noise_files(folder)
        return cls(
            files, settings.noise_share, settings.noise_decibels, settings.noise_seed
        )

    def added_to(self, cuts: list[np.ndarray], name: str) -> list[np.ndarray]:
        """The utterances of a side, all of them with noise or none."""
        dice = dice_of(self.seed, name)
        if dice.random() >= self.share:
            return cuts
        return [add_noise(cut, self.files, self.decibels, dice) for cut in cuts]


def features(settings: Settings, output: Path) -> None:
    """Write a frame store per split.

    Raises:
        StageError: No side of a split could be read.
        OSError: The disk is full, or a recording is gone.
    """
    for split in settings.splits():
        if not is_stored(output / split):
            _split(settings, split, output / split)


def _split(settings: Settings, split: str, folder: Path) -> None:
    spoken = list(with_copies(settings, split))
    _say_copies(settings, split, spoken)
    writer, crew = _writer(folder, spoken, settings.features), settings.crew
    if crew.leads:
        if not writer.is_begun():
            _forget_journals(folder)
        writer.create()
    else:
        crew.await_until(
            lambda: writer.is_begun() or is_stored(folder),
            f"process 0 to lay out {folder}",
            finished(folder.parent),
        )
    lost = Skipped()
    present = [True] * len(spoken)
    sides = sides_of(spoken)
    work = partial(_work, settings, split, writer)
    found = shared(crew, folder.parent, f"features-{split}", sides, work)
    for side, problem in found:
        if problem is not None:
            lost.add("unreadable conversation side", problem, side.duration_s)
            for position in side.positions:
                present[position] = False
    if not crew.leads:
        return
    if not any(present):
        raise StageError(f"{split}: nothing could be read: {lost.report()[0]}")
    writer.finish(present)
    _forget_journals(folder)
    say(f"WARNING: {split}: left out: {line}" for line in lost.report())


def _forget_journals(folder: Path) -> None:
    for journal in folder.glob(f"{_JOURNAL}*"):
        journal.unlink()


def _say_copies(settings: Settings, split: str, spoken: list[Utterance]) -> None:
    """Print the hours of the copies, if any; `prepare` has printed all others."""
    speeds = speeds_of(settings, split)
    if speeds and settings.crew.leads:
        recorded = sum(u.duration_s for u in spoken if u.speed == 1) / 3600
        hours = sum(u.duration_s for u in spoken) / 3600
        named = ", ".join(f"{speed:g}" for speed in speeds)
        print(
            f"  {split}: {recorded:.2f} h as recorded and {hours - recorded:.2f} h of "
            f"copies at speeds {named}",
            flush=True,
        )


def _writer(
    folder: Path, spoken: list[Utterance], settings: FeatureSettings
) -> FrameWriter:
    lengths = [num_frames(_num_samples(utterance)) for utterance in spoken]
    ids = [utterance.id for utterance in spoken]
    return FrameWriter(folder, ids, lengths, settings.num_mels, settings.dtype)


def _samples(utterance: Utterance) -> tuple[int, int]:
    return round(utterance.start_s * SAMPLE_RATE), round(utterance.end_s * SAMPLE_RATE)


def _num_samples(utterance: Utterance) -> int:
    start, end = _samples(utterance)
    return samples_at(end - start, utterance.speed)


def sides_of(spoken: Sequence[Utterance]) -> list[Side]:
    """The utterances by conversation side, in the order of their first ones."""
    sides: dict[str, Side] = {}
    for position, utterance in enumerate(spoken):
        side = sides.setdefault(utterance.side, Side([], []))
        side.spoken.append(utterance)
        side.positions.append(position)
    return list(sides.values())


def _work(
    settings: Settings, split: str, writer: FrameWriter, share: Iterator[Side]
) -> Iterator[tuple[Side, str | None]]:
    """Yields every side with its problem or None; records finished sides."""
    sides, crew = list(share), settings.crew
    of_share = f"-{crew.node}-of-{crew.num_nodes}" if crew.num_nodes > 1 else ""
    journal = _Journal(writer.folder / f"{_JOURNAL}{of_share}", writer)
    done = journal.names()
    todo = [side for side in sides if side.name not in done]
    num_mels = settings.features.num_mels
    noise = _noise(settings) if split == "train" else None
    tasks = [
        SideTask(side, [*map(writer.place, side.positions)], num_mels, noise)
        for side in todo
    ]
    work = write_side if settings.cores == 1 else _write_side_alone
    bar = tqdm(total=len(sides), initial=len(done), desc=f"{split} sound", unit="side")
    try:
        with bar:
            for index, problem in fork_map(work, tasks, settings.cores):
                if problem is None:
                    journal.add(todo[index].name)
                bar.update()
                yield todo[index], problem
    except BaseException:
        with suppress(OSError):  # the first error says what is wrong
            journal.save()
        raise
    journal.save()


def _noise(settings: Settings) -> Noise | None:
    try:
        return Noise.of(settings.features)
    except AudioError as error:
        raise StageError(f"`features.noise_files`: {error}") from error


def _write_side_alone(task: SideTask) -> str | None:
    # A forked process has none of the threads that torch believes it has.
    torch.set_num_threads(1)
    return write_side(task)


def write_side(task: SideTask) -> str | None:
    """Computes and stores the frames of one side; returns the problem, or None.

    Raises:
        OSError: The problem is not of this side: the disk is full, or a recording that
            `check` found is gone, as are all of a disc that is not mounted.
    """
    first = task.side.spoken[0]
    try:
        channel = read_channel(first.recording, first.channel)
        spoken = task.side.spoken
        cuts = [at_speed(channel[slice(*_samples(u))], u.speed) for u in spoken]
        if task.noise is not None:
            # By the id, so that a corpus in another folder gets the same noise.
            cuts = task.noise.added_to(cuts, first.id)
        energies = [log_mel(cut, task.num_mels) for cut in cuts]
        if all(bool((one == DIGITAL_SILENCE).all()) for one in energies):
            raise ValueError(
                "nothing but digital silence where words are transcribed; compare the "
                "channel with the disc"
            )
        frames = normalise_side(energies)
        for place, utterance in zip(task.places, frames, strict=True):
            place.put(utterance.numpy())
    except ValueError as error:  # a full disk is no fault of the side
        if _is_of_the_machine(error):
            raise OSError(
                f"{error}; `check` could read it: once this machine can, the same "
                "command continues"
            ) from error
        return f"{task.side.name}: {error}"
    return None


def _is_of_the_machine(error: BaseException | None) -> bool:
    """Whether an error came of a file or program that is missing or out of reach."""
    if isinstance(error, OSError | NoSph2pipeError):
        return True
    return error is not None and _is_of_the_machine(error.__cause__)
