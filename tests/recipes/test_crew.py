"""Several processes run one recipe: who does what, and that nothing is lost."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipes.hybrid.pipeline.crew import (
    ALONE,
    Crew,
    CrewError,
    FinishedError,
    crew_of,
    finished,
    shard_of,
    shared,
)
from recipes.hybrid.pipeline.fingerprint import STAMP
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.runner import run_stages
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import Stage, StageError
from recipes.hybrid.stages import STAGES

PAIR = [Crew(rank, 2, patience_s=20) for rank in range(2)]
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    "environment",
    [{**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, SLURM],
    ids=["torch", "slurm"],
)
def test_launchers_say_which_machine_this_is(environment):
    crew = crew_of(environment, 2)
    assert (crew.rank, crew.size, crew.node, crew.num_nodes) == (5, 8, 1, 2)
    assert not crew.leads
    assert not crew.shares
    with pytest.raises(ValueError, match="`nodes` must be 2, the machines of this job"):
        crew_of(environment, 4)


def test_without_a_launcher_there_is_one_machine():
    assert crew_of(SLURM, 1) == ALONE
    with pytest.raises(ValueError, match="without torchrun or srun, got 2"):
        crew_of({}, 2)


def test_a_share_is_written_as_one_of_several():
    share = shard_of("1/4")
    assert (share.node, share.num_nodes, share.trains) == (1, 4, False)
    for wrong in ("4/4", "1", "a/2", "0/0"):
        with pytest.raises(ValueError, match=r"`shard` must|`rank` must"):
            shard_of(wrong)


def tens(items: Iterator[int]) -> Iterator[int]:
    return (10 * item for item in items if item != 3)


def test_the_leader_gets_the_results_of_all_and_a_share_is_done_once(tmp_path):
    assert [*shared(ALONE, tmp_path, "x", range(5), tens)] == [0, 10, 20, 40]
    assert [*shared(PAIR[1], tmp_path, "x", range(5), tens)] == []
    assert [*shared(PAIR[0], tmp_path, "x", range(5), tens)] == [0, 20, 40, 10]

    def fails(items: Iterator[int]) -> Iterator[int]:
        raise AssertionError(f"done again: {[*items]}")

    assert [*shared(PAIR[0], tmp_path, "x", range(5), fails)] == [0, 20, 40, 10]


def test_a_share_that_breaks_off_leaves_nothing(tmp_path):
    def breaks(items: Iterator[int]) -> Iterator[int]:
        yield next(items)
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        list(shared(PAIR[1], tmp_path, "x", range(5), breaks))
    assert not list(tmp_path.rglob("*.pickle"))


def test_a_share_that_does_not_come_is_named(tmp_path):
    hasty = replace(PAIR[0], patience_s=0)
    with pytest.raises(
        CrewError, match=r"waited 0 s for machine 1 to leave .*x-1-of-2"
    ):
        list(shared(hasty, tmp_path, "x", range(5), tens))


def test_all_machines_get_the_results_that_they_go_on_from(tmp_path):
    with ThreadPoolExecutor() as threads:
        both = [
            threads.submit(
                lambda crew: [*shared(crew, tmp_path, "x", range(5), tens, True)], crew
            )
            for crew in PAIR
        ]
    assert [one.result() for one in both] == [[0, 20, 40, 10]] * 2


def test_a_share_that_came_too_late_is_not_done(tmp_path):
    output = tmp_path / ".partial"  # the leader has given it its name meanwhile
    for to_all in (False, True):
        with pytest.raises(FinishedError):
            list(shared(PAIR[1], output, "x", range(5), tens, to_all))
    assert not output.exists()


def test_waiting_ends_when_the_stage_is_finished_without_this_process(tmp_path):
    with pytest.raises(FinishedError):
        PAIR[1].await_until(lambda: False, "nothing", finished(tmp_path / "gone"))


def test_a_process_that_is_needed_no_more_waits_for_the_stamp(tmp_path):
    settings = Settings(corpus=tmp_path, out=tmp_path)
    begun, returned = threading.Event(), threading.Event()
    stamped: list[bool] = []

    def work(settings: Settings, _: Path) -> None:
        if not settings.crew.leads:
            begun.set()
            raise FinishedError
        assert begun.wait(20)
        returned.wait(0.3)  # it would return now

    def follow() -> None:
        run_stages(replace(settings, crew=PAIR[1]), stages)
        stamped.append((settings.directory("features") / STAMP).exists())
        returned.set()

    stages = [Stage("features", "", work, together="machines")]
    follower = threading.Thread(target=follow)
    follower.start()
    run_stages(replace(settings, crew=PAIR[0]), stages)
    follower.join(20)
    assert stamped == [True]


def run_together(settings: Settings, stages: list[Stage], last: str) -> None:
    """Two processes of a crew as two threads; raises what one of them raises."""
    errors: list[Exception] = []

    def run(crew: Crew) -> None:
        try:
            run_stages(replace(settings, crew=crew), stages, last=last)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(crew,)) for crew in PAIR]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    if errors:
        raise errors[0]


@pytest.mark.slow
def test_two_machines_make_the_features_and_labels_of_one(discs, tmp_path):
    sizes = ("align.num_iterations=1", "align.num_gaussians=100", "cores=1")
    outs = [tmp_path / name for name in ("one", "two")]
    one, two = (override(Settings(corpus=discs, out=out), *sizes) for out in outs)
    run_stages(one, STAGES, last="align")
    run_together(two, list(STAGES), "align")
    for name in ("features/train/frames", "align/train/labels", "align/dev/labels"):
        first, second = (np.load(out / f"exp/{name}.npy") for out in outs)
        np.testing.assert_array_equal(first, second)
    assert not list(outs[1].rglob(".parts"))
    assert not list(outs[1].rglob(".sides.done*"))


def test_a_leader_that_does_not_begin_is_named(tmp_path):
    settings = Settings(corpus=tmp_path, out=tmp_path)
    hasty = replace(settings, crew=replace(PAIR[1], patience_s=0))
    stage = Stage("features", "", lambda *_: None, together="machines")
    with pytest.raises(StageError, match="waited 0 s for process 0 to begin stage"):
        run_stages(hasty, [stage])


def test_shares_do_not_train_and_crews_do_not_redo(tmp_path):
    settings = Settings(corpus=tmp_path, out=tmp_path, crew=shard_of("0/2"))
    stage = Stage("train", "", lambda *_: None)
    with pytest.raises(StageError, match="shares cannot train together"):
        run_stages(settings, [stage])
    with pytest.raises(StageError, match="`redo` must be off"):
        run_stages(settings, [stage], redo=True)
