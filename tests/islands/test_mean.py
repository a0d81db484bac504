"""The mean over islands that answer, and their distances from it."""

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.gossip.protocol import Position, Pulled
from lightning_adpsgd.islands.mean import Total, consensus_over_shards, mean_of

NAN = float("nan")


def chunks(row: Tensor) -> list[Tensor]:
    return [chunk.clone() for chunk in row.split(3)]


def total_of(rows: Tensor) -> Total:
    total = Total(chunks(rows[0]))
    for row in rows[1:]:
        total.add(chunks(row))
    return total


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_spread_is_the_mean_squared_distance_of_all(offset: float) -> None:
    """Also of weights that are large beside their distances."""
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) + offset
    found = total_of(rows).mean()
    mean = rows.double().mean(0)
    assert found.members == 5
    torch.testing.assert_close(torch.cat(found.values), mean.float())
    spread = float((rows.double() - mean).square().sum(1).mean())
    assert found.spread == pytest.approx(spread, rel=1e-2)
    assert found.square == pytest.approx(float(mean.square().sum()), rel=1e-5)


@pytest.mark.parametrize("sick", [0, 1, 2])
def test_diverged_weights_are_in_no_mean_whoever_has_them(
    sick: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3)
    rows[1] *= 3
    rows[sick, 3] = NAN
    found = total_of(rows).mean()
    rest = torch.cat([rows[:sick], rows[sick + 1 :]])
    assert found.members == 2
    assert torch.equal(torch.cat(found.values), rest.mean(0))
    distance = float((rest - rest.mean(0)).square().sum(1).mean())
    assert found.spread == pytest.approx(distance)
    (message,) = caplog.messages
    assert message.startswith("the weights of an island are infinite or NaN")


def test_where_all_have_diverged_there_is_no_mean() -> None:
    total = total_of(torch.full((2, 4), NAN))
    with pytest.raises(FloatingPointError, match="all islands that answered"):
        total.mean()


def test_the_distances_of_shards_add_up_and_the_fewest_members_count() -> None:
    """An island may have answered one learner, and another too late."""
    found = consensus_over_shards([(3.0, 9.0, 10.0), (2.0, 7.0, 15.0)])
    assert found.members == 2
    assert found.distance == pytest.approx(4.0)
    assert found.relative_distance == pytest.approx(4.0 / 5.0)


@pytest.mark.parametrize("shares_epochs", [False, True])
def test_the_mean_of_weights_is_where_the_furthest_is(shares_epochs: bool) -> None:
    steps, epochs = Position(9, 0, 1), Position(3, 0, 2)
    pulled = [
        Pulled(at, [torch.full((2,), n)]) for at, n in ((epochs, 1.0), (steps, 3.0))
    ]
    found = mean_of(pulled, shares_epochs)
    assert found is not None
    assert found.position == (epochs if shares_epochs else steps)
    assert torch.equal(found.values[0], torch.full((2,), 2.0))
    assert mean_of([]) is None
