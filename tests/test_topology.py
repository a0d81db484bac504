import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.topology import (
    TOPOLOGIES,
    alternating_pairs,
    asks,
    check_mixing,
    complete,
    exponential,
    find_topology,
    neighbours,
    random_pairs,
    random_ring,
    ring,
    spectral_gap,
    with_gain,
)
from tests.helpers import ALL_TOPOLOGIES, SIZES, mixing_rounds

SYMMETRIC = [name for name in ALL_TOPOLOGIES if name != "exponential"]
PERIODIC = [name for name in ALL_TOPOLOGIES if TOPOLOGIES[name].period(4)]
every_topology = pytest.mark.parametrize("name", ALL_TOPOLOGIES)
every_size = pytest.mark.parametrize("size", SIZES)


def second_eigenvalue(mixing: Tensor) -> float:
    return 1 - spectral_gap(mixing)


@every_topology
@every_size
def test_every_round_is_doubly_stochastic(name: str, size: int) -> None:
    ones = torch.ones(size, dtype=torch.float64)
    for mixing in mixing_rounds(name, size, 12):
        assert mixing.dtype == torch.float64
        assert mixing.shape == (size, size)
        assert (mixing >= 0).all()
        torch.testing.assert_close(mixing.sum(0), ones, atol=1e-12, rtol=0)
        torch.testing.assert_close(mixing.sum(1), ones, atol=1e-12, rtol=0)


@every_topology
@every_size
def test_peers_cover_the_neighbours_of_every_round(name: str, size: int) -> None:
    topology = find_topology(name)
    for index in range(size):
        met = {
            j
            for mixing in mixing_rounds(name, size, 3 * size)
            for j in neighbours(mixing, index)
        }
        assert met <= set(topology.peers(index, size))
        assert index not in topology.peers(index, size)


@pytest.mark.parametrize("name", PERIODIC)
@every_size
def test_a_period_is_when_the_matrices_repeat(name: str, size: int) -> None:
    period = TOPOLOGIES[name].period(size)
    rounds = mixing_rounds(name, size, 3 * period)
    for k in range(period, 3 * period):
        assert torch.equal(rounds[k], rounds[k - period])


@pytest.mark.parametrize("name", SYMMETRIC)
@every_size
def test_what_i_takes_from_j_is_what_j_takes_from_i(name: str, size: int) -> None:
    for mixing in mixing_rounds(name, size):
        torch.testing.assert_close(mixing, mixing.T, atol=0, rtol=0)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_the_hypercube_is_symmetric(size: int) -> None:
    for mixing in mixing_rounds("exponential", size):
        assert torch.equal(mixing, mixing.T)


@every_topology
@every_size
def test_at_equal_rounds_every_edge_is_asked_exactly_once(name: str, size: int) -> None:
    for r, mixing in enumerate(mixing_rounds(name, size)):
        asked = Counter(
            frozenset((i, j)) for i in range(size) for j in asks(mixing, r, i)
        )
        edges = {frozenset((i, j)) for i in range(size) for j in neighbours(mixing, i)}
        # Two one-way edges may join the same pair (S = 3): each is asked by its taker.
        assert set(asked) == edges
        if torch.equal(mixing, mixing.T):
            assert set(asked.values()) <= {1}


@every_topology
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_both_ends_of_an_edge_ask_in_some_round(name: str, size: int) -> None:
    """Or a straggler would decide how often its faster peer may exchange."""
    rounds = mixing_rounds(name, size, 256)
    for i in range(size):
        asked = {j for r, mixing in enumerate(rounds) for j in asks(mixing, r, i)}
        takes = {
            j for mixing in rounds for j in range(size) if j != i and mixing[j, i] > 0
        }
        assert asked == takes


@pytest.mark.parametrize(
    ("size", "expected"), [(8, 0.8047), (16, 0.9493), (64, 0.9968)]
)
def test_the_ring_mixes_as_the_closed_form_says(size: int, expected: float) -> None:
    value = second_eigenvalue(ring(size))
    assert value == pytest.approx((1 + 2 * math.cos(2 * math.pi / size)) / 3)
    assert value == pytest.approx(expected, abs=5e-5)


def expected_contraction(rounds: list[Tensor]) -> float:
    """Largest eigenvalue of E[T Tᵀ] on the vectors of mean zero."""
    size = len(rounds[0])
    average = torch.stack([mixing @ mixing.T for mixing in rounds]).mean(0)
    return float(torch.linalg.eigvalsh(average - complete(size)).max())


@pytest.mark.parametrize("size", [4, 6, 8])
def test_the_random_ring_contracts_the_expected_squared_distance(size: int) -> None:
    rounds = [random_ring(size, r, seed=1) for r in range(4000)]
    # Invariant under permutations, so the trace gives the eigenvalue exactly.
    trace = torch.stack([mixing @ mixing.T for mixing in rounds]).mean(0).trace()
    expected = (size - 3) / (3 * (size - 1))
    assert (trace.item() - 1) / (size - 1) == pytest.approx(expected, abs=1e-9)
    assert expected_contraction(rounds) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("size", [4, 6, 8])
def test_random_pairs_contract_the_expected_squared_distance(size: int) -> None:
    rounds = [random_pairs(size, r, seed=1) for r in range(4000)]
    trace = torch.stack([mixing @ mixing.T for mixing in rounds]).mean(0).trace()
    expected = (size - 2) / (2 * (size - 1))
    assert (trace.item() - 1) / (size - 1) == pytest.approx(expected, abs=1e-9)
    assert expected_contraction(rounds) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("size", [4, 6, 8, 16, 64])
def test_alternating_pairs_contract_by_the_squared_cosine(size: int) -> None:
    both = alternating_pairs(size, 0) @ alternating_pairs(size, 1)
    assert second_eigenvalue(both) == pytest.approx(math.cos(math.pi / size * 2) ** 2)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_the_hypercube_is_exact_after_log2_rounds(size: int) -> None:
    product = torch.linalg.multi_dot(
        [torch.eye(size, dtype=torch.float64)]
        + [exponential(size, r) for r in range(int(math.log2(size)))]
    )
    torch.testing.assert_close(product, complete(size), atol=1e-15, rtol=0)


@every_topology
@pytest.mark.parametrize("size", SIZES[1:])
def test_every_topology_reaches_consensus(name: str, size: int) -> None:
    product = torch.eye(size, dtype=torch.float64)
    for mixing in mixing_rounds(name, size, 40 * size):
        product = product @ mixing
    torch.testing.assert_close(product, complete(size), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["random_ring", "random_pairs"])
def test_learners_of_one_seed_draw_the_same_and_rounds_differ(name: str) -> None:
    draw = find_topology(name).matrix
    assert torch.equal(draw(16, 3, 5), draw(16, 3, 5))
    assert not torch.equal(draw(16, 3, 5), draw(16, 4, 5))
    assert not torch.equal(draw(16, 3, 5), draw(16, 3, 6))


def test_an_odd_number_lets_each_learner_sit_out_once_in_a_period() -> None:
    alone = [
        (alternating_pairs(5, r).diagonal() == 1).nonzero().flatten().tolist()
        for r in range(5)
    ]
    assert sorted(i for round in alone for i in round) == [0, 1, 2, 3, 4]


def test_the_gain_moves_each_eigenvalue_towards_one() -> None:
    plain = torch.linalg.eigvalsh(ring(8))
    damped = torch.linalg.eigvalsh(with_gain(ring(8), 0.25))
    torch.testing.assert_close(damped, 1 - 0.25 * (1 - plain))


@pytest.mark.parametrize(
    ("mixing", "message"),
    [
        (torch.ones(2, 3), "square"),
        (torch.tensor([[2.0, -1.0], [-1.0, 2.0]]), "negative"),
        (torch.tensor([[1.0, 1.0], [0.0, 0.0]]), "column|row"),
        (torch.tensor([[1.0, 0.0], [1.0, 0.0]]), "column|row"),
    ],
)
def test_a_matrix_that_is_not_doubly_stochastic_is_refused(
    mixing: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_mixing(mixing)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"`topology`.*'ring'.*'hypercube'"):
        find_topology("hypercube")
