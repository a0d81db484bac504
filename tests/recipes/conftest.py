"""What tests of recipes share: discs, generated once for all workers; no W&B."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.generated import corpus
from recipes.hybrid.pipeline import crew

#: As little speech of every source as makes a corpus.
DISCS = {
    "minutes": 0.5,
    "test_minutes": 0.2,
    "fisher_minutes": 0.2,
    "callhome_minutes": 0.2,
}
SEED = 3


@pytest.fixture(scope="session", autouse=True)
def without_weights_and_biases() -> Iterator[None]:
    """Each of its runs takes seconds; tests that are about them switch it on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        yield


@pytest.fixture(scope="session", autouse=True)
def machines_look_often_for_what_others_leave() -> Iterator[None]:
    """At twice a second, most of a stage of little speech would be waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "_POLL_S", 0.02)
        yield


@pytest.fixture(scope="session")
def discs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Discs of all sources with half a minute of training speech; read only."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "discs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        corpus.write_corpus(shared / "discs", **DISCS, seed=SEED, processes=2)
    return shared / "discs"
