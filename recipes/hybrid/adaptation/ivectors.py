"""I-vectors of every conversation side: the second half of stage `adapt`.

A mixture of all speech and the total-variability model are trained on `train`. Every
split gets the i-vectors of its sides: one for the whole side, or one every
`adapt.ivector_period` frames from what was heard before. No words are needed. The
occupancies of the sides stay on disk, not in memory, while the model is trained.
Machines share the sides; mixture and model are trained by the leader.
"""

import json
import os
import shutil
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import open_memmap
from tqdm import tqdm

from lightning_adpsgd.asr.frames.shards import write_rows
from lightning_adpsgd.asr.frames.streams import RowWriter
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.speakers.ivectors import IVectorExtractor, train_extractor
from lightning_adpsgd.asr.speakers.ubm import num_steps, occupancy, train_ubm
from lightning_adpsgd.files import write_json
from recipes.hybrid.data.speakers import Speaker, Speakers
from recipes.hybrid.data.spreading import await_file, spread
from recipes.hybrid.pipeline.settings import Settings

_ITERATIONS = 6  # of the mixture, at each size
_BLOCK = 64  # sides whose i-vectors are found at a time
_SPREAD = 10  # frames of the sampled utterances, per frame that is taken
_OCCUPANCIES = ".occupancies"


def make_ivectors(settings: Settings, output: Path) -> dict[str, Any]:
    """Writes the stream of every split; returns the report.

    A process that does not lead does its share, and returns nothing.
    """
    if settings.crew.leads and not (output / "ubm.npz").exists():
        _train_ubm(settings, output)
    await_file(settings, output, output / "ubm.npz")
    ubm = GaussianMixtures.load(output / "ubm.npz")
    if not (output / "ivectors.npz").exists():
        _train_extractor(settings, output, ubm)
    await_file(settings, output, output / "ivectors.npz")
    extractor = IVectorExtractor.load(output / "ivectors.npz")
    for split in settings.splits():
        if not (output / split / "ivector" / "rows.npy").exists():
            _write_split(settings, split, output, ubm, extractor)
    if not settings.crew.leads:
        return {}
    shutil.rmtree(output / _OCCUPANCIES, ignore_errors=True)
    names = ("ubm", "ivectors")
    return {name: json.loads((output / f"{name}.json").read_text()) for name in names}


def _train_ubm(settings: Settings, output: Path) -> None:
    chosen = settings.adapt
    steps = train_ubm(
        _sample(Speakers.of(settings, "train", None), chosen.max_frames),
        chosen.num_gaussians,
        num_iterations=_ITERATIONS,
        seed=settings.seed,
        num_processes=settings.cores,
    )
    total = num_steps(chosen.num_gaussians, _ITERATIONS)
    log, ubm = [], None
    for step in (bar := tqdm(steps, "mixture of all", total, unit="iteration")):
        ubm = step.ubm
        log.append(step.log_likelihood)
        bar.set_postfix_str(f"log-likelihood {step.log_likelihood:.2f} a frame")
    assert ubm is not None
    write_json(output / "ubm.json", {"log_likelihood": log})
    ubm.save(output / "ubm.npz")


def _sample(speakers: Speakers, most: int) -> np.ndarray:
    """At most `most` frames, evenly from utterances that are evenly taken."""
    lengths = speakers.lengths
    fraction = min(1.0, _SPREAD * most / lengths.sum())
    number = max(1, round(fraction * len(lengths)))
    chosen = np.arange(number) * len(lengths) // number
    step = max(1, -(-int(lengths[chosen].sum()) // most))
    parts = [speakers.frames(position)[::step] for position in chosen.tolist()]
    return np.concatenate(parts)


class _Occupancies(NamedTuple):
    """N [sides, gaussians] and F [sides, gaussians, dims] of a split, mapped."""

    counts: np.ndarray
    deviations: np.ndarray


def _occupancies(
    settings: Settings,
    split: str,
    output: Path,
    speakers: Speakers,
    ubm: GaussianMixtures,
) -> _Occupancies | None:
    """The occupancies of a split, from an earlier call or computed.

    None in a process that does not lead.
    """
    folder = output / _OCCUPANCIES / split
    paths = folder / "counts.npy", folder / "deviations.npy"
    if settings.crew.leads and not (folder / "laid").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shapes = (len(ubm.weight),), ubm.mean.shape
        for path, shape in zip(paths, shapes, strict=True):
            open_memmap(path, "w+", np.float32, (len(speakers.sides), *shape)).flush()
        (folder / "laid").touch()
    await_file(settings, output, folder / "laid")
    if not (folder / "complete").exists():
        _fill(settings, split, output, speakers, ubm, paths)
    if not settings.crew.leads:
        return None
    for path in paths:  # which must not be lost behind the file that says so
        with path.open("rb") as file:
            os.fsync(file.fileno())
    (folder / "complete").touch()
    return _Occupancies(*(np.load(path, mmap_mode="r") for path in paths))


def _fill(
    settings: Settings,
    split: str,
    output: Path,
    speakers: Speakers,
    ubm: GaussianMixtures,
    paths: tuple[Path, Path],
) -> None:
    def work(number: int) -> None:
        positions = speakers.sides[number].positions
        frames = np.concatenate([speakers.frames(p) for p in positions])
        for path, part in zip(paths, occupancy(ubm, frames), strict=True):
            array = np.load(path, mmap_mode="r")
            row = part.astype(np.float32).reshape(1, -1)
            write_rows(path, array.offset, number, row)

    sides = range(len(speakers.sides))
    done = spread(settings, output, f"occupancy-{split}", sides, work)
    for _ in tqdm(done, f"{split} occupancy", len(sides), unit="side"):
        pass


def _train_extractor(settings: Settings, output: Path, ubm: GaussianMixtures) -> None:
    """Trains it in the leader, of occupancies that all machines find."""
    chosen = settings.adapt
    speakers = Speakers.of(settings, "train", None)
    heard = _occupancies(settings, "train", output, speakers, ubm)
    if heard is None:
        return
    if len(speakers.sides) < chosen.ivector_dims:
        print(
            f"  WARNING: i-vectors of {chosen.ivector_dims} dimensions are trained on "
            f"{len(speakers.sides)} sides; fewer dimensions than sides would describe "
            "a speaker, more only name it",
            flush=True,
        )
    steps = train_extractor(
        *heard,
        chosen.ivector_dims,
        num_iterations=chosen.ivector_iterations,
        frame_weight=chosen.frame_weight,
        seed=settings.seed,
        num_processes=settings.cores,
    )
    log, extractor = [], None
    bar = tqdm(steps, "i-vectors", chosen.ivector_iterations, unit="iteration")
    for step in bar:
        extractor = step.extractor
        log.append(step.gain)
        bar.set_postfix_str(f"gain {step.gain:.3f} a frame")
    assert extractor is not None
    write_json(output / "ivectors.json", {"gain": log, "sides": len(speakers.sides)})
    extractor.save(output / "ivectors.npz")


def _write_split(
    settings: Settings,
    split: str,
    output: Path,
    ubm: GaussianMixtures,
    extractor: IVectorExtractor,
) -> None:
    speakers = Speakers.of(settings, split, None)
    folder = output / split / "ivector"
    if settings.adapt.ivector_period:
        _write_online(settings, split, output, speakers, ubm, extractor)
        return
    heard = _occupancies(settings, split, output, speakers, ubm)
    if heard is None:
        return
    first = np.zeros(len(speakers.store), np.int64)
    for number, side in enumerate(speakers.sides):
        first[side.positions] = number
    writer = RowWriter(folder, first, len(speakers.sides), extractor.size, 0)
    for at in range(0, len(speakers.sides), _BLOCK):
        block = slice(at, at + _BLOCK)
        known = extractor.posterior(heard.counts[block], heard.deviations[block])
        writer.put(at, known.mean)
    writer.finish()


def _write_online(
    settings: Settings,
    split: str,
    output: Path,
    speakers: Speakers,
    ubm: GaussianMixtures,
    extractor: IVectorExtractor,
) -> None:
    period = settings.adapt.ivector_period

    def work(side: Speaker) -> list[np.ndarray]:
        heard, rows = extractor.nothing_heard(), []
        for position in side.positions:
            frames = speakers.frames(position)
            found, heard = extractor.online(ubm, frames, period, heard)
            rows.append(found.astype(np.float32))
        return rows

    found = spread(settings, output, f"ivectors-{split}", speakers.sides, work)
    if not settings.crew.leads:
        deque(found, maxlen=0)  # leaves its share
        return
    ends = np.cumsum(-(-speakers.lengths // period))
    first, folder = np.append(0, ends[:-1]), output / split / "ivector"
    writer = RowWriter(folder, first, int(ends[-1]), extractor.size, period)
    bar = tqdm(found, f"{split} i-vectors", len(speakers.sides), unit="side")
    for number, rows in bar:
        positions = speakers.sides[number].positions
        for position, values in zip(positions, rows, strict=True):
            writer.put(int(first[position]), values)
    writer.finish()
