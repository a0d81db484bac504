"""What a mixing matrix must be, and what its spectrum says."""

import math

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.topology.matrices import (
    check_connected,
    check_consensus,
    check_mixing,
    complete,
    contraction,
    identity,
    with_gain,
)


def ring(size: int) -> Tensor:
    eye = identity(size)
    return (eye + eye.roll(1, dims=0) + eye.roll(-1, dims=0)) / 3


def swap_of_two() -> Tensor:
    return torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)


def test_the_gap_of_a_ring_is_the_closed_form() -> None:
    for size in (4, 8, 15, 64):
        expected = 1 - (1 + 2 * math.cos(2 * math.pi / size)) / 3
        assert 1 - contraction([ring(size)]) == pytest.approx(expected)


def test_the_gap_is_one_where_a_round_gives_the_mean() -> None:
    for size in (1, 2, 7):
        assert contraction([complete(size)]) == 0


def test_the_contraction_of_a_period_is_per_round() -> None:
    """Twice the same round contracts as the round does; with a rest, by the root."""
    one = contraction([ring(8)])
    assert contraction([ring(8), ring(8)]) == pytest.approx(one)
    assert contraction([ring(8), identity(8)]) == pytest.approx(math.sqrt(one))
    assert contraction([identity(8)]) == pytest.approx(1)
    assert contraction([ring(8), complete(8)]) == 0


def test_the_gain_moves_each_eigenvalue_towards_one() -> None:
    plain = torch.linalg.eigvalsh(ring(8))
    damped = torch.linalg.eigvalsh(with_gain(ring(8), 0.25))
    torch.testing.assert_close(damped, 1 - 0.25 * (1 - plain))


@pytest.mark.parametrize(
    ("mixing", "message"),
    [
        (torch.ones(2, 3), "square"),
        (torch.tensor([[2.0, -1.0], [-1.0, 2.0]]), "negative"),
        (torch.tensor([[1.0, 1.0], [0.0, 0.0]]), "row .* off by 1;"),
        (torch.tensor([[1.0, 0.0], [1.0, 0.0]]), "column .* off by 1;"),
        (torch.tensor([[math.nan, 1.0], [1.0, 0.0]]), "got nan"),
        (torch.full((3, 3), 1 / 3).double(), r"dtype=torch.float64"),
    ],
)
def test_a_matrix_that_is_not_doubly_stochastic_is_refused(
    mixing: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_mixing(mixing)


def test_edges_that_leave_somebody_out_are_refused_with_their_numbers() -> None:
    check_connected(5, [(0, 1), (2, 1), (3, 4), (4, 2)])
    check_connected(1, [])
    with pytest.raises(
        ValueError, match=r"connect all 5 .* from super-learner 0 to 3, 4"
    ):
        check_connected(5, [(0, 1), (2, 1), (3, 4)])
    with pytest.raises(ValueError, match=r"to 1, 2, 3, 4, 5, 6, 7, 8, \.\.\.;"):
        check_connected(20, [])


def test_rounds_that_pass_a_disagreement_on_undiminished_are_refused() -> None:
    with pytest.raises(ValueError, match=r"preserves a disagreement.*\(I \+ T\) / 2"):
        check_consensus([swap_of_two()])
    with pytest.raises(ValueError, match="preserves a disagreement"):
        check_consensus([identity(5).roll(1, dims=0)])
    check_consensus([(identity(2) + swap_of_two()) / 2])
    check_consensus([swap_of_two(), complete(2)])
