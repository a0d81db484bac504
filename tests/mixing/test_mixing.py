"""The synchronous modes over threads against the oracle."""

import itertools
from collections.abc import Callable, Sequence
from typing import Literal
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd import reference
from lightning_adpsgd.mixing.averages import average
from lightning_adpsgd.mixing.communication import Communication, averaging_closure
from lightning_adpsgd.mixing.rounds import RoundMixer
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.mixing.synchronous import Order, Rounds
from lightning_adpsgd.topology.named import Topology, find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.weights.worker import InlineWorker
from tests.helpers import (
    ALL_TOPOLOGIES,
    PATIENCE,
    DeviceThreadTransport,
    ThreadSuperLearner,
    memory_of_tensors,
    mixing_of,
    random_rows,
    round_mixers,
    take_first,
    together,
    topologies_of,
)
from tests.threads import ThreadTransport

pytestmark = pytest.mark.usefixtures("engine_device")

CARRIERS = (ThreadTransport, DeviceThreadTransport)
Gradient = Callable[[Tensor], Tensor]


def lockstep(
    vectors: list[Tensor],
    communications: Sequence[Communication],
    gradient: Gradient,
    lr: float,
    num_steps: int,
) -> Tensor:
    """SGD steps of all super-learners, each in a thread; returns the weights."""

    def train(vector: Tensor, communication: Communication) -> None:
        communication.start()
        for _ in range(num_steps):
            change = gradient(vector)
            communication.before_update()
            vector.sub_(change, alpha=lr)
            communication.after_update()

    together(
        [
            lambda v=vector, c=communication: train(v, c)
            for vector, communication in zip(vectors, communications, strict=True)
        ]
    )
    return torch.stack(vectors)


def end(communications: Sequence[Communication]) -> None:
    """Joins what is under way and ends the threads."""
    together([communication.settle for communication in communications])
    together([communication.stop for communication in communications])


def sine(weights: Tensor, step: int) -> Tensor:
    """The gradients of the oracle where threads have `torch.sin`."""
    return weights.sin()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("name", "size"), topologies_of(1, 2, 3, 5, 8))
def test_rounds_over_threads_are_matrix_products(
    name: str, size: int, carrier: type[ThreadTransport]
) -> None:
    rows = random_rows(size)
    vectors, mixers = round_mixers(rows, name, 0.75, carrier)

    def rounds(mixer: RoundMixer) -> None:
        for _ in range(4):
            mixer.take_snapshot()
            mixer.mix()
            mixer.finish()

    together([lambda m=mixer: rounds(m) for mixer in mixers])
    mixing = mixing_of(name, size, 0.75)
    expected = take_first(reference.synchronous(rows, sine, mixing, lr=0.0), 4)[-1]
    torch.testing.assert_close(torch.stack(vectors), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("order", ["step_then_average", "average_then_step"])
@pytest.mark.parametrize("name", ALL_TOPOLOGIES)
def test_synchronous_averaging_over_threads_is_that_of_the_oracle(
    name: str, order: Order
) -> None:
    rows = random_rows(4)
    vectors, mixers = round_mixers(rows, name)
    communications = [Rounds(mixer, "sync", order) for mixer in mixers]
    result = lockstep(vectors, communications, torch.sin, 0.3, 5)
    end(communications)
    oracle = reference.synchronous(rows, sine, mixing_of(name, 4), 0.3, order)
    torch.testing.assert_close(result, take_first(oracle, 5)[-1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("name", ALL_TOPOLOGIES)
def test_delay_by_one_averages_behind_one_gradient(
    name: str, carrier: type[ThreadTransport]
) -> None:
    rows = random_rows(4)
    vectors, mixers = round_mixers(rows, name, carrier=carrier)
    communications = [
        Rounds(mixer, "delay_by_one", "average_then_step") for mixer in mixers
    ]
    lockstep(vectors, list(communications), torch.sin, 0.3, 6)
    end(list(communications))
    mixing = mixing_of(name, 4)
    # `settle` joins the average of the last step.
    last = take_first(reference.delay_by_one(rows, sine, mixing, 0.3), 6)[-1]
    expected = mixing(5).T @ last
    torch.testing.assert_close(torch.stack(vectors), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("order", ["step_then_average", "average_then_step"])
def test_every_third_step_averages(order: Order) -> None:
    rows = random_rows(3)
    vectors, mixers = round_mixers(rows, "complete")
    communications = [Rounds(mixer, "sync", order, every=3) for mixer in mixers]
    result = lockstep(vectors, list(communications), torch.zeros_like, 1.0, 2)
    torch.testing.assert_close(result, rows, atol=0, rtol=0)
    result = lockstep(vectors, list(communications), torch.zeros_like, 1.0, 1)
    torch.testing.assert_close(result, rows.mean(0).expand(3, -1), atol=1e-14, rtol=0)
    assert all(c.statistics().merges == 1 for c in communications)
    end(communications)


@pytest.mark.parametrize("name", ALL_TOPOLOGIES)
def test_shards_are_mixed_where_they_lie(name: str) -> None:
    """Two learners to a super-learner; each has three tensors, and no others."""
    rows, lengths = random_rows(4, 14), (3, 1, 3)
    schedule = Schedule(find_topology(name), 4)
    across = [ThreadTransport.connect(4) for _ in range(2)]
    pieces = [[list(h.clone().split(lengths)) for h in row.chunk(2)] for row in rows]
    mixers = [
        RoundMixer(pieces[s][n], across[n][s], group, schedule, PATIENCE, 4)
        for s in range(4)
        for n, group in enumerate(ThreadSuperLearner.connect(2, holds_all=False))
    ]

    def rounds(mixer: RoundMixer) -> None:
        for _ in range(3):
            mixer.take_snapshot()
            mixer.mix()
            mixer.finish()

    together([lambda m=mixer: rounds(m) for mixer in mixers])
    result = torch.stack([torch.cat([*first, *second]) for first, second in pieces])
    oracle = reference.synchronous(rows, sine, mixing_of(name, 4), lr=0.0)
    expected = take_first(oracle, 3)[-1]
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)


def test_rounds_take_their_shard_once_beside_messages() -> None:
    """All tensors of three learners on a ring, but for their weights.

    Weights on a GPU are taken once more there, before they are copied to the host.
    """
    elements, num_messages = 96 << 12, 96
    shards = [[torch.ones(elements // 4) for _ in range(4)] for _ in range(3)]
    before, schedule = memory_of_tensors(), Schedule(find_topology("ring"), 3)
    mixers = [
        RoundMixer(
            shards[transport.index],
            transport,
            SuperLearnerGroup(),
            schedule,
            PATIENCE,
            elements // num_messages,
        )
        for transport in ThreadTransport.connect(3)
    ]
    together([mixer.take_snapshot for mixer in mixers])
    together([mixer.mix for mixer in mixers])
    taken = memory_of_tensors() - before
    copies = 1.0 if torch.get_default_device().type == "cpu" else 2.0
    assert copies <= taken / (3 * 4 * elements) <= copies + 0.1


Mode = Literal["step_then_average", "average_then_step", "delay_by_one"]


def communications_of(mode: Mode, mixers: list[RoundMixer]) -> list[Communication]:
    if mode == "delay_by_one":
        return [Rounds(mixer, "delay_by_one", "average_then_step") for mixer in mixers]
    return [Rounds(mixer, "sync", mode) for mixer in mixers]


def disagreement_after(
    mode: Mode, topology: str, size: int, gain: float, lr: float
) -> float:
    """Largest weight after 200 steps on w²/2 (h = 1) from alternating ±1."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(size // 2)
    vectors, mixers = round_mixers(signs[:, None], topology, gain)
    communications = communications_of(mode, mixers)
    result = lockstep(vectors, communications, torch.clone, lr, 200)
    end(communications)
    return float(result.abs().max())


@pytest.mark.parametrize(
    ("mode", "topology", "size", "gain", "bound"),
    [
        ("average_then_step", "ring", 4, 1.0, 2 / 3),
        ("average_then_step", "ring", 4, 0.5, 2 - 0.5 * 4 / 3),
        ("average_then_step", "complete", 2, 1.0, 1.0),
        ("delay_by_one", "complete", 4, 1.0, 1.0),
        ("delay_by_one", "complete", 4, 0.5, 1.5),
        ("delay_by_one", "ring", 4, 1.0, 2 / 3),
    ],
)
def test_an_average_of_the_weights_before_the_step_bounds_the_learning_rate(
    mode: Mode, topology: str, size: int, gain: float, bound: float
) -> None:
    """lr h < 2 - gamma (1 - lambda_min)."""
    assert disagreement_after(mode, topology, size, gain, bound - 0.05) < 0.1
    assert disagreement_after(mode, topology, size, gain, bound + 0.05) > 10


def test_step_then_average_is_stable_up_to_two() -> None:
    """The mode's factor is lambda (1 - lr h), here with lambda = -1/3."""
    assert disagreement_after("step_then_average", "ring", 4, 1.0, 1.95) < 1e-6
    # Beyond 2 this mode is still stable, for |lambda| = 1/3: the mean diverges first.
    rows = torch.ones(4, 1, dtype=torch.float64)
    for lr, grows in ((1.95, False), (2.05, True)):
        vectors, mixers = round_mixers(rows, "ring")
        communications = communications_of("step_then_average", mixers)
        result = lockstep(vectors, communications, torch.clone, lr, 100)
        assert bool(result.abs().max() > 10) is grows


def test_a_diverged_learner_is_refused_and_counted() -> None:
    rows = random_rows(4)
    rows[0] = float("nan")
    vectors, mixers = round_mixers(rows, "ring")
    communications = [Rounds(mixer, "sync", "step_then_average") for mixer in mixers]
    result = lockstep(vectors, list(communications), torch.zeros_like, 0.0, 3)
    assert result[1:].isfinite().all()
    assert [c.statistics().refused for c in communications] == [3, 3, 0, 3]


def test_statistics_count_rounds_and_bytes() -> None:
    vectors, mixers = round_mixers(random_rows(5, length=10), "ring")
    communications = [Rounds(mixer, "sync", "step_then_average") for mixer in mixers]
    lockstep(vectors, list(communications), torch.zeros_like, 0.0, 3)
    for communication in communications:
        statistics = communication.statistics()
        assert statistics.exchanges == statistics.merges == 3
        assert statistics.bytes_sent == 3 * 2 * 10 * 8  # two neighbours, float64
        assert statistics.staleness == {0: 3}
        assert statistics.exposed_seconds > 0


class Recorder(InlineWorker):
    """Notes how it is stopped."""

    def __init__(self) -> None:
        self.stopped: list[float | None] = []

    @override
    def stop(self, seconds: float | None) -> None:
        self.stopped.append(seconds)


def test_the_end_waits_for_a_round_and_an_abort_only_for_seconds() -> None:
    _, (mixer, *_) = round_mixers(random_rows(2), "ring")
    for order in ("step_then_average", "average_then_step"):
        worker = Recorder()
        rounds = Rounds(mixer, "delay_by_one", order, worker=worker)
        rounds.abort()
        rounds.stop()
        assert worker.stopped == [2.0, None]


@pytest.mark.parametrize(("goes_on", "num_launched"), [(False, 1), (True, 0)])
def test_a_resumed_run_does_not_repeat_the_round_that_was_joined_for_its_checkpoint(
    goes_on: bool, num_launched: int
) -> None:
    mixer = Mock()
    rounds = Rounds(mixer, "sync", "average_then_step", worker=InlineWorker())
    if goes_on:
        rounds.go_on_from(5, 4)
    rounds.start()
    assert mixer.take_snapshot.call_count == num_launched
    assert rounds.step_and_round == ((5, 4) if goes_on else (1, mixer.round))


def test_an_average_rounds_alike_in_whatever_order_its_shares_come() -> None:
    rows = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    found = set[float]()
    for order in itertools.permutations(range(3)):
        average(rows, dict.fromkeys(order, 0.5), into := torch.empty(1))
        found.add(into.item())
    assert len(found) == 1


def test_an_optimizer_that_calls_its_closure_often_averages_once_a_step() -> None:
    told = list[str]()
    average = averaging_closure(
        lambda: told.append("closure") or 7, lambda: told.append("average")
    )
    assert [average() for _ in range(3)] == [7] * 3
    assert told == ["closure", "average", "closure", "closure"]


def test_a_schedule_refuses_a_matrix_that_loses_mass() -> None:
    leaky = Topology("leaky", lambda index, *_: {index: 0.5}, lambda size: 1)
    with pytest.raises(
        ValueError, match=r"takes .* must sum to 1, they are off by 0.5"
    ):
        Schedule(leaky, 3).part(0, 0)
    with pytest.raises(ValueError, match="must sum to 1"):
        Schedule(leaky, 3).mixing(0)
