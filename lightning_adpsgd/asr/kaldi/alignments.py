"""The import of Kaldi alignments as labels of a store's frames."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightning_adpsgd.asr.corpora.corpus import Skipped
from lightning_adpsgd.asr.frames.store import FrameStore, write_labels
from lightning_adpsgd.asr.kaldi.archives import read_alignments
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.kaldi.names import LEAST_COVERAGE, Names, check_coverage

SNIPPED = 2
"""Frames that Kaldi lacks: its windows stay inside the utterance (snip-edges)."""

TOLERANCE = 2
"""Frames by which an alignment may be longer or shorter beyond that.

Kaldi's recipe for Switchboard rounds begins and ends of utterances to 10 ms, which
removes or adds one.
"""


def alignment_files(folder: str | Path) -> list[Path]:
    """The files `ali.1.gz`, `ali.2.gz` ... (or `ali.1`) of a folder, by number.

    Raises:
        KaldiError: There is no file, a number is missing, or `num_jobs` differs.
    """
    folder = Path(folder)
    numbered: dict[int, Path] = {}
    for path in folder.glob("ali.*"):
        match = re.fullmatch(r"ali\.(\d+)(\.gz)?", path.name)
        if match:
            numbered[int(match[1])] = path
    missing = set(range(1, max(numbered, default=0) + 1)) - set(numbered)
    if not numbered or missing:
        wanted = f"ali.{min(missing, default=1)}.gz"
        raise KaldiError(
            f"{folder}: expected alignments ali.1.gz ..., but {wanted} is missing; "
            "copy all of them, or align again"
        )
    _check_jobs(folder, len(numbered))
    return [numbered[number] for number in sorted(numbered)]


def _check_jobs(folder: Path, found: int) -> None:
    path = folder / "num_jobs"
    jobs = path.read_text().strip() if path.exists() else ""
    if jobs.isdecimal() and int(jobs) != found:
        raise KaldiError(
            f"{folder}: num_jobs says {jobs} files ali.*.gz, found {found}; copy all "
            "of them, or align again"
        )


@dataclass
class Imported:
    """The result of importing alignments.

    Attributes:
        counts: Number of frames of each pdf, int64 [pdfs].
        num_labelled: Number of frames with a label.
        skipped: Counts of utterances that were fitted, refused or missing, with
            examples.
        labelled: Names of the utterances that have labels.
        coverage: Their share of the store, as a sentence.
    """

    counts: np.ndarray
    num_labelled: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    labelled: set[str] = field(default_factory=set)
    coverage: str = ""


def import_labels(
    files: Iterable[Path],
    transitions: Transitions,
    store: FrameStore,
    labels: Path,
    *,
    names: Names | None = None,
    least_coverage: float = LEAST_COVERAGE,
) -> Imported:
    """Writes the pdfs of alignments as the labels of a store.

    `fit_frames` fits the lengths of alignments, and those that are too long or too
    short are refused. Utterances of the store without an alignment have no labels.

    Args:
        files: Archives of transition-ids, for example `alignment_files(...)`.
        transitions: Transitions of the model that made the alignments.
        store: Frames to be labelled; alignments of other utterances are ignored.
        labels: File to write.
        names: Kaldi's names of the store's utterances; None: the same names.
        least_coverage: Smallest share of the utterances that must have labels.

    Raises:
        KaldiError: An archive is damaged or does not fit the model, or fewer utterances
            of the store have an alignment that fits.
    """
    imported = Imported(np.zeros(transitions.num_pdfs, np.int64))
    seen: set[str] = set()
    alignments = _labelled(
        files, transitions, store, names or Names(store.ids), imported, seen
    )
    imported.num_labelled = write_labels(labels, store, alignments)
    _count_missing(imported, store, seen)
    if imported.num_labelled == 0:
        examples = "; ".join(imported.skipped.report())
        raise KaldiError(f"{labels}: no utterance could be labelled: {examples}")
    missing = [name for name in map(str, store.ids) if name not in imported.labelled]
    imported.coverage = check_coverage("labels", missing, len(store), least_coverage)
    return imported


def _labelled(
    files: Iterable[Path],
    transitions: Transitions,
    store: FrameStore,
    names: Names,
    imported: Imported,
    seen: set[str],
) -> Iterator[tuple[str, np.ndarray]]:
    """The labels of each utterance, under the store's name, with their number."""
    for path in files:
        for kaldi_name, ids in read_alignments(path):
            name = names.find(kaldi_name)
            if name is None or name in seen:
                continue
            seen.add(name)
            pdfs = _pdfs(path, kaldi_name, ids, transitions)
            start, end = store.spans[store.position(name)]
            fitted = fit_frames(pdfs, int(end - start))
            where = f"{name} ({len(ids)} labels for {end - start} frames, in {path})"
            _count(imported, where, len(ids), fitted)
            if fitted is not None:
                imported.labelled.add(name)
                yield name, fitted


def _pdfs(
    path: Path, name: str, ids: np.ndarray, transitions: Transitions
) -> np.ndarray:
    try:
        return transitions.pdfs_of(ids)
    except KaldiError as error:
        raise KaldiError(f"{path}, utterance {name}: {error}") from error


def fit_frames(values: np.ndarray, num_frames: int) -> np.ndarray | None:
    """Fits Kaldi's rows to this package's frames: [num_frames, ...].

    Frame i is centred on 10 i + 5 ms here, and on 10 i + 12.5 ms in Kaldi, whose
    windows stay inside the utterance. So Kaldi has two frames fewer, one at each end.
    Half of the missing rows are added in front, by repeating the first row, and the
    rest behind, by repeating the last. Extra rows are cut at the end.

    Returns:
        The rows; None if more than `TOLERANCE` are extra, or more than `SNIPPED` +
        `TOLERANCE` are missing.
    """
    missing = num_frames - len(values)
    if len(values) == 0 or not -TOLERANCE <= missing <= SNIPPED + TOLERANCE:
        return None
    before = max(0, missing) // 2
    edges = [(before, max(0, missing) - before), *[(0, 0)] * (values.ndim - 1)]
    return np.pad(values[:num_frames], edges, mode="edge")


def _count(
    imported: Imported, where: str, length: int, pdfs: np.ndarray | None
) -> None:
    if pdfs is None:
        reason = "alignment of another length, refused"
        imported.skipped.add(reason, where, length / 100)
        return
    imported.counts += np.bincount(pdfs, minlength=len(imported.counts))
    if len(pdfs) - length not in (0, SNIPPED):
        imported.skipped.add("alignment cut or padded", where)


def _count_missing(imported: Imported, store: FrameStore, seen: set[str]) -> None:
    for name, (start, end) in zip(store.ids, store.spans, strict=True):
        if str(name) not in seen:
            seconds = float(end - start) / 100
            imported.skipped.add("without an alignment", str(name), seconds)
