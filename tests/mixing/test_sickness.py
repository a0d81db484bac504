"""Rounds of averaging in which some weights are not finite, against arithmetic."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.mixing.rounds import RoundMixer
from lightning_adpsgd.mixing.sickness import SickLearner, healthy_shares
from lightning_adpsgd.mixing.super_learner import Node
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.base import ThreadTransport
from tests.helpers import PATIENCE, ThreadNode, random_rows, together

NAN, INF = float("nan"), float("inf")


def mixer_of(
    vector: Tensor, topology: str, transport: ThreadTransport, **arguments: Any
) -> RoundMixer:
    schedule = Schedule(find_topology(topology), transport.size)
    node = arguments.pop("node", Node())
    return RoundMixer([vector], transport, node, schedule, PATIENCE, **arguments)


def mixers_of(
    vectors: list[Tensor], topology: str, max_reloads: int | None = 3
) -> list[RoundMixer]:
    return [
        mixer_of(vector, topology, transport, max_reloads=max_reloads, chunk_elements=3)
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


def sick_rows(num: int, value: float = NAN) -> tuple[Tensor, list[Tensor]]:
    """Rows as they should be, and vectors of which the first is sick all over."""
    rows = random_rows(num)
    vectors = [row.clone() for row in rows]
    vectors[0].fill_(value)
    return rows, vectors


def test_shares_of_the_sick_come_from_the_own_row() -> None:
    rows = {0: torch.tensor([NAN]), 1: torch.tensor([1.0]), 2: torch.tensor([2.0])}
    takes = {0: 0.25, 1: 0.5, 2: 0.25}
    assert healthy_shares(rows, takes, own=1) == {1: 0.75, 2: 0.25}
    assert healthy_shares(rows, takes, own=0) == pytest.approx({1: 2 / 3, 2: 1 / 3})
    assert healthy_shares(rows, {0: 1.0}, own=0) == {}
    assert healthy_shares(rows, {0: 0.5, 2: 0.5}, own=1) == {2: 0.5, 1: 0.5}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_on_a_ring_neighbours_leave_a_sick_one_out_and_it_takes_their_mean(
    value: float,
) -> None:
    rows, vectors = sick_rows(5, value)
    mixers = mixers_of(vectors, "ring")
    all_round(mixers)
    torch.testing.assert_close(vectors[0], (rows[1] + rows[4]) / 2)
    torch.testing.assert_close(vectors[1], (2 * rows[1] + rows[2]) / 3)
    torch.testing.assert_close(vectors[2], (rows[1] + rows[2] + rows[3]) / 3)
    # The sum of those who were healthy is what it was.
    torch.testing.assert_close(sum(vectors[1:]), rows[1:].sum(0))
    assert [one.statistics().reloads for one in mixers] == [1, 0, 0, 0, 0]
    assert [one.statistics().refused for one in mixers] == [1, 1, 0, 0, 1]


@pytest.mark.parametrize("value", [NAN, INF])
def test_of_all_the_healthy_take_their_mean_and_the_sick_one_as_well(
    value: float,
) -> None:
    rows, vectors = sick_rows(4, value)
    mixers = mixers_of(vectors, "complete")
    all_round(mixers)
    for vector in vectors:
        torch.testing.assert_close(vector, rows[1:].mean(0))
    assert [one.statistics().reloads for one in mixers] == [1, 0, 0, 0]
    all_round(mixers)
    assert [one.statistics().refused for one in mixers] == [1, 1, 1, 1]


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_one_element_is_enough_and_only_its_chunk_is_taken(topology: str) -> None:
    rows = random_rows(3)
    vectors = [row.clone() for row in rows]
    vectors[2][4] = NAN
    all_round(mixers_of(vectors, topology))
    whole, rest = rows.mean(0), rows[:2].mean(0)
    expected = torch.cat([whole[:3], rest[3:6], whole[6:]])
    for vector in vectors:
        torch.testing.assert_close(vector, expected)


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_without_reloads_the_sick_one_is_left_out_and_stays_so(topology: str) -> None:
    rows, vectors = sick_rows(3)
    mixers = mixers_of(vectors, topology, max_reloads=None)
    for _ in range(2):
        all_round(mixers)
    assert vectors[0].isnan().all()
    for vector in vectors[1:]:
        assert vector.isfinite().all()
    torch.testing.assert_close(vectors[1] + vectors[2], rows[1:].sum(0))
    assert mixers[0].statistics().reloads == 0


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_where_all_are_sick_nothing_is_averaged(topology: str) -> None:
    vectors = [torch.full((5,), NAN, dtype=torch.float64) for _ in range(3)]
    mixers = mixers_of(vectors, topology)
    all_round(mixers)
    assert all(vector.isnan().all() for vector in vectors)
    assert [one.statistics().reloads for one in mixers] == [0, 0, 0]


def test_who_is_sick_too_often_ends_with_its_name() -> None:
    _, vectors = sick_rows(3)
    mixers = mixers_of(vectors, "complete", max_reloads=1)
    all_round(mixers)
    vectors[0].fill_(NAN)
    together([lambda one=one: one.take_snapshot() for one in mixers])
    together([one.mix for one in mixers])
    with pytest.raises(SickLearner, match=r"super-learner 0 .*1 reloads.*max_reloads"):
        mixers[0].finish()
    for one in mixers[1:]:
        one.finish()
    assert all(vector.isfinite().all() for vector in vectors[1:])


@pytest.mark.parametrize("topology", ["ring", "complete"])
@pytest.mark.parametrize("sick_element", [0, 7])
def test_learners_of_one_super_learner_recover_together(
    topology: str, sick_element: int
) -> None:
    """Only one of them sees it in its shard, and all stay alike."""
    rows, told = random_rows(3, length=8), list[int]()
    vectors = [[row.clone() for _ in range(2)] for row in rows]
    for vector in vectors[1]:
        vector[sick_element] = NAN
    transports = [ThreadTransport.connect(3) for _ in range(2)]
    mixers = [
        mixer_of(
            vectors[s][n],
            topology,
            transports[n][s],
            node=node,
            max_reloads=3,
            on_reload=lambda s=s: told.append(s),
        )
        for s in range(3)
        for n, node in enumerate(ThreadNode.connect(2))
    ]
    all_round(mixers)
    half = slice(0, 4) if sick_element < 4 else slice(4, 8)
    expected = rows.mean(0)
    expected[half] = rows[[0, 2]].mean(0)[half]
    for first, second in vectors:
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected)
    assert told == [1, 1]
    assert [one.statistics().reloads for one in mixers] == [0, 0, 1, 1, 0, 0]
