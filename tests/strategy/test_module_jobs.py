"""The jobs of a Fabric program, without Fabric."""

import atexit
import gc
import os
import pickle
import signal
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import call, create_autospec

import pytest
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.optim import SGD

from lightning_adpsgd import Topology
from lightning_adpsgd.strategy.evaluation_watch import EvaluationWatch
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
    modules = nn.Linear(1, 1), nn.Linear(1, 1)
    for module, job in zip(modules, (ended, begun), strict=True):
        jobs.set_up(module, lambda job=job: job)
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


def test_a_set_up_that_fails_can_be_tried_again() -> None:
    """Such as that of a module with a weight on another device."""
    jobs, module, former, job = ModuleJobs(), nn.Linear(1, 1), job_that(), job_that()
    jobs.set_up(module, lambda: former)
    with pytest.raises(ZeroDivisionError):
        jobs.set_up(module, lambda: 1 // 0)  # pyright: ignore
    jobs.set_up(module, lambda: job)
    assert ([*jobs], jobs.of_module(module)) == ([job], job)


def test_a_start_that_fails_ends_its_own_job_alone() -> None:
    """The others train on: a program that handles the error has not ended them."""
    jobs, running, begun, ended = (
        ModuleJobs(),
        *(job_that(running=True), job_that(), job_that(closed=True)),
    )
    modules = [nn.Linear(1, 1) for _ in range(3)]
    for module, job in zip(modules, (running, begun, ended), strict=True):
        jobs.set_up(module, lambda job=job: job)
    for module, job in zip(modules[1:], (begun, ended), strict=True):
        job.start.side_effect = error = RuntimeError("no views of the weights")
        with pytest.raises(RuntimeError, match="no views of the weights"):
            jobs.add_optimizer(SGD(module.parameters(), 1.0))
        assert job.fail.call_args_list == ([] if job.closed else [call(error)])
        assert job.close.called is not job.closed
    running.fail.assert_not_called()
    running.close.assert_not_called()


def test_a_module_that_was_trained_is_let_go_and_its_job_is_not() -> None:
    """Whose counters a program may ask for at the end."""
    jobs, module = ModuleJobs(), nn.Linear(1, 1)
    jobs.set_up(module, lambda: job_that(closed=True))
    found = weakref.ref(module)
    assert [job.closed for job in jobs] == [True]
    del module
    gc.collect()
    assert (found(), len([*jobs])) == (None, 1)


def test_the_jobs_of_earlier_modules_are_let_go_when_another_is_set_up() -> None:
    """A search over many models would keep all, and find their counters in its own."""
    jobs, kept = ModuleJobs(), nn.Linear(1, 1)
    first, last = job_that(closed=True), job_that()
    jobs.set_up(kept, lambda: first)
    for _ in range(3):
        jobs.set_up(nn.Linear(1, 1), lambda: job_that(closed=True))
        gc.collect()
    trained = nn.Linear(1, 1)
    jobs.set_up(trained, lambda: last)
    assert [*jobs] == [first, last]


def test_an_optimizer_that_a_program_has_replaced_is_let_go() -> None:
    jobs, module, job = ModuleJobs(), nn.Linear(1, 1), job_that(running=True)
    jobs.set_up(module, lambda: job)
    former, optimizer = (SGD(module.parameters(), 1.0) for _ in range(2))
    for one in (former, optimizer):
        jobs.add_optimizer(one)
    assert jobs.optimizers_of(job) == [former, optimizer]
    del former, one
    gc.collect()
    assert jobs.optimizers_of(job) == [optimizer]


def test_jobs_stay_where_they_are_when_a_strategy_travels() -> None:
    jobs, module = ModuleJobs(), nn.Linear(1, 1)
    jobs.set_up(module, job_that)
    assert [*pickle.loads(pickle.dumps(jobs))] == []
    assert len([*jobs]) == 1


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


def test_a_trained_module_can_be_compiled_as_before() -> None:
    """TorchScript takes no module with a hook of ours."""
    jobs, module = ModuleJobs(), nn.Linear(1, 1)
    jobs.watches.append(EvaluationWatch(module, job_that()))
    jobs.close()
    assert module._forward_pre_hooks == {}
    assert jobs.watches == []


def test_a_forked_child_that_exits_is_no_end_of_the_training(tmp_path: Path) -> None:
    assert in_fresh_process(exit_in_a_child, str(tmp_path)) is False
