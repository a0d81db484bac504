"""What travels, and that both ends make the same of it."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_adpsgd.gossip import codecs
from lightning_adpsgd.gossip.codecs import INT4, Cast, Codec, Lattice, make_codec

WIRES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, INT4)
BITS = pytest.mark.parametrize("bits", [8, 4])
ERROR = {8: 1e-5, 4: 1.5e-4}
"""Of a change, once spans fit a disagreement of 1e-4."""
BLOCK = 1024
"""Weights of one block of 8 bits, and of four of 4 bits."""


class Pair:
    """The two ends of a lane, which average two vectors."""

    def __init__(self, make: Callable[[], Codec]) -> None:
        self.codecs = (make(), make())

    def exchange(
        self, first: Tensor, second: Tensor, steps: int = 1
    ) -> tuple[Tensor, Tensor, bool]:
        """The changes at both ends and whether both were accepted."""
        messages = []
        for codec in self.codecs:
            codec.begin(steps)
        for codec, weights in zip(self.codecs, (first, second), strict=True):
            message = torch.empty(codec.length(len(weights)), dtype=codec.dtype)
            codec.encode(weights.clone(), message, place=0)
            messages.append(message)
        changes = [torch.empty_like(first) for _ in range(2)]
        accepted = [
            math.isfinite(
                codec.change(messages[end].clone(), messages[1 - end].clone(), into, 0)
            )
            for end, (codec, into) in enumerate(zip(self.codecs, changes, strict=True))
        ]
        assert accepted[0] == accepted[1]
        return changes[0], changes[1], accepted[0]

    def exchange_often(self, first: Tensor, second: Tensor) -> Tensor:
        """The last change of twelve: by then the spans of a lattice fit."""
        for _ in range(11):
            assert self.exchange(first, second)[2]
        return self.exchange(first, second)[0]


def vectors(length: int, distance: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(length, generator=generator)
    return first, first + distance * torch.randn(length, generator=generator)


@settings(max_examples=60, deadline=None)
@given(
    wire=st.sampled_from(WIRES),
    length=st.sampled_from([1, 7, BLOCK, BLOCK + 1, 3 * BLOCK - 5]),
    distance=st.sampled_from([0.0, 1e-6, 1e-2, 1.0, 1e4]),
    seed=st.integers(0, 100),
)
def test_the_changes_of_both_ends_are_opposite_to_the_last_bit(
    wire: torch.dtype, length: int, distance: float, seed: int
) -> None:
    first, second = vectors(length, distance, seed)
    pair = Pair(lambda: make_codec(wire, torch.float32))
    for _ in range(4):
        change, opposite, accepted = pair.exchange(first, second)
        if accepted:
            assert torch.equal(change, -opposite)
            first, second = first + change / 2, second + opposite / 2


@BITS
def test_weights_in_double_precision_travel_alike(bits: int) -> None:
    first, second = (one.double() for one in vectors(BLOCK + 1, 1e-4))
    change = Pair(lambda: Lattice(bits)).exchange_often(first, second)
    assert change.dtype == torch.float64
    torch.testing.assert_close(change, second - first, atol=ERROR[bits], rtol=0)


def test_memory_is_lent_to_one_at_a_time_and_used_again() -> None:
    shape, processor = torch.Size((4, 256)), torch.device("cpu")
    codecs._kept.clear()
    with (
        codecs._scratch(shape, processor) as one,
        codecs._scratch(shape, processor) as other,
    ):
        addresses = {one.wide.data_ptr(), other.wide.data_ptr()}
    assert len(addresses) == 2
    with codecs._scratch(torch.Size((2, 256)), processor) as again:
        assert again.wide.data_ptr() in addresses
    with codecs._scratch(torch.Size((40, 256)), processor) as larger:
        assert larger.narrow.shape == (40, 256)


def test_memory_of_an_inference_serves_a_training() -> None:
    codecs._kept.clear()
    first, second = vectors(256, 0.1)
    with torch.inference_mode():
        Pair(lambda: Lattice(4)).exchange(first, second)
    assert codecs._kept
    assert Pair(lambda: Lattice(4)).exchange(first, second)[2]


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cast_changes_by_the_difference_of_what_travelled(wire: torch.dtype) -> None:
    first, second = vectors(100, 0.1)
    change, _, _ = Pair(lambda: Cast(wire)).exchange(first, second)
    expected = second.to(wire).float() - first.to(wire).float()
    assert torch.equal(change, expected)


def test_a_weight_beyond_float16_is_finite_and_one_that_is_not_is_told() -> None:
    """A variance of 70,000 has not diverged."""
    first = torch.tensor([1.0, 70_000.0, -80_000.0, 60_000.0])
    second = torch.tensor([2.0, 70_001.0, -10.0, 90_000.0])
    pair = Pair(lambda: Cast(torch.float16))
    change, *_ = pair.exchange(first, second)
    torch.testing.assert_close(
        change, torch.tensor([1.0, 0.0, 65_494.0, 5_504.0]), rtol=1e-3, atol=0
    )
    for bad in (math.inf, -math.inf, math.nan):
        message = torch.empty(2, dtype=torch.float16)
        Cast(torch.float16).encode(torch.tensor([bad, 70_000.0]), message, 0)
        assert not message[0].isfinite()


@pytest.mark.parametrize(("bits", "share"), [(8, 0.04), (4, 0.3)])
def test_a_few_bits_resolve_the_disagreement_and_not_the_weight(
    bits: int, share: float
) -> None:
    """The error, of the largest disagreement; weights are 1000 times larger."""
    first, second = vectors(4 * BLOCK, 1e-3)
    pair = Pair(lambda: Lattice(bits))
    change = pair.exchange_often(first, second)
    error = (change - (second - first)).abs().max()
    assert error < share * (second - first).abs().max()


@BITS
def test_two_vectors_agree_as_far_as_their_own_precision_goes(bits: int) -> None:
    first, second = vectors(4 * BLOCK, 0.1)
    pair = Pair(lambda: Lattice(bits))
    for _ in range({8: 40, 4: 80}[bits]):
        change, opposite, _ = pair.exchange(first, second)
        first, second = first + change / 2, second + opposite / 2
    assert (first - second).abs().max() < 2**-20 * first.abs().max()


@BITS
def test_a_span_too_narrow_leaves_a_block_as_it_is_and_widens(bits: int) -> None:
    first, second = vectors(256, 1e-4)
    lattices = [Lattice(bits), Lattice(bits)]
    pair = Pair(iter(lattices).__next__)
    pair.exchange_often(first, second)
    far = first + 10.0
    changes = []
    while not changes or not changes[-1].any():
        change, opposite, accepted = pair.exchange(first, far)
        assert accepted
        assert torch.equal(change, -opposite)
        changes.append(change)
        assert len(changes) < {8: 7, 4: 8}[bits]
    assert len(changes) > 1
    assert not any(lattice._blocks[0].misses.any() for lattice in lattices)
    change = pair.exchange_often(first, far)
    torch.testing.assert_close(change, far - first, atol={8: 0.3, 4: 1.6}[bits], rtol=0)


@BITS
@pytest.mark.parametrize("steps", [-15, 1, 15, 10**9])
def test_ends_drift_apart_as_the_root_of_the_steps_between_exchanges(
    bits: int, steps: int
) -> None:
    first, second = vectors(4 * BLOCK, 1e-4)
    pair = Pair(lambda: Lattice(bits))
    pair.exchange_often(first, second)
    # As far apart as after `steps`, of which 0 to 4,096 count.
    times = math.sqrt((1 + min(max(steps, 0), 4096)) / 2)
    far = first + times * (second - first)
    change, _, _ = pair.exchange(first, far, steps)
    torch.testing.assert_close(change, far - first, atol=times * ERROR[bits], rtol=0)
    # And they are as near as before in the next.
    change, _, _ = pair.exchange(first, second)
    torch.testing.assert_close(change, second - first, atol=ERROR[bits], rtol=0)


@BITS
def test_a_mean_of_all_does_not_make_the_next_scales_too_narrow(bits: int) -> None:
    """Two ends that are equal for once soon differ again."""
    first, second = vectors(4 * BLOCK, 1e-4)
    pair = Pair(lambda: Lattice(bits))
    pair.exchange_often(first, second)
    assert not pair.exchange(first, first)[0].any()
    nearer = first + (second - first) / 2
    change, _, _ = pair.exchange(first, nearer)
    torch.testing.assert_close(change, nearer - first, atol=ERROR[bits], rtol=0)


@BITS
def test_the_first_scale_grows_by_an_octave_however_long_it_took(
    bits: int,
) -> None:
    ends = vectors(4 * BLOCK, 1e-2)
    at_once, soon, late = (
        Pair(lambda: Lattice(bits)).exchange(*ends, steps)[0] for steps in (0, 3, 4000)
    )
    assert torch.equal(soon, late)
    # Multiples of the scales.
    assert soon[soon != 0].abs().min() == 2 * at_once[at_once != 0].abs().min()


@BITS
def test_ends_that_drift_apart_ever_faster_still_average(bits: int) -> None:
    """As while the learning rate warms up; each exchange leaves out what is too far."""
    first, second = vectors(16 * BLOCK, 1e-7)
    pair, averaged = Pair(lambda: Lattice(bits)), list[float]()
    for times in range(16):
        far = first + 2.0**times * (second - first)
        change, _, _ = pair.exchange(first, far)
        averaged.append(change.norm().item() / (far - first).norm().item())
    assert sum(averaged[-4:]) / 4 > 0.4


@BITS
def test_one_far_weight_costs_its_own_block_alone(bits: int) -> None:
    first, second = vectors(2 * BLOCK, 1e-4)
    pair = Pair(lambda: Lattice(bits))
    pair.exchange_often(first, second)
    second[3] += 100.0
    change, _, _ = pair.exchange(first, second)
    length = {8: 1024, 4: 256}[bits]
    assert not change[:length].any()
    torch.testing.assert_close(
        change[length:], (second - first)[length:], atol=ERROR[bits], rtol=0
    )


@BITS
def test_weights_that_wrap_around_in_opposite_ways_are_noticed(bits: int) -> None:
    """Their plain sum would be right."""
    first, second = vectors(256, 1e-4)
    lattices = [Lattice(bits), Lattice(bits)]
    pair = Pair(iter(lattices).__next__)
    pair.exchange_often(first, second)
    (scale,) = {2.0 ** (e / 4) for e in (lattices[0]._blocks[0].exponents + 2).tolist()}
    second = first.clone()
    second[10] += 2**bits * scale
    second[20] -= 2**bits * scale
    assert not pair.exchange(first, second)[0].any()


@BITS
def test_ends_that_remember_different_spans_find_a_common_one(bits: int) -> None:
    first, second = vectors(256, 1e-4)
    pair, other = Pair(lambda: Lattice(bits)), Pair(lambda: Lattice(bits))
    pair.exchange_often(first, second)
    pair.codecs = (pair.codecs[0], other.codecs[1])
    assert not pair.exchange(first, second)[0].any()
    change = pair.exchange_often(first, second)
    torch.testing.assert_close(
        change, second - first, atol=max(2e-5, ERROR[bits]), rtol=0
    )


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_by_both_ends(
    wire: torch.dtype, value: float
) -> None:
    first, second = vectors(2 * BLOCK, 0.1)
    pair = Pair(lambda: make_codec(wire, torch.float32))
    assert pair.exchange(first, second)[2]
    broken = second.clone()
    broken[5] = value
    assert not pair.exchange(first, broken)[2]
    # And the lane goes on once it is finite again.
    change = pair.exchange_often(first, second)
    atol = 0.1 if wire == INT4 else 0.02
    torch.testing.assert_close(change, second - first, atol=atol, rtol=0)


def test_bytes_a_number_and_eight_a_block() -> None:
    assert Lattice(8).length(10 * 1024) == 10 * 1024 + 10 * 8
    assert Lattice(4).length(10 * 256) == 10 * 128 + 10 * 8
    assert Cast(torch.bfloat16).length(10) == 10


@BITS
def test_biases_that_begin_at_zero_are_averaged_within_some_exchanges(
    bits: int,
) -> None:
    first, second = torch.zeros(BLOCK), torch.zeros(BLOCK)
    pair = Pair(lambda: Lattice(bits))
    pair.exchange(first, second)
    first, second = first + 0.01, second - 0.01
    for _ in range({8: 20, 4: 40}[bits]):
        change, opposite, _ = pair.exchange(first, second)
        first, second = first + change / 2, second + opposite / 2
    assert (first - second).abs().max() < 1e-5
