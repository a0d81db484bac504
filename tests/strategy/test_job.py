"""What a job does around its engine, which is a double here."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.coordination.groups import Groups
from lightning_adpsgd.coordination.store import Meanwhile
from lightning_adpsgd.dials import Dials
from lightning_adpsgd.gossip.engine import Gossip
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.strategy import job as job_module
from lightning_adpsgd.strategy.job import Job, together
from lightning_adpsgd.strategy.optimizer_reset import InitialState
from lightning_adpsgd.strategy.set_up import set_up_job
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.weights.flat import FlatParameters
from tests.helpers import forked
from tests.learners import values

ALONE = Partition((1,))


def reload_during(call: str) -> dict[str, Any]:
    """A step with a reload in one call of the engine, and the optimizer after it."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    module, resets = nn.Linear(2, 1, bias=False), list[int]()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    initial = InitialState(optimizer)

    def on_reload() -> None:
        resets.append(len(optimizer.state))
        initial.restore(optimizer)

    gossip = create_autospec(Gossip, instance=True, num_reloads=0)
    job = set_up_job(
        module, Dials(find_topology("complete"), "async", 1), ALONE, on_reload
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_module, "make_engine", lambda *_: (gossip, None))
        job.start()

    def closure() -> None:
        optimizer.zero_grad()
        module(torch.ones(1, 2)).sum().backward()

    def reload() -> None:
        gossip.num_reloads = 1
        nn.init.constant_(module.weight, 5.0)

    def update() -> None:
        job.update(optimizer.step, closure)

    update()
    assert (len(optimizer.state), resets) == (1, [])
    getattr(gossip, call).side_effect = reload
    update()
    getattr(gossip, call).side_effect = None
    found = {
        "weights": module.weight.tolist(),
        "momentum": [s["momentum_buffer"].tolist() for s in optimizer.state.values()],
    }
    update()
    job.close()
    dist.destroy_process_group()
    return {**found, "resets": resets}


@pytest.mark.parametrize(
    ("call", "momentum"), [("before_update", [[[0.0, 0.0]]]), ("after_update", [])]
)
def test_a_reload_resets_the_optimizer_once_and_drops_the_gradient(
    call: str, momentum: list[Any]
) -> None:
    """A gradient that is ready when the weights change was taken at those before."""
    (found,) = values(forked(1, lambda rank: reload_during(call)))
    assert found == {"weights": [[5.0, 5.0]], "momentum": momentum, "resets": [1]}


# --- from one training to the next, in one process


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines of the job of a test, one for each start."""
    made: list[Any] = []

    def make(*_: Any) -> tuple[Any, None]:
        made.append(create_autospec(Gossip, instance=True, num_reloads=0))
        made[-1].statistics.return_value = Statistics(exchanges=len(made))
        return made[-1], None

    monkeypatch.setattr(job_module, "make_engine", make)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    return made


@pytest.fixture
def job(engines: list[Any]) -> Iterator[Job]:
    dials = Dials(find_topology("complete"), "async", 1)
    groups = Groups((), None, None, False, ALONE)
    flat = FlatParameters(nn.Linear(2, 1))
    job = Job(dials, flat, groups, HashStore(), lambda: None)
    yield job
    job.close()


def test_the_round_of_a_checkpoint_is_that_of_one_training(
    job: Job, engines: list[Any]
) -> None:
    """The one after a search for a learning rate, and no further one."""
    job.restore_learner({"position": (7, 3)})
    for _ in range(2):
        job.start()
        job._abort()
    engines[0].go_on_from.assert_called_once_with(7, 3)
    engines[1].go_on_from.assert_not_called()


def test_weights_that_an_optimizer_assigns_are_those_that_are_averaged(
    job: Job, engines: list[Any]
) -> None:
    """``p.data = p.data - lr * p.grad`` moves them out of the vector."""
    job.start()
    weight: Any = job.flat.module.get_parameter("weight")
    before = weight.detach().clone()

    def step(closure: Any) -> None:
        closure()
        weight.data = weight.data - 1.0

    def merge() -> None:
        job.flat.vectors[0].add_(10.0)

    engines[0].after_update.side_effect = merge
    for _ in range(2):
        job.update(step, lambda: None)
    torch.testing.assert_close(weight.detach(), before + 18.0)


def test_the_counters_of_a_training_stay_when_it_has_ended(
    job: Job, engines: list[Any]
) -> None:
    assert job.statistics() is None
    job.start()
    job._abort()
    engines[0].statistics.side_effect = ZeroDivisionError
    assert job.statistics() == Statistics(exchanges=1)
    job.start()
    assert job.statistics() == Statistics(exchanges=2)


def test_a_job_that_has_ended_leaves_the_interpreter_alone(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit = list[Any]()
    calls = SimpleNamespace(register=at_exit.append, unregister=at_exit.remove)
    monkeypatch.setattr(job_module, "atexit", calls)
    dials = Dials(find_topology("complete"), "async", 1)
    groups, flat = (
        Groups((), None, None, False, ALONE),
        FlatParameters(nn.Linear(2, 1)),
    )
    job = Job(dials, flat, groups, HashStore(), lambda: None)
    assert len(at_exit) == 1
    job.close()
    assert at_exit == []
    with pytest.raises(RuntimeError, match="this training has ended"):
        job.start()


@pytest.mark.parametrize("adopts", [False, True])
def test_a_checkpoint_holds_the_weights_with_which_training_goes_on(
    job: Job, adopts: bool
) -> None:
    """In a validation: the learner's own, or the mean if it is adopted."""
    own = [torch.full((3,), 5.0)]
    consensus: Any = SimpleNamespace(adopts=adopts, local_weights=lambda: own)
    job._consensus = consensus
    state = job.learner_state([])
    assert state["weights"] is (job.flat.vectors if adopts else own)
    assert state["position"] is None
    job._consensus = None


def test_outside_of_a_training_nobody_meets_before_a_collective(job: Job) -> None:
    together(job, None, "a reduce")
    assert job.coordinator.num_meetings == 0
    job.start()
    together(job, None, "a reduce")
    assert job.coordinator.num_meetings == 1


def test_a_store_may_go_only_until_training_begins_again(job: Job) -> None:
    """As after a search for a learning rate."""
    job.coordinator.has_ended = True
    job.start()
    assert not job.coordinator.has_ended


def test_others_may_be_gone_before_a_learner_has_stopped(
    job: Job, engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have the consensus model: a store that is gone is no failure."""
    seen = list[bool]()
    monkeypatch.setattr(job, "enter_consensus", lambda _: None)
    monkeypatch.setattr(job_module.atexit, "register", lambda *_: None)
    job.start()
    engines[0].stop.side_effect = lambda: seen.append(job.has_finished)
    job.finish()
    assert seen == [True]


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_closed_job_keeps_no_store_and_no_group_of_its_own(
    job: Job, has_ended: bool
) -> None:
    """A program may end its process group, and its store, and make another."""
    store = job.store
    job.groups = job.groups._replace(gradients=create_autospec(dist.ProcessGroup))
    job.coordinator.has_ended = has_ended
    job.close()
    assert job.store is not store
    assert job.coordinator._store is not store
    assert job.groups.gradients is None


def test_a_barrier_waits_for_all_after_the_end_too(job: Job) -> None:
    job.meet("a barrier")
    meanwhile: Any = create_autospec(Meanwhile, instance=True)
    job.start(meanwhile=meanwhile)
    job._forget()
    job.meet("a barrier")
    assert job.coordinator.num_meetings == 2
    meanwhile.when_met.assert_not_called()
