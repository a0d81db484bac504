"""Islands whose learners hold one model together, as processes."""

import signal
from pathlib import Path

import pytest
import torch

from lightning_adpsgd.__main__ import main
from tests.faults.test_islands import goes_on
from tests.faults.world import World, of_torchrun, until, world
from tests.sharded import needs_fsdp2_on_cpus

pytestmark = needs_fsdp2_on_cpus


def start(islands: World, name: str, *resumed: str, steps: int = -1) -> None:
    options = "model_parallel", *resumed
    islands.start_wide(name, of_torchrun(), 2, *options, steps=steps)


def test_a_sharded_island_loses_a_learner_comes_back_and_saves(tmp_path: Path) -> None:
    """The death of one learner ends its island alone; others train on."""
    with world(tmp_path) as islands:
        start(islands, "a")
        until(lambda: bool(islands.steps("a")), "the first step of the first island")
        start(islands, "b")
        until(lambda: islands.all_see("a a-1 b b-1", 2), "both islands")
        goes_on(islands, "a a-1 b b-1")

        islands.signal_one("b", signal.SIGKILL)
        until(lambda: islands.all_see("a a-1", 1), "the closed ring")
        goes_on(islands, "a a-1")
        until(lambda: "Error" in islands.output("b"), "the end of the other learner")
        furthest = islands.steps("a")[-1].number

        start(islands, "again")
        until(lambda: islands.all_see("a a-1 again again-1", 2), "the newcomer")
        goes_on(islands, "a a-1 again again-1")
        numbers = [islands.steps(name)[0].number for name in ("again", "again-1")]
        assert numbers[0] == numbers[1] >= furthest

        islands.signal_one("again", signal.SIGTERM)
        assert islands.exit_code("again") == 0
        until(lambda: islands.all_see("a a-1", 1), "the closed ring")
        ends = [islands.steps(name)[-1].number for name in ("again", "again-1")]
        assert ends[0] == ends[1]
        (folder,) = tmp_path.glob("preempted-*.ckpt")
        whole = tmp_path / "whole.ckpt"
        assert main(["export", str(folder), "--out", str(whole)]) == 0
        saved = torch.load(whole, weights_only=True)
        assert saved["global_step"] == ends[0]
        assert saved["state_dict"]["layer.weight"].isfinite().all()

        # The first of another job goes on from it.
        islands.signal("a", signal.SIGTERM)
        assert islands.exit_code("a") == 0
        start(islands, "resumed", str(folder), steps=ends[0] + 20)
        assert islands.exit_code("resumed") == 0
        assert islands.steps("resumed")[0].number == ends[0] + 1
        # Learners have had other samples, and the mean has one buffer.
        results = [words_of_end(islands, name) for name in ("resumed", "resumed-1")]
        assert results[0] == results[1]


@pytest.mark.parametrize(
    "inside", [pytest.param("ddp", marks=pytest.mark.slow), "model_parallel"]
)
def test_islands_of_one_learner_and_of_two_train_together(
    tmp_path: Path, inside: str
) -> None:
    """What has a learner of its own in one has two in the other."""
    options = inside, "", "1,2"
    with world(tmp_path) as islands:
        islands.start_wide("a", of_torchrun(1), 1, *options)
        until(lambda: bool(islands.steps("a")), "the first step of the first island")
        islands.start_wide("b", of_torchrun(2), 2, *options, steps=120)
        assert islands.exit_code("b") == 0
        for name in ("b", "b-1"):
            (line,) = lines_of(islands, name, "exchanges: ")
            assert int(line.split()[1]) > 0
            assert words_of_end(islands, name).endswith("of 2")
        # It has begun where the other was.
        assert islands.steps("b")[0].number > 1
        goes_on(islands, "a")


def lines_of(islands: World, name: str, begin: str) -> list[str]:
    return [x for x in islands.output(name).splitlines() if x.startswith(begin)]


def words_of_end(islands: World, name: str) -> str:
    (line,) = lines_of(islands, name, "ended at")
    return line
