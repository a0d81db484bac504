"""The jobs of a Fabric program, without Fabric."""

import atexit
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from lightning_adpsgd import Topology
from lightning_adpsgd.strategy.job import Job
from lightning_adpsgd.strategy.module_jobs import ModuleJobs
from lightning_adpsgd.strategy.set_up import set_up_job
from lightning_adpsgd.topology.partition import Partition
from tests.helpers import PATIENCE_S, in_fresh_process
from tests.learners import gossip

ALONE = Topology("alone", lambda index, *_: {index: 1.0}, lambda size: 1)


def job_that(running: bool = False, closed: bool = False) -> Any:
    job = create_autospec(Job, instance=True, running=running)
    job.closed = closed
    return job


def test_an_exception_is_told_by_the_jobs_that_have_not_ended() -> None:
    """Nobody would hear it in the others, and learner 0 waits for those who hear."""
    jobs, ended, begun = ModuleJobs(), job_that(closed=True), job_that()
    for job in (ended, begun):
        jobs.set_up(nn.Linear(1, 1), lambda job=job: job)
    error = ValueError("the answer is 42")

    def program() -> None:
        raise error

    with pytest.raises(ValueError, match="the answer is 42"):
        jobs.run(program)
    ended.fail.assert_not_called()
    begun.fail.assert_called_once_with(error)
    begun.close.assert_called_once()


def test_a_module_that_is_being_trained_is_not_set_up_again() -> None:
    jobs, module, job = ModuleJobs(), nn.Linear(1, 1), job_that(running=True)
    jobs.set_up(module, lambda: job)
    with pytest.raises(
        RuntimeError, match="again for `Linear`, which is being trained"
    ):
        jobs.set_up(module, job_that)
    assert [*jobs] == [job]


def test_a_job_that_never_ran_ends_when_its_module_is_set_up_again() -> None:
    jobs, module, former, job = ModuleJobs(), nn.Linear(1, 1), job_that(), job_that()
    jobs.set_up(module, lambda: former)
    jobs.set_up(module, lambda: job)
    former.close.assert_called_once()
    assert [*jobs] == [job]


def exit_in_a_child(folder: str) -> bool:
    """Whether a job fails because a forked child of its learner exits."""
    store = FileStore(f"{folder}/store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    jobs, module, dials = ModuleJobs(), nn.Linear(1, 1), gossip(ALONE).dials
    job = jobs.set_up(module, lambda: set_up_job(module, dials, Partition((1,))))
    job.start()
    if (child := os.fork()) == 0:
        signal.alarm(int(PATIENCE_S))
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    has_failed = job.store.check(["failure"])
    jobs.close()
    return has_failed


def test_a_forked_child_that_exits_is_no_end_of_the_training(tmp_path: Path) -> None:
    assert in_fresh_process(exit_in_a_child, str(tmp_path)) is False
