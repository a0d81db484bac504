"""Which tests must notice a change in which room: the one table of `make mutants`.

Only fast tests are here: those that run in one process and take seconds. The tests with
several processes notice much of the same, minutes later.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Room(NamedTuple):
    """A part of the package and the tests that hold its properties.

    Args:
        sources: patterns of its files, below `lightning_adpsgd/`.
        tests: patterns of its test files, below `tests/`.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]

    def source_files(self, root: Path) -> list[Path]:
        """All files of the room, as paths below `root`."""
        return list(_matching(root, "lightning_adpsgd", self.sources))

    def test_files(self, root: Path, source: Path) -> list[str]:
        """All test files of the room; first the one that has the name of `source`."""
        files = [str(path) for path in _matching(root, "tests", self.tests)]
        return sorted(files, key=lambda file: not file.endswith(f"_{source.stem}.py"))


ROOMS = {
    "topology": Room(
        ("topology/*.py",), ("topology/test_*.py", "mixing/test_mixing.py")
    ),
    "weights": Room(
        ("weights/*.py",),
        ("weights/test_*.py", "mixing/test_super_learner.py", "gossip/test_engine.py"),
    ),
    "mixing": Room(("mixing/*.py",), ("mixing/test_*.py", "gossip/test_engine.py")),
    "gossip": Room(("gossip/*.py",), ("gossip/test_*.py",)),
    "links": Room(("transport/links/*.py",), ("transport/links/test_*.py",)),
    "islands": Room(
        ("islands/*.py",),
        (
            "islands/test_membership.py",
            "islands/test_islands.py",
            "islands/test_setting_up.py",
            "topology/test_live.py",
        ),
    ),
    "epochs": Room(("epochs/*.py",), ("epochs/test_*.py",)),
    "checkpoints": Room(
        ("strategy/checkpoints/*.py", "files.py"),
        ("strategy/checkpoints/test_[fls]*.py",),
    ),
}


def _matching(root: Path, folder: str, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        found = sorted((root / folder).glob(pattern))
        if not found:
            raise FileNotFoundError(f"no file matches {folder}/{pattern}")
        yield from (path.relative_to(root) for path in found)
