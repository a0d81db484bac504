"""Which tests must notice a change in which room: the one table of `make mutants`.

Only fast tests are here: those that take seconds, in one process but for those of exact
resumes. The tests with several processes notice much of the same, minutes later.
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
        """All test files of the room: the one named after `source`, then quick ones."""
        matching = _matching(root, "tests", (*_OF_ALL_ROOMS, *self.tests))
        files = list(dict.fromkeys(map(str, matching)))
        seconds = _seconds(root)
        files.sort(key=lambda file: seconds.get(file, 0.0))
        return sorted(files, key=lambda file: not file.endswith(f"_{source.stem}.py"))


# What holds in every file of the core.
_OF_ALL_ROOMS = ("test_conventions.py",)
_ISLANDS = (
    "islands/test_[cjmpt]*.py",
    "islands/test_waiting.py",
    "islands/test_[rs]*.py",
    "islands/test_island*.py",
    "islands/test_wide_islands.py",
    "topology/test_schedule.py",
)
# Three rooms are in two parts, so that the handshake, the member list and the ledger
# have a share of the mutants that is theirs alone.
ROOMS = {
    "topology": Room(
        ("topology/*.py",), ("topology/test_*.py", "mixing/test_mixing.py")
    ),
    "weights": Room(
        ("weights/*.py",),
        (
            "weights/test_*.py",
            "mixing/test_[qst]*.py",
            "gossip/test_engine.py",
        ),
    ),
    "coordination": Room(
        ("coordination/*.py", "coordination/startup/*.py"),
        ("coordination/test_*.py", "coordination/startup/test_[cs]*.py"),
    ),
    "mixing": Room(("mixing/*.py",), ("mixing/test_*.py", "gossip/test_engine.py")),
    "gossip": Room(("gossip/*.py",), ("gossip/test_[bmpqrw]*.py", "gossip/test_*.py")),
    "handshake": Room(
        tuple(
            f"transport/links/{name}.py"
            for name in ("handshake", "peer_info", "credentials", "issuing")
        ),
        ("transport/links/test_*.py",),
    ),
    "links": Room(
        tuple(
            f"transport/links/{name}.py"
            for name in ("connection", "listener", "sockets", "transport")
        ),
        ("transport/links/test_*.py",),
    ),
    "list": Room(
        ("islands/member*.py", "islands/peer_status.py", "islands/signatures.py"),
        _ISLANDS,
    ),
    "islands": Room(
        (
            "islands/island.py",
            *(f"islands/{letter}*.py" for letter in ("c", "j", "mean", "r", "se", "w")),
        ),
        _ISLANDS,
    ),
    "ledger": Room(
        tuple(f"epochs/{name}.py" for name in ("ledger", "claims", "lease")),
        ("epochs/test_*.py",),
    ),
    "epochs": Room(
        tuple(
            f"epochs/{name}.py" for name in ("batches", "pool", "ranges", "work_units")
        ),
        ("epochs/test_*.py",),
    ),
    "checkpoints": Room(
        ("strategy/checkpoints/*.py", "files.py"),
        (
            "strategy/checkpoints/test_[flm]*.py",
            "strategy/checkpoints/test_saving.py",
            "strategy/checkpoints/test_sharded.py",
            "strategy/checkpoints/test_exact_resume_integration.py",
            "test_files.py",
        ),
    ),
}


def _seconds(root: Path) -> dict[str, float]:
    lines = (root / "tests" / "seconds.txt").read_text().splitlines()
    return {file: float(seconds) for seconds, _, file in map(str.split, lines)}


def _matching(root: Path, folder: str, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        found = sorted((root / folder).glob(pattern))
        if not found:
            raise FileNotFoundError(f"no file matches {folder}/{pattern}")
        yield from (path.relative_to(root) for path in found)
