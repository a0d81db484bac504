"""What happens before the first step, where there is nobody to train with."""

import signal
from pathlib import Path

import pytest

from tests.faults.world import until, world


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 1)]
)
def test_who_waits_for_a_rendezvous_says_so_and_obeys_signals(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with world(tmp_path) as islands:
        islands.signal("rendezvous", signal.SIGKILL)
        islands.start("a")
        path = tmp_path / "a.out"
        until(lambda: path.exists() and "has not started" in path.read_text(), "a word")
        said = islands.output("a")
        assert "s for the rendezvous at tcp://127.0.0.1" in said
        assert "waits at most 1800 s" in said
        assert "python -m lightning_adpsgd rendezvous --port" in said
        assert "it listens at this address and that no other program has" in said
        assert "training continues" not in said
        islands.signal("a", number)
        assert islands.exit_code("a") == code
        assert "AssertionError" not in islands.output("a")
