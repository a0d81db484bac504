"""Islands of two learners as processes: killed, started again, told to end.

They have the variables of launchers; one test has the launcher as well.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests import warm
from tests.faults.test_islands import goes_on
from tests.faults.world import (
    SECONDS,
    Variables,
    World,
    of_torchrun,
    until,
    world,
)
from tests.helpers import free_port

ROOT = Path(__file__).parents[2]


def of_slurm() -> Variables:
    """As one job of an array sets them: `sbatch --array=... --ntasks=2`, `srun`."""
    port = free_port()
    return lambda rank: {
        "SLURM_JOB_ID": "4712",
        "SLURM_ARRAY_JOB_ID": "4711",
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_JOB_NAME": "island",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": str(rank),
        "MASTER_PORT": str(port),
    }


def start_two(islands: World) -> None:
    islands.start_wide("a", of_torchrun())
    until(lambda: bool(islands.steps("a")), "the first step of the first island")
    islands.start_wide("b", of_slurm())
    until(lambda: islands.all_see("a a-1 b b-1", 2), "both islands")
    goes_on(islands, "a a-1 b b-1")


class Return(NamedTuple):
    """An island has been killed, and was started again.

    Attributes:
        furthest: step of the others before its start.
        first_steps: of its learners.
        told: what the others wrote.
    """

    furthest: int
    first_steps: list[int]
    told: str


def killed_and_started_again(islands: World) -> Return:
    islands.signal("b", signal.SIGKILL)
    until(lambda: islands.all_see("a a-1", 1), "the closed ring")
    goes_on(islands, "a a-1")
    furthest = islands.steps("a")[-1].number
    islands.start_wide("again", of_slurm())
    until(lambda: islands.all_see("a a-1 again again-1", 2), "the newcomer")
    goes_on(islands, "a a-1 again again-1")
    first_steps = [islands.steps(name)[0].number for name in ("again", "again-1")]
    return Return(furthest, first_steps, islands.output("a"))


class End(NamedTuple):
    """One learner of an island was told to end.

    Attributes:
        exit_code: of the island.
        last_steps: of its learners.
        told: what both learners of the others wrote from then on.
        saved: the checkpoint that it left.
    """

    exit_code: int | None
    last_steps: list[int]
    told: str
    saved: dict[str, Any]


def told_to_end(islands: World) -> End:
    others = "a", "a-1"
    before = {name: len(islands.output(name)) for name in others}
    islands.signal_one("again", signal.SIGTERM)
    exit_code = islands.exit_code("again")
    until(lambda: islands.all_see("a a-1", 1), "the closed ring")
    told = "".join(islands.output(name)[before[name] :] for name in others)
    last_steps = [islands.steps(name)[-1].number for name in ("again", "again-1")]
    (path,) = islands.folder.glob("preempted-*.ckpt")
    goes_on(islands, "a a-1")
    return End(exit_code, last_steps, told, torch.load(path, weights_only=True))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Return, End]:
    """What happens to one island of two; that others make steps is waited for."""
    with world(tmp_path_factory.mktemp("wide")) as islands:
        start_two(islands)
        return killed_and_started_again(islands), told_to_end(islands)


def test_an_island_of_two_learners_is_killed_and_comes_back(
    story: tuple[Return, End],
) -> None:
    """It is where the others were, and not at its first step."""
    back, _ = story
    assert back.first_steps[0] == back.first_steps[1] >= back.furthest
    assert back.told.count("lost island") == 1


def test_one_learner_of_an_island_is_told_to_end_and_all_leave(
    story: tuple[Return, End],
) -> None:
    _, end = story
    assert end.exit_code == 0
    assert "lost" not in end.told
    assert end.last_steps[0] == end.last_steps[1]
    assert end.saved["global_step"] == end.last_steps[0]
    assert end.saved["state_dict"]["weight"].isfinite().all()


@contextmanager
def torchrun(islands: World, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """An island of two learners, which torchrun starts again when one has died."""
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    island = "-m", "tests.faults.island", islands.url, str(islands.folder), name
    path = islands.folder / f"{name}.out"
    with path.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, *island, "-1", "2"],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                # By what torchrun starts learners.
                "PYTHON_EXEC": warm.python(),
                # Or learners that are started again may read addresses of the dead.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        # Each of them has a process group of its own.
        learners = learners_of(process.pid)
        process.kill()
        process.wait(SECONDS)
        for learner in learners:
            with suppress(ProcessLookupError):
                os.kill(learner, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_starts_an_island_again_when_a_learner_has_died(
    tmp_path: Path,
) -> None:
    with world(tmp_path) as islands, torchrun(islands, "t") as process:
        until(lambda: bool(islands.steps("t")), "the first step under torchrun")
        islands.start_wide("a", of_torchrun())
        until(lambda: islands.all_see("a a-1 t", 2), "both islands")
        os.kill(learners_of(process.pid)[-1], signal.SIGKILL)
        until(lambda: islands.all_see("a a-1", 1), "the closed ring")
        goes_on(islands, "a a-1")
        until(lambda: islands.all_see("a a-1 t", 2), "its return")
        goes_on(islands, "a a-1 t")
        assert process.poll() is None


def learners_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in children.split()]
