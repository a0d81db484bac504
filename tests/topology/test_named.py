"""Every property of every topology that has a name, and closed forms for some."""

import math
import pickle
from collections import Counter
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.topology.matrices import (
    complete,
    contraction,
)
from lightning_adpsgd.topology.named import TOPOLOGIES, find_topology
from lightning_adpsgd.topology.schedule import Schedule
from tests.helpers import ALL_TOPOLOGIES, SIZES, asks, mixing_rounds, topologies_of

SYMMETRIC = [name for name in ALL_TOPOLOGIES if TOPOLOGIES[name].gives is None]
PERIODIC = [name for name in ALL_TOPOLOGIES if TOPOLOGIES[name].period(4)]
DRAWN = [name for name in ALL_TOPOLOGIES if name not in PERIODIC]
# So many that a matrix of S x S would not fit into any memory.
MANY = 1 << 17
every_topology = pytest.mark.parametrize("name", ALL_TOPOLOGIES)


def at_every_size(test: Callable[[str, int], None]) -> Callable[[str], None]:
    """Makes one test of each topology; what fails has a note of the size."""

    def at_all(name: str) -> None:
        for _, size in filter(lambda pair: pair[0] == name, topologies_of(*SIZES)):
            try:
                test(name, size)
            except AssertionError as error:
                error.add_note(f"{name} of {size} super-learners")
                raise

    at_all.__name__, at_all.__doc__ = test.__name__, test.__doc__
    return every_topology(at_all)


def matrix(name: str, size: int, round: int = 0, seed: int = 0) -> Tensor:
    return TOPOLOGIES[name].matrix(size, round, seed)


def neighbours(mixing: Tensor, index: int) -> list[int]:
    """Those that `index` takes from or gives to in one round."""
    meets = (mixing[:, index] > 0) | (mixing[index] > 0)
    return [j for j in meets.nonzero().flatten().tolist() if j != index]


@every_topology
def test_a_round_is_drawn_on_the_cpu_whatever_the_default_device(name: str) -> None:
    with torch.device("meta"):
        found = matrix(name, 4, seed=2**40)  # which no other test has drawn before
    assert torch.equal(found, matrix(name, 4, seed=2**40))


@at_every_size
def test_every_round_is_doubly_stochastic(name: str, size: int) -> None:
    ones = torch.ones(size, dtype=torch.float64)
    for mixing in mixing_rounds(name, size, 12):
        assert mixing.dtype == torch.float64
        assert mixing.shape == (size, size)
        assert (mixing >= 0).all()
        torch.testing.assert_close(mixing.sum(0), ones, atol=1e-12, rtol=0)
        torch.testing.assert_close(mixing.sum(1), ones, atol=1e-12, rtol=0)


@at_every_size
def test_what_all_take_is_what_all_give(name: str, size: int) -> None:
    """Rows of the matrix that the columns make; without `gives` it is symmetric."""
    topology = TOPOLOGIES[name]
    gives = topology.gives or topology.takes
    for r, mixing in enumerate(mixing_rounds(name, size, 12)):
        for index in range(size):
            row = torch.zeros(size, dtype=torch.float64)
            for j, share in gives(index, size, r, 0).items():
                row[j] = share
            torch.testing.assert_close(mixing[index], row, atol=0, rtol=0)


@at_every_size
def test_peers_cover_the_neighbours_of_every_round(name: str, size: int) -> None:
    topology = find_topology(name)
    rounds = mixing_rounds(name, size, 3 * size)
    for index in range(size):
        met = {j for mixing in rounds for j in neighbours(mixing, index)}
        assert met <= set(topology.peers(index, size))
        assert index not in topology.peers(index, size)
        if name in PERIODIC:
            assert met == set(topology.peers(index, size))


@at_every_size
def test_a_period_is_when_the_matrices_repeat(name: str, size: int) -> None:
    if name in DRAWN:
        return
    period = TOPOLOGIES[name].period(size)
    rounds = mixing_rounds(name, size, 3 * period)
    for k in range(period, 3 * period):
        assert torch.equal(rounds[k], rounds[k - period])


def test_only_the_exponential_is_not_symmetric_and_only_off_powers_of_two() -> None:
    assert set(ALL_TOPOLOGIES) - set(SYMMETRIC) == {"exponential"}
    for size in (2, 4, 8, 16):
        for mixing in mixing_rounds("exponential", size):
            assert torch.equal(mixing, mixing.T)


@at_every_size
def test_asking_for_one_learner_is_reading_the_matrix(name: str, size: int) -> None:
    topology = TOPOLOGIES[name]
    for seed in (0, 3):
        for r in range(12):
            mixing = topology.matrix(size, r, seed)
            for index in range(size):
                assert topology.asks(index, size, r, seed) == asks(mixing, r, index)


@at_every_size
def test_at_equal_rounds_every_edge_is_asked_exactly_once(name: str, size: int) -> None:
    for r, mixing in enumerate(mixing_rounds(name, size)):
        asked = Counter(
            frozenset((i, j))
            for i in range(size)
            for j in TOPOLOGIES[name].asks(i, size, r)
        )
        edges = {frozenset((i, j)) for i in range(size) for j in neighbours(mixing, i)}
        # Two one-way edges may join the same pair (S = 3): each is asked by its taker.
        assert set(asked) == edges
        if torch.equal(mixing, mixing.T):
            assert set(asked.values()) <= {1}


@pytest.mark.parametrize(("name", "size"), topologies_of(2, 3, 4, 5, 8))
def test_both_ends_of_an_edge_ask_in_some_round(name: str, size: int) -> None:
    """Or a straggler would decide how often its faster peer may exchange."""
    takes = torch.stack(mixing_rounds(name, size, 256)).sum(0).fill_diagonal_(0)
    for i in range(size):
        asked = {j for r in range(256) for j in TOPOLOGIES[name].asks(i, size, r)}
        assert sorted(asked) == takes[:, i].nonzero().flatten().tolist()


@at_every_size
def test_every_topology_reaches_consensus(name: str, size: int) -> None:
    """Within 4 S² rounds, four times the ring's; drawn ones within 160 at any size."""
    period = TOPOLOGIES[name].period(size)
    product = reduce(torch.matmul, mixing_rounds(name, size, period or 160))
    if period:
        num_periods = -(-size * max(40, 4 * size) // period)
        product = torch.linalg.matrix_power(product, num_periods)
    torch.testing.assert_close(product, complete(size), atol=1e-6, rtol=0)


@every_topology
def test_a_topology_goes_through_a_pickle(name: str) -> None:
    """To learners that are spawned."""
    copy = pickle.loads(pickle.dumps(TOPOLOGIES[name]))
    assert copy == TOPOLOGIES[name]


@pytest.mark.parametrize("name", [n for n in ALL_TOPOLOGIES if n != "complete"])
def test_a_learner_of_very_many_needs_no_matrix(name: str) -> None:
    topology = TOPOLOGIES[name]
    for r in (0, 1, 5):
        for j in topology.asks(12_345, MANY, r):
            assert 12_345 in topology.takes(j, MANY, r, 0)
            assert 12_345 not in topology.asks(j, MANY, r)


@pytest.mark.parametrize("name", DRAWN)
def test_learners_of_one_seed_draw_the_same_and_rounds_differ(name: str) -> None:
    assert torch.equal(matrix(name, 16, 3, 5), matrix(name, 16, 3, 5))
    assert not torch.equal(matrix(name, 16, 3, 5), matrix(name, 16, 4, 5))
    assert not torch.equal(matrix(name, 16, 3, 5), matrix(name, 16, 3, 6))


# --- closed forms


@pytest.mark.parametrize(
    ("size", "expected"), [(8, 0.8047), (16, 0.9493), (64, 0.9968)]
)
def test_the_ring_mixes_as_the_closed_form_says(size: int, expected: float) -> None:
    value = contraction([matrix("ring", size)])
    assert value == pytest.approx((1 + 2 * math.cos(2 * math.pi / size)) / 3)
    assert value == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (4, 4), (3, 5), (8, 8)])
def test_the_grid_mixes_as_the_rings_of_its_sides(rows: int, columns: int) -> None:
    """Its eigenvalues are the means of those of the two rings."""
    slowest = (1 + (1 + 2 * math.cos(2 * math.pi / columns)) / 3) / 2
    assert contraction([matrix("grid", rows * columns)]) == pytest.approx(slowest)


def expected_contraction(rounds: list[Tensor]) -> float:
    """Largest eigenvalue of E[T Tᵀ] on the vectors of mean zero."""
    size = len(rounds[0])
    average = torch.stack([mixing @ mixing.T for mixing in rounds]).mean(0)
    return float(torch.linalg.eigvalsh(average - complete(size)).max())


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        *(("random_ring", s, (s - 3) / (3 * (s - 1))) for s in (4, 5, 6, 8)),
        *(("random_pairs", s, (s - 2) / (2 * (s - 1))) for s in (4, 6, 8)),
        *(("random_pairs", s, 1 / 2) for s in (3, 5, 7)),
    ],
)
def test_drawn_rounds_contract_the_expected_squared_distance(
    name: str, size: int, expected: float
) -> None:
    rounds = [matrix(name, size, r, seed=1) for r in range(2000)]
    # Invariant under permutations, so the trace gives the eigenvalue exactly.
    trace = torch.stack([mixing @ mixing.T for mixing in rounds]).mean(0).trace()
    assert (trace.item() - 1) / (size - 1) == pytest.approx(expected, abs=1e-9)
    assert expected_contraction(rounds) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("size", [4, 6, 8, 16, 64])
def test_alternating_pairs_contract_by_the_squared_cosine(size: int) -> None:
    both = matrix("alternating_pairs", size, 0) @ matrix("alternating_pairs", size, 1)
    expected = math.cos(math.pi / size * 2) ** 2
    assert contraction([both]) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["hypercube", "exponential"])
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_the_hypercube_is_exact_after_log2_rounds(name: str, size: int) -> None:
    rounds = mixing_rounds(name, size, int(math.log2(size)))
    product = torch.linalg.multi_dot([torch.eye(size, dtype=torch.float64), *rounds])
    torch.testing.assert_close(product, complete(size), atol=1e-15, rtol=0)
    assert contraction(rounds) == 0


def test_an_odd_number_lets_each_learner_sit_out_once_in_a_period() -> None:
    alone = [
        (mixing.diagonal() == 1).nonzero().flatten().tolist()
        for mixing in mixing_rounds("alternating_pairs", 5, 5)
    ]
    assert sorted(i for round in alone for i in round) == [0, 1, 2, 3, 4]


# --- what is refused


@pytest.mark.parametrize("size", [3, 6, 7, 12, 100])
def test_a_hypercube_has_a_power_of_two_of_corners(size: int) -> None:
    message = f'"hypercube"` needs a power of two.*got {size}; "exponential"'
    with pytest.raises(ValueError, match=message):
        Schedule(TOPOLOGIES["hypercube"], size)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"`topology`.*'ring'.*'hypercube'.*'star'"):
        find_topology("star")
