"""What is too far: an explosion is, and nothing that an ordinary training does."""

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.gossip.codecs import make_codec
from lightning_adpsgd.gossip.quarantine import NUM_FIRST, Disagreement

Step = Callable[[Tensor, int], Tensor]


def verdicts(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[bool]:
    """Of exchanges of one part each: which are left out."""
    disagreement = Disagreement()
    return [judge(disagreement, *pair) for pair in pairs]


def judge(disagreement: Disagreement, mine: Tensor, theirs: Tensor) -> bool:
    distance, *norms = (float(v.norm()) for v in (mine - theirs, mine, theirs))
    far = disagreement.is_unusual(distance) and disagreement.is_far(distance, *norms)
    disagreement.end()
    return far


def training(
    start: Tensor, rate: float, steps: int, every: int = 1, curvature: float = 1.0
) -> list[bool]:
    """Two learners of one quadratic with noisy gradients, who meet now and then."""
    generator = torch.Generator().manual_seed(0)
    ends, disagreement, found = [start.clone(), start.clone()], Disagreement(), []
    goal = torch.randn(len(start), generator=generator)
    for step in range(steps):
        for end in ends:
            noise = torch.randn(len(start), generator=generator)
            end -= rate * (curvature * (end - goal) + noise)
        if step % every == 0:
            found.append(judge(disagreement, *ends))
            mean = (ends[0] + ends[1]) / 2
            ends = [mean.clone(), mean.clone()]
    return found


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.3, 1.5, 1.99])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("every", [1, 7])
def test_no_training_that_converges_is_taken_for_an_explosion(
    rate: float, scale: float, every: int
) -> None:
    start = scale * torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert not any(training(start, rate, 500, every))


def test_what_is_usual_follows_disagreements_that_are_near() -> None:
    disagreement, weights = Disagreement(), torch.full((4,), 100.0)
    apart = torch.tensor([1.0, 0.0, 0.0, 0.0])
    for _ in range(NUM_FIRST):
        judge(disagreement, weights, weights + apart)
    unusual = list[bool]()
    for _ in range(3):
        unusual.append(disagreement.is_unusual(30.0))
        assert not disagreement.is_far(30.0, 200.0, 200.0)
        disagreement.end()
    assert unusual == [True, True, False]


def test_weights_that_are_frozen_at_zero_and_later_trained_are_not_far() -> None:
    still = [(torch.zeros(4), torch.zeros(4))] * 100
    moving = [(torch.ones(4), -torch.ones(4) * k) for k in range(NUM_FIRST)]
    assert not any(verdicts(still + moving))


def test_a_long_time_apart_is_not_far() -> None:
    generator = torch.Generator().manual_seed(2)
    usual = torch.randn(100, generator=generator)
    near = [(usual, usual + 0.001)] * 100
    other = torch.randn(100, generator=generator)  # of another training altogether
    assert not any(verdicts([*near, (usual, other)]))


@pytest.mark.parametrize("factor", [1e3, 1e20, math.inf])
def test_weights_that_jump_are_far_at_once(factor: float) -> None:
    usual = torch.ones(100)
    near = [(usual, usual * 1.01)] * 30
    assert verdicts([*near, (usual, usual * factor)]) == [False] * 30 + [True]


@pytest.mark.parametrize(
    ("num", "is_known"), [(NUM_FIRST - 1, False), (NUM_FIRST, True)]
)
def test_what_is_usual_is_known_after_as_many_exchanges(
    num: int, is_known: bool
) -> None:
    usual = torch.ones(100)
    near = [(usual, usual * 1.01)] * num
    assert verdicts([*near, (usual, usual * 1e3)])[-1] is is_known


@pytest.mark.parametrize("growth", [1.5, 2.0, 10.0])
def test_weights_that_grow_in_each_step_are_left_before_they_do_harm(
    growth: float,
) -> None:
    usual = torch.ones(100)
    near = [(usual, usual * 1.01)] * 30
    steps = range(1, 40)
    growing = [(usual, usual * min(growth**step, 1e15)) for step in steps]
    found = verdicts(near + growing)[30:]
    first = found.index(True)
    # What was let in before is of the size of the healthy weights themselves.
    assert growth**first <= 10 * (1 + 2.0)
    assert all(found[first:])


def test_both_ends_agree_whatever_they_are() -> None:
    """Each sees the other's message as `theirs`; the state of both goes alike."""
    generator = torch.Generator().manual_seed(3)
    ends, one, other = [torch.ones(9)] * 2, Disagreement(), Disagreement()
    for step in range(200):
        ends = [e + torch.randn(9, generator=generator) * 0.01 for e in ends]
        if step % 50 == 49:
            ends[step // 50 % 2] = ends[0] * 1e6
        pairs = (one, *ends), (other, *ends[::-1])
        first, second = (judge(*pair) for pair in pairs)
        assert first == second == (step % 50 == 49)
        if first:
            ends = [torch.ones(9)] * 2


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.int8])
def test_the_norm_of_a_message_is_that_of_its_weights_or_a_bound(
    wire_dtype: torch.dtype | None,
) -> None:
    codec = make_codec(wire_dtype, torch.float32)
    for scale in (1e-3, 1.0, 1e6, math.inf):
        weights = torch.randn(3000, generator=torch.Generator().manual_seed(4))
        weights[5] *= scale
        message = torch.empty(codec.length(3000), dtype=codec.dtype)
        codec.encode(weights.clone(), message, place=int(min(scale, 1e9)))
        norm = float(weights.norm())
        if math.isfinite(norm):
            assert 0.99 * norm <= codec.norm(message) <= 100 * norm
        else:
            assert not math.isfinite(codec.norm(message))
