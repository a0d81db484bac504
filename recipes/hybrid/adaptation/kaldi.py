"""Streams of stage `adapt` from archives of Kaldi: fMLLR frames and i-vectors.

Tables (`feats.scp`) name archives, or archives are named directly. Utterances are found
by recording, side and times (`kaldi/names.py`). `cmvn.scp` beside a table `feats.scp`
is applied. fMLLR is fitted to the frames as alignments are. I-vectors that are up to
two rows too long are cut; up to two rows too short, they repeat their last row. An
utterance that no archive has gets zeros, and is counted; too many stop the stage.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from lightning_adpsgd.asr.corpora.corpus import Skipped
from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.frames.streams import RowWriter
from lightning_adpsgd.asr.frames.writing import FrameWriter
from lightning_adpsgd.asr.kaldi.alignments import SNIPPED, TOLERANCE, fit_frames
from lightning_adpsgd.asr.kaldi.archives import read_matrices
from lightning_adpsgd.asr.kaldi.cmvn import cmvn_beside
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.names import check_coverage
from recipes.hybrid.data.kaldi import names_of
from recipes.hybrid.pipeline.settings import Settings


class _Found(NamedTuple):
    """A matrix of an archive, and the utterance of the store that it belongs to."""

    name: str
    position: int
    num_frames: int
    rows: np.ndarray


def make_fmllr(settings: Settings, output: Path) -> dict[str, Any]:
    """Writes `fmllr` of every split; returns the report.

    Raises:
        KaldiError: An archive is damaged, or has nothing for a split.
    """
    sources = settings.kaldi.fmllr
    return {
        split: _frames(settings, split, sources, output / split / "fmllr")
        for split in settings.splits()
    }


def _frames(
    settings: Settings, split: str, sources: Sequence[str], folder: Path
) -> dict[str, Any]:
    store = FrameStore(settings.directory("features") / split)
    found = _matrices(settings, split, sources, store)
    first = next(found, None)
    if first is None:
        raise _nothing(split, "kaldi.fmllr", sources)
    dims, lengths = first.rows.shape[1], (store.spans[:, 1] - store.spans[:, 0])
    dtype = settings.features.dtype
    writer = FrameWriter(folder, list(store.ids), lengths.tolist(), dims, dtype)
    writer.create()
    progress = _Progress(store, split, "kaldi.fmllr")
    for one in _chained(first, found):
        rows = _fit(one, dims, progress.skipped)
        if rows is not None:
            writer.put(one.position, rows)
            progress.has(one)
    writer.finish()
    return progress.report(settings.kaldi.least_coverage)


def make_ivectors(settings: Settings, output: Path) -> dict[str, Any]:
    """Writes `ivector` of every split; returns the report.

    Raises:
        KaldiError: An archive is damaged, or has nothing for a split.
    """
    return {
        split: _rows(settings, split, output / split / "ivector")
        for split in settings.splits()
    }


def _rows(settings: Settings, split: str, folder: Path) -> dict[str, Any]:
    sources, period = settings.kaldi.ivectors, settings.kaldi.ivector_period
    store = FrameStore(settings.directory("features") / split)
    found = _matrices(settings, split, sources, store)
    first = next(found, None)
    if first is None:
        raise _nothing(split, "kaldi.ivectors", sources)
    lengths = store.spans[:, 1] - store.spans[:, 0]
    counts = -(-lengths // period) if period else np.ones(len(store), np.int64)
    starts, dims = np.cumsum(counts) - counts, first.rows.shape[1]
    writer = RowWriter(folder, starts, int(counts.sum()), dims, period)
    progress = _Progress(store, split, "kaldi.ivectors")
    for one in _chained(first, found):
        rows = _fit_periods(one, int(counts[one.position]), dims, progress.skipped)
        if rows is not None:
            writer.put(int(starts[one.position]), rows)
            progress.has(one)
    writer.finish()
    return progress.report(settings.kaldi.least_coverage)


def _matrices(
    settings: Settings, split: str, sources: Sequence[str], store: FrameStore
) -> Iterator[_Found]:
    """The matrices of the store's utterances, each once, normalised."""
    seen: set[str] = set()
    names = names_of(settings, store)
    for source in sources:
        cmvn = cmvn_beside(source, _cmvn_options(settings))
        if cmvn is not None:
            print(f"  {source}: cmvn.scp beside it is applied", flush=True)
        matrices = tqdm(read_matrices(source), f"{split}, {source}", unit="utt")
        for kaldi_name, rows in matrices:
            name = names.find(kaldi_name)
            if name is not None and name not in seen and len(rows):
                seen.add(name)
                position = store.position(name)
                start, end = store.spans[position]
                if cmvn is not None:
                    rows = cmvn.apply(kaldi_name, rows)
                yield _Found(name, position, int(end - start), rows)


def _cmvn_options(settings: Settings) -> Path | None:
    folder = settings.kaldi.experiment
    return None if folder is None else folder / "cmvn_opts"


def _chained(first: _Found, others: Iterator[_Found]) -> Iterator[_Found]:
    yield first
    yield from others


def _nothing(split: str, setting: str, sources: Sequence[str]) -> KaldiError:
    return KaldiError(
        f"{split}: {setting} ({', '.join(sources)}) has none of its utterances; name "
        "further archives after a comma"
    )


def _fit(found: _Found, dims: int, skipped: Skipped) -> np.ndarray | None:
    """A row for every frame, or None if the archive has too many or too few."""
    _check_dims(found, dims)
    rows = fit_frames(found.rows, found.num_frames)
    if found.num_frames - len(found.rows) != SNIPPED:
        _count_fitted(found, found.num_frames, rows is not None, skipped)
    return rows


def _fit_periods(
    found: _Found, count: int, dims: int, skipped: Skipped
) -> np.ndarray | None:
    """The wanted number of rows, or None if the archive has too many or too few."""
    _check_dims(found, dims)
    missing = count - len(found.rows)
    fits = abs(missing) <= TOLERANCE
    _count_fitted(found, count, fits, skipped)
    if not fits:
        return None
    return np.pad(found.rows[:count], ((0, max(0, missing)), (0, 0)), mode="edge")


def _check_dims(found: _Found, dims: int) -> None:
    if found.rows.shape[1] != dims:
        raise KaldiError(
            f"utterance {found.name}: expected {dims} values a row as before, found "
            f"{found.rows.shape[1]}"
        )


def _count_fitted(found: _Found, count: int, fits: bool, skipped: Skipped) -> None:
    if not fits:
        where = f"{found.name} ({len(found.rows)} rows, {count} wanted)"
        skipped.add("rows of another length, zeros in their place", where)
    elif len(found.rows) != count:
        where = f"{found.name} ({len(found.rows)} for {count})"
        skipped.add("rows cut or repeated", where)


class _Progress:
    """The utterances of a split that have their rows."""

    def __init__(self, store: FrameStore, split: str, source: str) -> None:
        self.skipped = Skipped()
        self._store, self._split, self._source = store, split, source
        self._present = np.zeros(len(store), bool)

    def has(self, found: _Found) -> None:
        """Notes that an utterance has its rows."""
        self._present[found.position] = True

    def report(self, least_coverage: float) -> dict[str, Any]:
        """Prints what is missing; returns the number of utterances that have rows.

        Raises:
            KaldiError: They are a smaller share than `least_coverage`.
        """
        missing = []
        for position in np.flatnonzero(~self._present).tolist():
            start, end = self._store.spans[position]
            name, seconds = str(self._store.ids[position]), float(end - start) / 100
            self.skipped.add("without rows, zeros in their place", name, seconds)
            missing.append(name)
        what = f"rows of {self._source}"
        covered = check_coverage(what, missing, len(self._store), least_coverage)
        print(f"  {self._split}: {covered}", flush=True)
        for line in self.skipped.report():
            print(f"  WARNING: {self._split}: {line}", flush=True)
        return {"utterances": int(self._present.sum()), "skipped": self.skipped.counts}
