"""The discs that tests of recipes share, generated once for all workers."""

import fcntl
import os
from pathlib import Path

import pytest

from recipes.generated import corpus

#: As little speech of every source as makes a corpus.
DISCS = {
    "minutes": 0.5,
    "test_minutes": 0.2,
    "fisher_minutes": 0.2,
    "callhome_minutes": 0.2,
}
SEED = 3


@pytest.fixture(scope="session")
def discs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Discs of all sources with half a minute of training speech; read only."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "discs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        corpus.write_corpus(shared / "discs", **DISCS, seed=SEED, processes=2)
    return shared / "discs"
