"""Topologies that a user gives, against matrix arithmetic."""

import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_adpsgd.reference import synchronous
from lightning_adpsgd.topology.custom import (
    from_function,
    from_matchings,
    from_matrices,
)
from lightning_adpsgd.topology.matrices import complete, identity, with_gain
from lightning_adpsgd.topology.named import TOPOLOGIES, find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.topology.topology import Topology
from tests.helpers import (
    asks,
    engines,
    mixing_of,
    mixing_rounds,
    random_rows,
    round_mixers,
    running,
    take_first,
    together,
)

SQUARE = [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]
# Two pairs that stay close, and a link between them that carries a tenth.
TWO_RACKS = torch.tensor(
    [
        [0.5, 0.4, 0.1, 0.0],
        [0.4, 0.5, 0.0, 0.1],
        [0.1, 0.0, 0.5, 0.4],
        [0.0, 0.1, 0.4, 0.5],
    ],
    dtype=torch.float64,
)


def ring_of_function(size: int, round: int, seed: int) -> Tensor:
    return TOPOLOGIES["ring"].matrix(size)


def swaps(size: int, round: int, seed: int) -> Tensor:
    """The mean at first; from round 3 on something that is no mixing matrix."""
    return complete(size) if round < 3 else torch.ones(size, size)


@st.composite
def doubly_stochastic(draw: st.DrawFn) -> Tensor:
    """Birkhoff: a mean of permutations; with a share of its own for everybody."""
    size = draw(st.integers(2, 6))
    orders = draw(st.lists(st.permutations(range(size)), min_size=1, max_size=5))
    mean = torch.stack([identity(size)[list(order)] for order in orders]).mean(0)
    return (identity(size) + mean + complete(size)) / 3


@st.composite
def schedules_of_matchings(draw: st.DrawFn) -> tuple[int, list[Any]]:
    """Any matchings; that they join all is left to chance, and mended by a path."""
    size = draw(st.integers(2, 7))
    orders = draw(st.lists(st.permutations(range(size)), max_size=4))
    nums = [draw(st.integers(0, size // 2)) for _ in orders]
    drawn = [
        [(order[2 * p], order[2 * p + 1]) for p in range(num)]
        for order, num in zip(orders, nums, strict=True)
    ]
    path = [[(i, i + 1) for i in range(start, size - 1, 2)] for start in (0, 1)]
    return size, drawn + path


def pair_average(size: int, pairs: Any) -> Tensor:
    """The product of what each pair does."""
    mixing = identity(size)
    for i, j in pairs:
        difference = identity(size)[i] - identity(size)[j]
        mixing = mixing @ (identity(size) - difference.outer(difference) / 2)
    return mixing


# --- what they are


@given(schedules_of_matchings())
def test_matchings_average_their_pairs_in_turn(given_: tuple[int, Any]) -> None:
    size, matchings = given_
    topology = find_topology(matchings)
    topology.check_size(size)
    for r in range(2 * len(matchings)):
        mixing = topology.matrix(size, r)
        expected = pair_average(size, matchings[r % len(matchings)])
        torch.testing.assert_close(mixing, expected, atol=1e-15, rtol=0)
        for index in range(size):
            assert topology.asks(index, size, r) == asks(mixing, r, index)


@given(st.lists(doubly_stochastic(), min_size=1, max_size=1))
def test_a_matrix_stays_as_it_is_given(matrices: list[Tensor]) -> None:
    mixing, size = matrices[0], len(matrices[0])
    array: Any = mixing.numpy()
    for given_ in (mixing, mixing.tolist(), array, [array]):
        topology = find_topology(given_)
        topology.check_size(size)
        assert torch.equal(topology.matrix(size, 5), mixing)
        for index in range(size):
            others = [j for j in range(size) if j != index]
            assert topology.peers(index, size) == others


@given(doubly_stochastic(), st.integers(0, 1000))
def test_an_edge_is_asked_at_most_once_and_the_heaviest_always(
    mixing: Tensor, round: int
) -> None:
    size = len(mixing)
    topology = find_topology(mixing)
    asked = Counter(
        frozenset((i, j)) for i in range(size) for j in topology.asks(i, size, round)
    )
    assert set(asked.values()) <= {1}
    edges = (mixing + mixing.T).fill_diagonal_(0)
    heaviest = (edges == edges.max()).nonzero()[0].tolist()
    assert asked[frozenset(heaviest)] == 1


def test_exchanges_of_a_round_are_on_average_the_matrix_at_a_larger_gain() -> None:
    """To first order: gain 1 / (2 w) with the heaviest weight w, here 5/4."""
    num_rounds, topology = 4000, from_matrices([TWO_RACKS])
    asked = Counter(
        (i, j)
        for r in range(num_rounds)
        for i in range(4)
        for j in topology.asks(i, 4, r)
    )
    changes = [num * (identity(4) - pair_average(4, [p])) for p, num in asked.items()]
    total = torch.stack(changes).sum(0)
    expected = identity(4) - with_gain(TWO_RACKS, 1.25)
    # A frequency of 1/4 over 4000 rounds has a standard deviation of 0.007.
    torch.testing.assert_close(total / num_rounds, expected, atol=0.02, rtol=0)


def test_the_weights_of_a_schedule_are_to_its_heaviest() -> None:
    """In the weak matrix nobody is asked in every round."""
    weak = with_gain(TOPOLOGIES["ring"].matrix(4), 0.3)
    topology = from_matrices([pair_average(4, SQUARE[0]), weak])
    odd = range(1, 4001, 2)
    asked = [sum(len(topology.asks(i, 4, r)) for i in range(4)) for r in odd]
    # Four edges of a tenth, beside pairs of a half: a fifth of the rounds each.
    assert sum(asked) / len(asked) == pytest.approx(4 * 0.2, abs=0.08)


@pytest.mark.parametrize("name", ["ring", "grid", "exponential", "complete"])
@pytest.mark.parametrize("size", [2, 3, 5, 9])
def test_the_matrices_of_a_named_topology_are_that_topology(
    name: str, size: int
) -> None:
    named = TOPOLOGIES[name]
    copy = find_topology(mixing_rounds(name, size, named.period(size)))
    for r in range(6):
        assert torch.equal(copy.matrix(size, r), named.matrix(size, r))
        for index in range(size):
            assert copy.asks(index, size, r) == named.asks(index, size, r)
            assert copy.peers(index, size) == named.peers(index, size)


def test_a_function_gives_the_matrix_of_each_round() -> None:
    topology = find_topology(ring_of_function)
    topology.check_size(5)
    assert torch.equal(topology.matrix(5, 3), TOPOLOGIES["ring"].matrix(5))
    for r in range(6):
        assert topology.asks(2, 5, r) == TOPOLOGIES["ring"].asks(2, 5, r)
    assert topology.peers(2, 5) == [0, 1, 3, 4]


@pytest.mark.parametrize("given_", [TWO_RACKS, SQUARE, ring_of_function])
def test_what_a_user_gives_goes_through_a_pickle(given_: Any) -> None:
    topology = find_topology(given_)
    copy = pickle.loads(pickle.dumps(topology))
    assert torch.equal(copy.matrix(4, 1), topology.matrix(4, 1))
    assert copy.asks(2, 4, 1) == topology.asks(2, 4, 1)


def test_a_topology_stays_as_it_is() -> None:
    topology = from_matchings(SQUARE)
    assert find_topology(topology) is topology
    assert topology.name == "matchings"


# --- what the engines make of them


@pytest.mark.parametrize("given_", [TWO_RACKS, SQUARE, ring_of_function])
def test_rounds_over_threads_are_its_matrix_products(given_: Any) -> None:
    rows = random_rows(4)
    vectors, mixers = round_mixers(rows, given_)
    for _ in range(3):
        together([mixer.take_snapshot for mixer in mixers])
        together([mixer.mix for mixer in mixers])
        together([mixer.finish for mixer in mixers])
    oracle = synchronous(rows, lambda w, k: w, mixing_of(given_, 4), lr=0.0)
    expected = take_first(oracle, 3)[-1]
    torch.testing.assert_close(torch.stack(vectors), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("given_", [TWO_RACKS, SQUARE, ring_of_function])
def test_asynchronous_exchanges_along_it_keep_the_sum(given_: Any) -> None:
    rows = random_rows(4)
    vectors, gossips = engines(rows, given_)

    def train(index: int) -> None:
        for _ in range(30):
            gossips[index].before_update()
            vectors[index].add_(1.0)
            gossips[index].after_update()

    with running(gossips):
        together([lambda i=i: train(i) for i in range(4)])
    total = torch.stack(vectors).sum(0)
    torch.testing.assert_close(total, rows.sum(0) + 120, atol=1e-11, rtol=0)


# --- what is refused


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (torch.ones(2, 2), r"matrix 0 of `topology`: each column .* off by 1;"),
        ([TWO_RACKS, identity(3)], r"matrix 1 .* of shape \(4, 4\), got \(3, 3\)"),
        (torch.ones(4), "square"),
        (identity(4), "connect all 4 .* super-learner 0 to 1, 2, 3"),
        (identity(4).roll(1, 0), "preserves a disagreement"),
        ([[0.5, 0.6], [0.5, 0.4]], "each row .* off by 0.1"),
        ([[(0, 1), (1, 2)]], "super-learner 1 is in two pairs of matching 0"),
        ([[(0, 1)], [(2, 3), (3, 2)]], "super-learner 2 is in two pairs of matching 1"),
        ([[(0, 0)]], r"two super-learners, counted from 0, got \(0, 0\) in matching 0"),
        ([[(0, 1), (2, -1)]], r"counted from 0, got \(2, -1\)"),
        ([[(0, 1), (2, 3, 4)]], r"of two super-learners.*\(2, 3, 4\)"),
        ([], r"`topology` must be a name.*got \[\]"),
        (7, r"`topology` must be a name.*got 7"),
        ([[[0.5, 0.5]]], r"`topology` must be a name"),
        ([[0.5, 0.5], [1.0]], "matrix 0 of `topology` must be a matrix of numbers"),
        ([identity(2), "ring"], "matrix 1 of `topology` must be a matrix of numbers"),
        ([[(0, 1)], [5]], "of two super-learners.*got 5 in matching 1"),
        ([[(0, 1)], 5], "of two super-learners.*got 5 in matching 1"),
    ],
)
def test_a_thing_that_is_no_topology_is_refused_by_its_fault(
    given_: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_topology(given_)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (from_matrices([TWO_RACKS]), "matrices for 4 super-learners.*there are 5"),
        (from_matchings(SQUARE), "connect all 5 .* super-learner 0 to 4"),
        (from_matchings([[(0, 7)]]), "pair with super-learner 7, but there are 5"),
        (from_matchings([[]]), "connect all 5 .* to 1, 2, 3, 4"),
        (
            from_function(lambda size, round, seed: identity(4)),
            r"round 0 must be of shape \(5, 5\), got \(4, 4\)",
        ),
        (
            from_function(lambda size, round, seed: None),  # pyright: ignore
            "gives for round 0 must be a matrix of numbers",
        ),
    ],
)
def test_a_topology_of_another_size_is_refused(
    topology: Topology, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(topology, 5)


def test_a_function_that_errs_later_is_refused_in_that_round() -> None:
    topology = find_topology(swaps)
    topology.check_size(4)
    assert topology.asks(3, 4, 2) == [0, 1, 2]
    with pytest.raises(ValueError, match="gives for round 3: each column"):
        topology.asks(0, 4, 3)


@pytest.mark.parametrize("convert", [Tensor.tolist, Tensor.numpy])
def test_a_function_may_give_what_torch_takes_for_a_matrix(convert: Any) -> None:
    topology = find_topology(lambda size, round, seed: convert(complete(size)))
    assert torch.equal(topology.matrix(4), complete(4))


def test_a_matrix_without_a_round_is_that_of_the_first() -> None:
    rounds = [complete(4), identity(4)]
    assert torch.equal(from_matrices(rounds).matrix(4), complete(4))


def test_a_topology_is_shown_by_its_name_alone() -> None:
    assert repr(find_topology("ring")) == "Topology(name='ring')"
