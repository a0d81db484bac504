"""The files of discs, however they were copied or mounted.

Names are compared in lower case and without the version of an ISO 9660 mount, so that
`SW02001.SPH;1` is `sw02001.sph`. Links to folders are followed, because discs are often
combined by links. A folder is entered only once, so that circular links end.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped

_VERSION = re.compile(r"\.?;\d+$|\.$")
_OF_FILES = re.compile(r".*\.(sph|text|stm|pem|glm|tbl)")


class DiscFile(NamedTuple):
    """One file.

    Attributes:
        path: Location of the file.
        name: Its name in lower case, without the version of an ISO 9660 mount.
    """

    path: Path
    name: str

    @property
    def stem(self) -> str:
        """The name without its ending."""
        return self.name.rpartition(".")[0] or self.name


def find_files(roots: Iterable[Path], skipped: Skipped) -> list[DiscFile]:
    """All files below the folders, sorted by path, without hidden ones.

    It counts folders that cannot be entered or have names of files, broken links, and
    entries that are neither file nor folder.

    Raises:
        CorpusError: An element of `roots` is not a folder.
    """
    seen: set[tuple[int, int]] = set()
    found: dict[Path, DiscFile] = {}
    for root in roots:
        if not root.is_dir():
            raise CorpusError(
                f"{root}: expected the folder of a corpus, but it does not exist; "
                "give the folder that the discs were copied to"
            )
        if _is_first(root, seen, Skipped()):  # given twice, it is searched once
            for path in _walk(root, seen, skipped):
                found[path] = DiscFile(path, plain_name(path.name))
    return [found[path] for path in sorted(found)]


def plain_name(name: str) -> str:
    """A file's name in lower case, without the version of an ISO 9660 mount."""
    return _VERSION.sub("", name.lower())


def _walk(root: Path, seen: set[tuple[int, int]], skipped: Skipped) -> Iterator[Path]:
    def refused(error: OSError) -> None:
        where = f"{error.filename}: {error.strerror}"
        remedy = "make it readable: chmod -R u+rX"
        skipped.add("folder that cannot be entered", where, remedy=remedy)

    for folder, folders, names in os.walk(root, onerror=refused, followlinks=True):
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".") and _is_first(Path(folder, name), seen, skipped)
        ]
        for name in folders:
            if _OF_FILES.fullmatch(plain_name(name)):
                where, remedy = str(Path(folder, name)), "copy the file of that name"
                skipped.add("folder in the place of a file", where, remedy=remedy)
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and _is_file(path, skipped):
                yield path


def _is_first(folder: Path, seen: set[tuple[int, int]], skipped: Skipped) -> bool:
    """Whether a folder has not been entered before by another path."""
    found = folder.stat()
    identity = found.st_dev, found.st_ino
    if identity in seen:
        remedy = "entered once; nothing to do"
        skipped.add(
            "folder that is linked twice or in a loop", str(folder), remedy=remedy
        )
        return False
    seen.add(identity)
    return True


def _is_file(path: Path, skipped: Skipped) -> bool:
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        remedy = "mount the disc it points to, or remove it"
        where = f"{path}: {error.strerror}"
        skipped.add("broken link", where, remedy=remedy)
        return False
    if not is_file:
        remedy = "copy the file of that name, or remove it"
        skipped.add("neither file nor folder", str(path), remedy=remedy)
    return is_file
