"""Rounds among super-learners of different sizes, against the oracle."""

from typing import Any

import pytest
import torch

from lightning_adpsgd import reference
from lightning_adpsgd.mixing.rounds import RoundMixer
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from tests.helpers import (
    PATIENCE,
    exists,
    mixing_of,
    random_rows,
    take_first,
    together,
)
from tests.unequal import SIZES, learners_of, num_elements, rows_of

pytestmark = pytest.mark.usefixtures("engine_device")


def rounds(mixer: RoundMixer) -> None:
    for _ in range(3):
        mixer.take_snapshot()
        mixer.mix()
        mixer.finish()


@pytest.mark.parametrize("name", ["ring", "complete", "random_pairs", "exponential"])
@pytest.mark.parametrize("holds_all", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_rounds_of_unequal_super_learners_are_matrix_products(
    sizes: tuple[int, ...], holds_all: bool, name: str
) -> None:
    if not exists(name, len(sizes)):
        pytest.skip(f"no {name} of {len(sizes)}")
    rows = random_rows(len(sizes), num_elements(holds_all))
    learners = learners_of(rows, sizes, holds_all)
    schedule = Schedule(find_topology(name), len(sizes))

    def mixer_of(one: Any) -> RoundMixer:
        carriers = one.transport, one.group, schedule, PATIENCE, 3, one.further
        return RoundMixer(one.vectors, *carriers)

    mixers = [mixer_of(one) for one in learners]
    together([lambda m=mixer: rounds(m) for mixer in mixers])
    oracle = reference.synchronous(
        rows, lambda weights, _: weights, mixing_of(name, len(sizes)), lr=0.0
    )
    expected = take_first(oracle, 3)[-1]
    result = rows_of(learners, sizes)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)


def test_a_diverged_super_learner_is_left_out_by_all_owners() -> None:
    sizes = (2, 4)
    rows = random_rows(2, num_elements(True))
    rows[0] = torch.nan
    learners = learners_of(rows, sizes, holds_all=True)
    schedule = Schedule(find_topology("complete"), 2)
    mixers = [
        RoundMixer(
            one.vectors, one.transport, one.group, schedule, PATIENCE, 3, one.further
        )
        for one in learners
    ]
    together([lambda m=mixer: rounds(m) for mixer in mixers])
    assert torch.equal(rows_of(learners[2:], (4,))[0], rows[1])
