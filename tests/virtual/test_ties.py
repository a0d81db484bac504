"""The virtual cluster against the other writings of the algorithm.

The oracle (`lightning_adpsgd.reference`), threads over the engine's own transport, real
processes, and plain SGD must say the same as the virtual cluster, each in its domain.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from lightning_adpsgd import Async, reference
from lightning_adpsgd.gossip.codecs import INT4
from lightning_adpsgd.mixing.rounds import Mixer
from lightning_adpsgd.mixing.synchronous import Order, Rounds
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.topology.topology import Topology
from lightning_adpsgd.virtual import row_rounds
from lightning_adpsgd.virtual.clock import Compute, Link
from lightning_adpsgd.virtual.cluster import VirtualCluster
from lightning_adpsgd.virtual.row_rounds import RowMixer
from lightning_adpsgd.virtual.timeline import Asynchronous, Ended, Stepped
from lightning_adpsgd.weights.look_ahead import LookAhead
from tests.helpers import (
    ALL_TOPOLOGIES,
    mixing_of,
    random_rows,
    round_mixers,
    take_first,
    together,
    topologies_of,
)
from tests.learners import (
    LR,
    Linear,
    Quadratic,
    Rows,
    learners,
    loader,
    trainer_of,
    values,
)

LENGTH = 7


class Bowl(nn.Module):
    """``sum cos w - batch w``: the gradient is ``-sin w - batch``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(LENGTH, dtype=torch.float64))


def bowl_loss(module: nn.Module, batch: Tensor) -> Tensor:
    assert isinstance(module, Bowl)
    return module.weight.cos().sum() - batch @ module.weight


def noise(learner: int, step: int) -> Tensor:
    return random_rows(1, LENGTH, seed=1000 * learner + step)[0]


def noise_of(learner: int) -> Iterator[Tensor]:
    return (noise(learner, step) for step in itertools.count())


def gradients(rows: Tensor, step: int) -> Tensor:
    return -rows.sin() - torch.stack([noise(i, step) for i in range(len(rows))])


def cluster(size: int, topology: Any = "ring", mode: Any = "sync", **more: Any) -> Any:
    """Plain SGD on a bowl with a learner's own noise."""
    given = {
        "loss": bowl_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.3),
        "samples_in": lambda batch: 1,
        **more,
    }
    return VirtualCluster(Bowl(), size, 1, topology, mode, **given)


def run(virtual: VirtualCluster, num_steps: int) -> Tensor:
    """The weights of all super-learners after so many steps of each."""
    virtual.fit(noise_of, num_steps * virtual.num_learners)
    return virtual.weights()[0].clone()


def start(virtual: VirtualCluster, rows: Tensor) -> None:
    for weights, row in zip(virtual.weights()[0], rows, strict=True):
        weights.copy_(row)


# --- the oracle


@pytest.mark.parametrize(("topology", "size"), topologies_of(1, 2, 5, 8))
def test_sync_after_the_step_is_a_matrix_product(topology: str, size: int) -> None:
    rows = random_rows(size, LENGTH)
    virtual = cluster(size, topology, mixing_gain=0.75)
    start(virtual, rows)
    found = run(virtual, 6)
    mixing = mixing_of(topology, size, 0.75)
    oracle = reference.synchronous(rows, gradients, mixing, 0.3)
    torch.testing.assert_close(found, take_first(oracle, 6)[-1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("topology", ALL_TOPOLOGIES)
def test_sync_before_the_step_takes_the_gradient_before_the_average(
    topology: str,
) -> None:
    rows = torch.zeros(4, LENGTH, dtype=torch.float64)
    found = run(cluster(4, topology, order="average_then_step"), 6)
    mixing = mixing_of(topology, 4)
    oracle = reference.synchronous(rows, gradients, mixing, 0.3, "average_then_step")
    torch.testing.assert_close(found, take_first(oracle, 6)[-1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("topology", ALL_TOPOLOGIES)
def test_delay_by_one_averages_behind_one_gradient(topology: str) -> None:
    rows = torch.zeros(4, LENGTH, dtype=torch.float64)
    found = run(cluster(4, topology, "delay_by_one"), 6)
    oracle = reference.delay_by_one(rows, gradients, mixing_of(topology, 4), 0.3)
    torch.testing.assert_close(found, take_first(oracle, 6)[-1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("order", ["step_then_average", "average_then_step"])
def test_rounds_come_every_third_step(order: Order) -> None:
    virtual = cluster(4, "complete", gossip_every=3, order=order)
    rows, mixing = torch.zeros(4, LENGTH).double(), mixing_of("complete", 4, every=3)
    found = run(virtual, 7)
    oracle = reference.synchronous(rows, gradients, mixing, 0.3, order)
    torch.testing.assert_close(found, take_first(oracle, 7)[-1], atol=1e-12, rtol=0)


def test_momentum_stays_with_its_super_learner() -> None:
    virtual = cluster(
        3, optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)
    )
    rows = torch.zeros(3, LENGTH, dtype=torch.float64)
    momentum = torch.zeros_like(rows)

    def directions(weights: Tensor, step: int) -> Tensor:
        gradient = gradients(weights, step)
        momentum.mul_(0.9).add_(gradient)
        return gradient + 0.9 * momentum

    found = run(virtual, 5)
    oracle = reference.synchronous(rows, directions, mixing_of("ring", 3), 0.1)
    torch.testing.assert_close(found, take_first(oracle, 5)[-1], atol=1e-12, rtol=0)


# --- threads


@pytest.mark.parametrize(("topology", "size"), topologies_of(3, 4, 8))
def test_sync_is_what_threads_do_with_the_engine(topology: str, size: int) -> None:
    found = run(cluster(size, topology, mixing_gain=0.5), 6)
    start_rows = torch.zeros(size, LENGTH, dtype=torch.float64)
    vectors, mixers = round_mixers(start_rows, topology, 0.5)

    def train(i: int) -> None:
        communication = Rounds(mixers[i], "sync", "step_then_average")
        for step in range(6):
            vectors[i].sub_(-vectors[i].sin() - noise(i, step), alpha=0.3)
            communication.after_update()

    together([lambda i=i: train(i) for i in range(size)])
    torch.testing.assert_close(found, torch.stack(vectors), atol=1e-14, rtol=0)


@pytest.mark.parametrize("most_rows", [0, 128])
@pytest.mark.parametrize("num_diverged", [1, 2, 5])
@pytest.mark.parametrize(("topology", "size"), topologies_of(5, 8))
def test_who_has_diverged_is_left_out_as_threads_do(
    topology: str,
    size: int,
    num_diverged: int,
    most_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a product of all rows, and row for row where there are too many for one."""
    monkeypatch.setattr(row_rounds, "_MOST_ROWS", most_rows)
    rows = random_rows(size, LENGTH)
    rows[:num_diverged, 3] = torch.nan
    vectors, mixers = round_mixers(rows, topology, 0.75)
    virtual = RowMixer([rows], Schedule(find_topology(topology), size, 0.75), False)

    def run_rounds(mixer: Mixer) -> None:
        for _ in range(4):
            mixer.take_snapshot()
            mixer.mix()
            mixer.finish()

    run_rounds(virtual)
    together([lambda mixer=mixer: run_rounds(mixer) for mixer in mixers])
    torch.testing.assert_close(rows, torch.stack(vectors), equal_nan=True)
    refused = sum(int(mixer.refused) for mixer in mixers)
    assert int(virtual.refused) == refused


def test_neighbours_on_a_ring_that_leave_one_out_keep_the_sum() -> None:
    rows = torch.tensor([[torch.nan], [1.0], [2.0], [3.0], [6.0]])
    mixer = RowMixer([rows], Schedule(find_topology("ring"), 5), False)
    mixer.mix()
    assert rows[1:].sum() == pytest.approx(12.0)


# --- processes


def process_weights(strategy: str, num: int, num_rows: int) -> Tensor:
    """Trajectories of processes under a strategy: [process, step, weight]."""

    def program(rank: int) -> Tensor:
        module, seen = Quadratic(), list[Tensor]()
        note = LambdaCallback(
            on_train_batch_end=lambda *_: seen.append(module.weight.detach().clone())
        )
        trainer = trainer_of(strategy, num, callbacks=[note])
        trainer.fit(module, loader(num_rows, rank, num))
        return torch.stack(seen)

    return torch.stack(values(learners(num, program)))


def virtual_weights(num: int, num_rows: int, **dials: Any) -> Tensor:
    virtual = VirtualCluster(Quadratic(), num, **dials)

    def rows_of(learner: int) -> Any:
        return loader(num_rows, learner, num)

    seen = []
    for step in range(num_rows // num):
        virtual.fit(rows_of, num * (step + 1))
        seen.append(virtual.weights()[0].clone())
    return torch.stack(seen, dim=1)


@pytest.mark.parametrize(
    ("strategy", "dials"),
    [
        ("sdpsgd", {"topology": "ring", "communication": "sync"}),
        ("d1psgd", {"topology": "complete", "communication": "delay_by_one"}),
    ],
)
def test_lockstep_is_what_four_processes_do(strategy: str, dials: Any) -> None:
    found = virtual_weights(4, 24, **dials)
    torch.testing.assert_close(
        found, process_weights(strategy, 4, 24), atol=1e-14, rtol=0
    )
    start, batches = torch.zeros(4, 3, dtype=torch.float64), Rows(24).rows.split(4)
    steps = {"sync": reference.synchronous, "delay_by_one": reference.delay_by_one}
    oracle = steps[dials["communication"]](
        start,
        lambda w, k: 2 / 3 * (w - batches[k]),
        mixing_of(dials["topology"], 4),
        LR,
    )
    expected = torch.stack(take_first(oracle, 6), dim=1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


# --- the limits


def test_one_super_learner_of_one_is_plain_sgd() -> None:
    for mode in ("sync", "delay_by_one", "async"):
        found = run(cluster(1, "ring", mode), 8)
        weight = nn.Parameter(torch.zeros(LENGTH, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], 0.3)
        for step in range(8):
            optimizer.zero_grad()
            (weight.cos().sum() - noise(0, step) @ weight).backward()
            optimizer.step()
        assert torch.equal(found[0], weight.detach()), mode


def test_one_super_learner_of_four_is_one_process_with_the_whole_batch() -> None:
    virtual = VirtualCluster(Quadratic(), 1, super_learner_size=4)
    virtual.fit(lambda learner: loader(24, learner, 4), 24)
    weight = torch.zeros(3, dtype=torch.float64)
    for batch in Rows(24).rows.split(4):
        weight = weight - LR * 2 / 3 * (weight - batch.mean(0))
    found = virtual.weights()[0][0]
    torch.testing.assert_close(found[:3], weight, atol=1e-14, rtol=0)


def test_super_learners_of_learners_that_agree_are_learners() -> None:
    """With equal batches inside a super-learner its mean gradient is that of one."""

    def weights(size: int) -> Tensor:
        virtual = VirtualCluster(Quadratic(), 4, size, "ring", "sync")
        virtual.fit(lambda learner: loader(24, learner // size, 4), 24 * size)
        return virtual.weights()[0][:, :3]

    torch.testing.assert_close(weights(1), weights(2), atol=1e-14, rtol=0)


def test_complete_in_lockstep_is_one_super_learner_of_all() -> None:
    def rows_of(learner: int) -> Any:
        return loader(24, learner, 4)

    complete = VirtualCluster(Quadratic(), 4, topology="complete", communication="sync")
    allreduce = VirtualCluster(Quadratic(), 1, super_learner_size=4)
    for virtual in (complete, allreduce):
        virtual.fit(rows_of, 24)
    row = allreduce.weights()[0][0, :3]
    found = complete.weights()[0]
    torch.testing.assert_close(found, row.expand(4, 3), atol=1e-14, rtol=0)


# --- asynchronous


def events_of(virtual: VirtualCluster, num_steps: int, ahead: float) -> Iterator[Any]:
    """What happens until so many steps of all, on a link that takes no time."""
    timeline, steps = Asynchronous(virtual.scenario, 1, 1), [0] * virtual.num_learners
    while sum(steps) < num_steps:
        match next(timeline):
            case Stepped(_, i):
                yield reference.Step(i, steps[i])
                yield reference.Merge(i)
                steps[i] += 1
            case Ended(_, exchange):
                yield reference.Exchange(
                    *exchange.ends, exchange.weight, (ahead, ahead)
                )


@pytest.mark.parametrize("order", ["step_then_average", "average_then_step"])
@pytest.mark.parametrize("topology", ["alternating_pairs", "random_pairs"])
@pytest.mark.parametrize("ahead", [0.0, 0.7])
def test_async_follows_the_oracle_at_unequal_speeds(
    ahead: float, topology: str, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LookAhead, "factors", lambda self: [ahead])
    compute = Compute(1.0, spread=0.5, slow={1: 3.0})
    virtual = cluster(
        5, topology, "async", compute=compute, order=order, mixing_gain=0.6
    )
    rows = torch.zeros(5, LENGTH, dtype=torch.float64)
    events = [*events_of(virtual, 60, ahead)]
    *_, (w, d) = reference.asynchronous(rows, gradients, events, 0.3)
    torch.testing.assert_close(run(virtual, 12), w, atol=1e-12, rtol=0)
    shown = torch.stack([virtual.learners.shown(i)[0] for i in range(5)])
    torch.testing.assert_close(shown, w + d, atol=1e-12, rtol=0)
    assert d.any()


def shifted(topology: str) -> Topology:
    """The same one round later: the engine's unsynchronised rounds count from 1."""
    inner = find_topology(topology)
    return Topology(
        "shifted",
        lambda index, size, round, seed: inner.takes(index, size, round + 1, seed),
        inner.period,
    )


@pytest.mark.parametrize(
    ("topology", "size"),
    [("alternating_pairs", 8), ("alternating_pairs", 5), ("random_pairs", 8),
     ("random_pairs", 7), ("hypercube", 8)],
)  # fmt: skip
@pytest.mark.parametrize("order", ["step_then_average", "average_then_step"])
def test_async_without_delay_in_lockstep_over_pairs_is_delay_by_one(
    topology: str, size: int, order: Any
) -> None:
    """An exchange that takes no time is read after a step and merged at the next.

    Over a matching all exchanges of a round are of two that meet alone: together they
    are the matrix of that round.
    """
    papers = Async(look_ahead=False)
    free = run(cluster(size, topology, papers, order=order, mixing_gain=0.6), 9)
    hidden = cluster(size, shifted(topology), "delay_by_one", mixing_gain=0.6)
    torch.testing.assert_close(free, run(hidden, 9), atol=1e-13, rtol=0)


def test_async_without_delay_and_without_gradients_is_sync() -> None:
    rows = random_rows(8, LENGTH)

    def mixed(mode: Any, topology: Any, num_steps: int) -> Tensor:
        virtual = cluster(8, topology, mode, loss=lambda m, b: 0.0 * m.weight.sum())
        start(virtual, rows)
        return run(virtual, num_steps)

    # What the last round has changed is merged one step later.
    free = mixed("async", "alternating_pairs", 7)
    synchronous_ = mixed("sync", shifted("alternating_pairs"), 6)
    torch.testing.assert_close(free, synchronous_, atol=1e-13, rtol=0)


def test_an_exchange_that_takes_a_step_and_a_half_by_hand() -> None:
    """Two learners with the gradients 1 and 2, at a learning rate of 1."""

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    virtual = VirtualCluster(
        Slope(),
        2,
        loss=lambda module, batch: (batch * module.weight).sum(),
        optimizer=lambda p: torch.optim.SGD(p, 1.0),
        link=Link(bandwidth=8 / 1.5),
        samples_in=len,
        communication=Async(look_ahead=False),
    )
    seen = []
    for step in range(1, 6):
        virtual.fit(lambda i: itertools.repeat(torch.tensor([i + 1.0])), 2 * step)
        seen.append(virtual.weights()[0].flatten().tolist())
    assert seen == [
        [-1.0, -2.0],  # at 1 the first exchange reads these
        [-2.0, -4.0],
        [-3.5, -5.5],  # at 2.5 it gave each half of -1, +1; the second read -2.5, -3.5
        [-5.0, -7.0],  # at 4 it gave half of -1, +1 and was merged in that step
        [-6.0, -9.0],  # the third has read -5 and -7 at 4
    ]


def mean_after(virtual: VirtualCluster, num_samples: int) -> Tensor:
    """Mean of w + d of `Linear`, whose gradient is each batch whatever its weights."""
    virtual.fit(lambda i: loader(16, i, 4), num_samples)
    return torch.stack([virtual.learners.shown(i)[0][:3] for i in range(4)]).mean(0)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "dials",
    [
        {},
        {"wire_dtype": torch.bfloat16},
        {"wire_dtype": torch.float16},
        {"wire_dtype": torch.int8},
        {"wire_dtype": INT4},
        {"mixing_gain": 0.5, "gossip_every": 3, "order": "average_then_step"},
        {"topology": "random_pairs"},
        {"topology": "exponential", "max_staleness": 2},
    ],
    ids=str,
)
def test_the_mean_is_changed_by_gradients_alone(size: int, dials: Any) -> None:
    # A message takes about a step; on a lattice three weights are 1032 or 136 bytes.
    bandwidths = {torch.int8: 1000.0, INT4: 130.0}
    bandwidth = bandwidths.get(dials.get("wire_dtype"), 20.0)
    virtual = VirtualCluster(
        Linear(),
        4,
        size,
        compute=Compute(1.0, spread=0.5, slow={1: 3.0}),
        link=Link(bandwidth, latency=0.3),
        **dials,
    )
    taken = torch.zeros(3, dtype=torch.float64)
    update = virtual.learners.update

    def noting(step: Callable[..., Any], closure: Any) -> Any:
        output = update(step, closure)
        taken.add_(virtual.module.weight.grad, alpha=LR / 4)  # pyright: ignore
        return output

    virtual.learners.update = noting
    found = mean_after(virtual, 200 * size)
    torch.testing.assert_close(found, -taken, atol=1e-12, rtol=0)
    assert len(virtual.learners.totals().staleness) > 1
