"""What files hold, in a few characters: a change that keeps name and size is one, too.

Texts, dictionaries, models and the like count whole. Of sound and archives of frames,
and of files above 64 MiB in a folder, a few blocks count, because 300 hours take
minutes to read: what changes between the blocks and keeps the size is not noticed.

Times do not count, because a copy has others and holds the same, also on another
machine of a crew. They only tell which files need not be read again.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.discs import find_files
from lightning_adpsgd.files import write_json
from recipes.hybrid.pipeline.settings import Settings

MOST_WHOLE = 64 << 20
_BLOCK, _NUM_BLOCKS = 4096, 8
_LENGTH = 16  # characters of a digest
SOUND = frozenset(
    (
        *(".sph", ".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3"),
        *(".aif", ".aiff", ".au", ".w64"),
    )
)
_IN_BLOCKS = SOUND | {".ark", ".npy"}
# Of folders into which Kaldi's programs write other things, too: what is read.
_READ = {
    "kaldi.experiment": ("final.mdl", "ali.*", "num_jobs", "cmvn_opts"),
    "kaldi.more_alignments": ("ali.*", "num_jobs"),
    "kaldi.data": ("segments", "reco2file_and_channel"),
}
_GRAPHS = (
    *("graph*/HCLG.fst", "graph*/words.txt", "graph*/num_pdfs"),
    "graph*/phones/*.int",
)
UNREADABLE = "unreadable"
"""Stands for the digest of a file that cannot be read."""
WHAT_IS_READ = " (what is read)"
"""Ends a label whose like without it was that of all files of the folder."""

# A file may change twice within what its clock tells apart, as on FAT.
_CLOCK_NS = 3 * 10**9


def digest_of(content: bytes) -> str:
    """A few characters that tell contents apart."""
    return hashlib.sha256(content).hexdigest()[:_LENGTH]


class Contents:
    """Digests of files, which remembers those of files that have not changed since.

    Args:
        memory: File of the digests that were found before.
        keeps: Whether new ones are written there, into a folder that is made if absent.
    """

    def __init__(self, memory: Path, keeps: bool) -> None:
        self._memory, self._keeps, self._is_new = memory, keeps, False
        self._known: dict[str, tuple[str, str]] = {}
        with suppress(OSError, ValueError):
            self._known = {k: (a, b) for k, (a, b) in _read(memory).items()}

    def of(self, path: Path, patterns: Collection[str] = ()) -> str | None:
        """The digest of a file or a folder, if it is there.

        Args:
            path: the file or folder.
            patterns: patterns of the files that count of a folder; empty: all.
        """
        if path.is_file():
            return self._of_file(path, True)
        if not path.is_dir():
            return None
        if patterns:
            return self.of_files(
                sorted({one for pattern in patterns for one in path.glob(pattern)})
            )
        with suppress(CorpusError):
            return self.of_files(one.path for one in find_files([path], Skipped()))
        return None

    def of_files(self, paths: Iterable[Path]) -> str:
        """The digest of several files, whose order counts and whose names do not."""
        lines = [self._of_file(path, False) for path in paths]
        return digest_of("\n".join(lines).encode())

    def of_output(self, path: Path) -> str:
        """The digest of a file of a stage, as `digests_in` has it."""
        return self._of_file(path, path.suffix not in _IN_BLOCKS)

    def save(self) -> None:
        """Writes the digests that are new, unless the folder can only be read.

        The first stage of an experiment reads the whole corpus before it has a folder.
        """
        if self._keeps and self._is_new:
            with suppress(OSError):
                self._memory.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._memory, self._known)
            self._is_new = False

    def _of_file(self, path: Path, is_named: bool) -> str:
        try:
            found = path.stat()
            whole = is_named or (
                found.st_size <= MOST_WHOLE and path.suffix.lower() not in _IN_BLOCKS
            )
            times = found.st_mtime_ns, found.st_ctime_ns
            identity = " ".join(map(str, (found.st_size, *times, found.st_ino, whole)))
            before = self._known.get(str(path))
            if before is not None and before[0] == identity:
                return before[1]
            digest = _digest(path, found.st_size, whole)
        except OSError:
            return UNREADABLE  # which the stage tells, with the remedy
        if max(times) < time.time_ns() - _CLOCK_NS:
            self._known[str(path)] = identity, digest
            self._is_new = True
        return digest


def digests_in(folder: Path, besides: Collection[str] = ()) -> dict[str, str]:
    """Digests of all files in a folder, by their names there.

    Of archives of frames a few blocks count; all others count whole.

    Args:
        folder: the folder.
        besides: names of files and folders in it that are left out.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] in besides:
            continue
        with suppress(OSError):  # what others write, and take away
            if path.is_file():
                whole, size = path.suffix not in _IN_BLOCKS, path.stat().st_size
                found[name.as_posix()] = _digest(path, size, whole)
    return found


def _read(memory: Path) -> dict[str, Any]:
    return json.loads(memory.read_text())


def _digest(path: Path, size: int, whole: bool) -> str:
    with path.open("rb") as file:
        if whole or size <= _BLOCK * _NUM_BLOCKS:
            return hashlib.file_digest(file, "sha256").hexdigest()[:_LENGTH]
        sums = hashlib.sha256(str(size).encode())
        for place in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK) * place // (_NUM_BLOCKS - 1))
            sums.update(file.read(_BLOCK))
        return sums.hexdigest()[:_LENGTH]


def read_of(
    settings: Settings, name: str
) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """The paths in a setting or a group of settings, and what is read of them.

    Yields:
        A label; the path; patterns of what is read of a folder, empty: all.
    """
    group, experiment = attrgetter(name)(settings), settings.kaldi.experiment
    if name == "kaldi.graph" and group is None and experiment is not None:
        yield f"{name} (the experiment's)", experiment, _GRAPHS
    for label, path in _paths_of(group, name):
        patterns = _READ.get(label.partition("[")[0], ())
        yield label + (WHAT_IS_READ if patterns else ""), path, patterns


def _paths_of(group: Any, name: str) -> Iterator[tuple[str, Path]]:
    """The paths that the values of a group of settings are, by the settings' names.

    Of several in one setting, each has its number. Names that need not be of a file
    (`kaldi.fmllr`) count where they are.
    """
    if isinstance(group, Path) and "." in name:  # one value of a group
        yield name, group
    if not dataclasses.is_dataclass(group):
        return
    for field in dataclasses.fields(group):
        value, label = getattr(group, field.name), f"{name}.{field.name}"
        if isinstance(value, Path):
            yield label, value
        elif isinstance(value, tuple):
            for place, one in enumerate(value):
                if isinstance(one, Path) or (isinstance(one, str) and "/" in one):
                    yield f"{label}[{place}]", Path(one)
