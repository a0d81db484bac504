"""fMLLR of every conversation side: the first half of stage `adapt`.

The states of a training side come from the alignment with its transcript. The states of
a development or test side come from decoding it, first with the mixtures of the
alignment and then with adapted ones. Its transcript is never read, so a network's
errors on `dev` hold for the test sets. Silence says more about the line than about the
speaker and is left out of the estimate.

A map to mixtures of unadapted speech would have to do too much. So the mixtures are
trained for some rounds on the adapted training speech (speaker-adaptive training). The
last ones are left in `mixtures.npz`.
"""

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from lightning_adpsgd.asr.frames.writing import FrameWriter, is_stored
from lightning_adpsgd.asr.hmm import gmm
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.hmm.states import read_topology
from lightning_adpsgd.asr.language.lexicon import read_lexicon
from lightning_adpsgd.asr.parallel import in_order
from lightning_adpsgd.asr.speakers.adaptation import (
    DecodedMaps,
    silent_states,
    spoken_states,
)
from lightning_adpsgd.asr.speakers.fmllr import (
    Estimate,
    FmllrOptions,
    estimate,
    transformed,
)
from lightning_adpsgd.files import write_json
from recipes.hybrid.data.speakers import Speaker, Speakers
from recipes.hybrid.data.spreading import await_file, spread
from recipes.hybrid.pipeline.crew import finished
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition.decoder import own_decoder

_MAX_PARTS = 64  # of the training sides, whatever the number of processes

Listener = Callable[[Speaker, Sequence[np.ndarray]], Estimate]
"""Estimates a side's map from its utterances as the mixtures see them."""


def make_fmllr(settings: Settings, output: Path) -> dict[str, Any]:
    """Writes the stream of every split; returns the report.

    Machines share the sides. A process that does not lead returns nothing.
    """
    if not (output / "mixtures.npz").exists():
        _train(settings, output)
    await_file(settings, output, output / "mixtures.npz")
    mixtures = GaussianMixtures.load(output / "mixtures.npz")
    for split in settings.splits():
        if not is_stored(output / split / "fmllr"):
            _write_split(settings, split, output, mixtures)
    return _report(settings, output) if settings.crew.leads else {}


def _report(settings: Settings, output: Path) -> dict[str, Any]:
    report = json.loads((output / "rounds.json").read_text())
    for split in settings.splits():
        folder = output / split
        report[split] = json.loads((folder / "fmllr.json").read_text())
        print(f"  {split}: {_told(report[split])}", flush=True)
    return report


def _told(figures: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in figures["kinds"].items())
    return (
        f"maps of {figures['sides']} sides: {kinds}; log-likelihood a frame "
        f"{figures['before']:.2f} before, {figures['after']:.2f} after"
    )


def fmllr_options(settings: Settings) -> FmllrOptions:
    """How the map of a side is estimated."""
    chosen = settings.adapt
    return FmllrOptions(
        num_passes=chosen.passes,
        min_frames=chosen.min_frames,
        min_offset_frames=chosen.min_offset_frames,
    )


class _Round(NamedTuple):
    """Sums over sides: of the mixtures on adapted frames, and log-likelihoods."""

    sums: gmm.Statistics
    frames: int
    before: float
    after: float

    def plus(self, other: tuple) -> "_Round":
        return _Round(*(mine + its for mine, its in zip(self, other, strict=True)))


def _train(settings: Settings, output: Path) -> None:
    """Trains the mixtures of the alignment further, on adapted speech.

    All machines do, from the same sums; the leader writes the mixtures.
    """
    mixtures = GaussianMixtures.load(settings.directory("mixtures") / "gmm.npz")
    labels = settings.directory("mixtures") / "train" / "labels.npy"
    speakers = Speakers.of(settings, "train", labels)
    log = []
    rounds = range(settings.adapt.rounds)
    for number in (bar := tqdm(rounds, desc="adapted mixtures", unit="round")):
        found = _one_round(settings, output, number, speakers, mixtures)
        mixtures = gmm.update(mixtures, found.sums)
        before, after = found.before / found.frames, found.after / found.frames
        log.append({"before": before, "after": after})
        bar.set_postfix_str(f"log-likelihood {before:.2f} before, {after:.2f} after")
    if settings.crew.leads:
        write_json(output / "rounds.json", {"rounds": log})
        mixtures.save(output / "mixtures.npz")


def _one_round(
    settings: Settings,
    output: Path,
    number: int,
    speakers: Speakers,
    mixtures: GaussianMixtures,
) -> _Round:
    silent, options = _silence(settings), fmllr_options(settings)

    def one(side: Speaker) -> _Round:
        frames = [speakers.frames(position) for position in side.positions]
        states = [speakers.store.labels(p).numpy() for p in side.positions]
        spoken = [spoken_states(states_, silent) for states_ in states]
        found = estimate(mixtures, list(zip(frames, spoken, strict=True)), options)
        moved = transformed(found.transform, np.concatenate(frames))
        sums = gmm.accumulate(mixtures, moved, np.concatenate(states))
        return _Round(sums, found.frames, found.before, found.after)

    def work(part: Sequence[Speaker]) -> _Round:
        return functools.reduce(_Round.plus, map(one, part))

    size = -(-len(speakers.sides) // _MAX_PARTS)
    parts = [
        speakers.sides[at : at + size] for at in range(0, len(speakers.sides), size)
    ]
    found = spread(settings, output, f"fmllr-{number}", parts, work, to_all=True)
    return functools.reduce(_Round.plus, in_order(found))


def _silence(settings: Settings) -> np.ndarray:
    """Which states are of silence or noise, bool [states]."""
    lexicon = read_lexicon(settings.directory("lexicon"))
    topology = read_topology(settings.directory("mixtures") / "tree.json")
    return silent_states(lexicon, topology)


def _write_split(
    settings: Settings, split: str, output: Path, mixtures: GaussianMixtures
) -> None:
    """Estimates the map of every side and writes what it makes of the frames."""
    folder = output / split
    speakers, listen = _listener(settings, split, mixtures)
    writer = FrameWriter(
        folder / "fmllr",
        speakers.store.ids.tolist(),
        speakers.lengths.tolist(),
        mixtures.mean.shape[1],
        settings.features.dtype,
    )
    _begin(settings, output, writer)

    def work(side: Speaker) -> Estimate:
        frames = [speakers.frames(position) for position in side.positions]
        found = listen(side, frames)
        for position, own in zip(side.positions, frames, strict=True):
            writer.put(position, transformed(found.transform, own))
        return found

    found = spread(settings, output, f"fmllr-{split}", speakers.sides, work)
    bar = tqdm(found, desc=f"{split} fMLLR", total=len(speakers.sides), unit="side")
    estimates = list(in_order(bar))
    if not settings.crew.leads:
        return
    _save_transforms(folder / "transforms.npz", speakers.sides, estimates)
    write_json(folder / "fmllr.json", _figures(estimates))
    writer.finish()


def _begin(settings: Settings, output: Path, writer: FrameWriter) -> None:
    """Lays the frames out, or waits until the leader has."""
    crew = settings.crew
    if crew.leads:
        writer.create()
    else:
        crew.await_until(
            lambda: writer.is_begun() or is_stored(writer.folder),
            f"process 0 to lay out {writer.folder}",
            finished(output),
        )


def _save_transforms(
    path: Path, sides: Sequence[Speaker], estimates: Sequence[Estimate]
) -> None:
    partial = path.with_name(f".{path.name}.partial.npz")
    names = np.array([side.name for side in sides])
    maps = np.stack([estimate.transform for estimate in estimates])
    np.savez(partial, sides=names, transforms=maps)
    os.replace(partial, path)


def _figures(estimates: Sequence[Estimate]) -> dict[str, Any]:
    frames = max(1, sum(estimate.frames for estimate in estimates))
    return {
        "sides": len(estimates),
        "kinds": dict(Counter(estimate.kind for estimate in estimates)),
        "frames": frames,
        "before": sum(estimate.before for estimate in estimates) / frames,
        "after": sum(estimate.after for estimate in estimates) / frames,
    }


def _listener(
    settings: Settings, split: str, mixtures: GaussianMixtures
) -> tuple[Speakers, Listener]:
    """The sides of a split, and what estimates their maps."""
    if split == "train":
        labels = settings.directory("mixtures") / "train" / "labels.npy"
        speakers = Speakers.of(settings, split, labels)
        return speakers, _with_transcripts(settings, speakers, mixtures)
    return Speakers.of(settings, split, None), _with_decodings(settings, mixtures)


def _with_transcripts(
    settings: Settings, speakers: Speakers, mixtures: GaussianMixtures
) -> Listener:
    silent, options = _silence(settings), fmllr_options(settings)

    def listen(side: Speaker, frames: Sequence[np.ndarray]) -> Estimate:
        labels = (speakers.store.labels(p).numpy() for p in side.positions)
        known = [spoken_states(states, silent) for states in labels]
        return estimate(mixtures, list(zip(frames, known, strict=True)), options)

    return listen


def _with_decodings(settings: Settings, mixtures: GaussianMixtures) -> Listener:
    """Decodes `adapt.decodings` times, adapted from the second time on."""
    maps = DecodedMaps(
        own_decoder(settings),
        _silence(settings),
        GaussianMixtures.load(settings.directory("mixtures") / "gmm.npz"),
        mixtures,
        fmllr_options(settings),
        decodings=settings.adapt.decodings,
        acoustic_scale=settings.adapt.acoustic_scale,
    )
    return lambda side, frames: maps(frames)
