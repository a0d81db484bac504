"""Rounds of averaging in which some weights are not finite, against arithmetic."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.mixing.rounds import RoundMixer
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from tests.helpers import PATIENCE, ThreadSuperLearner, random_rows, together
from tests.threads import ThreadTransport

NAN, INF = float("nan"), float("inf")


def mixer_of(
    vector: Tensor, topology: str, transport: ThreadTransport, **arguments: Any
) -> RoundMixer:
    schedule = Schedule(find_topology(topology), transport.size)
    group = arguments.pop("group", SuperLearnerGroup())
    return RoundMixer([vector], transport, group, schedule, PATIENCE, **arguments)


def mixers_of(vectors: list[Tensor], topology: str) -> list[RoundMixer]:
    return [
        mixer_of(vector, topology, transport, chunk_elements=3)
        for vector, transport in zip(
            vectors, ThreadTransport.connect(len(vectors)), strict=True
        )
    ]


def one_round(mixer: RoundMixer) -> None:
    mixer.take_snapshot()
    mixer.mix()
    mixer.finish()


def all_round(mixers: list[RoundMixer]) -> None:
    together([lambda one=one: one_round(one) for one in mixers])


def diverged_rows(num: int, value: float = NAN) -> tuple[Tensor, list[Tensor]]:
    """Rows as they should be, and vectors of which the first has diverged all over."""
    rows = random_rows(num)
    vectors = [row.clone() for row in rows]
    vectors[0].fill_(value)
    return rows, vectors


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_on_a_ring_neighbours_leave_a_diverged_one_out_and_count_it(
    value: float,
) -> None:
    rows, vectors = diverged_rows(5, value)
    mixers = mixers_of(vectors, "ring")
    all_round(mixers)
    torch.testing.assert_close(vectors[1], (2 * rows[1] + rows[2]) / 3)
    torch.testing.assert_close(vectors[2], (rows[1] + rows[2] + rows[3]) / 3)
    # The sum of those that were finite is what it was.
    torch.testing.assert_close(sum(vectors[1:]), rows[1:].sum(0))
    assert [int(one.refused) for one in mixers] == [1, 1, 0, 0, 1]


@pytest.mark.parametrize("value", [NAN, INF])
def test_of_all_the_finite_ones_take_their_mean(value: float) -> None:
    rows, vectors = diverged_rows(4, value)
    mixers = mixers_of(vectors, "complete")
    all_round(mixers)
    for vector in vectors[1:]:
        torch.testing.assert_close(vector, rows[1:].mean(0))
    assert [int(one.refused) for one in mixers] == [1, 1, 1, 1]


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_one_element_is_enough_and_only_its_chunk_is_left_out(topology: str) -> None:
    rows = random_rows(3)
    vectors = [row.clone() for row in rows]
    vectors[2][4] = NAN
    all_round(mixers_of(vectors, topology))
    whole, rest = rows.mean(0), rows[:2].mean(0)
    # A ring of three takes the mean of all.
    expected = torch.cat([whole[:3], rest[3:6], whole[6:]])
    for vector in vectors[:2]:
        torch.testing.assert_close(vector, expected)
    torch.testing.assert_close(vectors[2][:3], whole[:3])


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_diverged_one_stays_so_and_says_so_once(
    topology: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows, vectors = diverged_rows(3)
    mixers = mixers_of(vectors, topology)
    for _ in range(2):
        all_round(mixers)
    assert vectors[0].isnan().all()
    for vector in vectors[1:]:
        assert vector.isfinite().all()
    torch.testing.assert_close(vectors[1] + vectors[2], rows[1:].sum(0))
    assert caplog.text.count("the weights of super-learner 0 are infinite or NaN") == 1
    assert "super-learner 1" not in caplog.text


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_where_all_have_diverged_nothing_is_averaged(topology: str) -> None:
    vectors = [torch.full((5,), NAN, dtype=torch.float64) for _ in range(3)]
    all_round(mixers_of(vectors, topology))
    assert all(vector.isnan().all() for vector in vectors)


@pytest.mark.parametrize("topology", ["ring", "complete"])
@pytest.mark.parametrize("element", [0, 7])
def test_learners_of_one_super_learner_leave_the_same_out(
    topology: str, element: int
) -> None:
    """Only one of them sees it in its shard, and all stay alike."""
    rows = random_rows(3, length=8)
    vectors = [[row.clone() for _ in range(2)] for row in rows]
    for vector in vectors[1]:
        vector[element] = NAN
    transports = [ThreadTransport.connect(3) for _ in range(2)]
    mixers = [
        mixer_of(vectors[s][n], topology, transports[n][s], group=group)
        for s in range(3)
        for n, group in enumerate(ThreadSuperLearner.connect(2))
    ]
    all_round(mixers)
    for index in (0, 2):
        first, second = vectors[index]
        assert torch.equal(first, second)
        assert first.isfinite().all()
    torch.testing.assert_close(
        vectors[0][0] + vectors[2][0],
        rows[[0, 2]].sum(0) + torch.where(whole_half(element), shift(rows), 0.0),
    )


def whole_half(element: int) -> Tensor:
    """The half of eight elements whose shard has nothing diverged in it."""
    places = torch.arange(8)
    return (places < 4) != (element < 4)


def shift(rows: Tensor) -> Tensor:
    """What the two others gain where all three take their mean."""
    return 2 * rows.mean(0) - rows[[0, 2]].sum(0)
