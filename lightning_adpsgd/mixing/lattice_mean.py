"""The mean of all learners' weights, at a byte or two for each weight.

Learners are near one another, so each knows most of the sum of all from its own
weights: it lacks only the lowest bits. With the lattice point ``q_i = round(w_i / s)``
of learner i, for a scale s of each block::

    d = (sum_j q_j - n q_i) mod 256           in [-128, 128)
    mean w = s (n q_i + d) / n

An all-reduce of int32, whose arithmetic wraps, sums four weights in each word,
``q + 2^8 q' + 2^16 q'' + 2^24 q'''``. Two small all-reduces guard it. Before it,
projections of each block tell how far apart learners are, and so the scale. After it,
checksums of ``sum_j q_j`` are equal in all learners exactly if no d has wrapped: wrong
sums cannot agree, because all d of one weight add up to zero. Blocks whose checksums
differ cross once more, as `exact_means`.

The lattice is that of Moniqua (arXiv 2002.11787), here under a sum of all.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from lightning_adpsgd.mixing.exact_mean import exact_means

_BLOCK = 1024
# A block's projections are sums of this many weights with random signs. One weight that
# alone differs is at most 11 times as far away as its projection tells.
_PROJECTED = 128
_PROJECTIONS = _BLOCK // _PROJECTED
# The bits of a weight, where few enough learners share the span of 2^bits points.
_FEW_LEARNERS, _FEW_BITS, _MANY_BITS = 8, 8, 16
# The span over the largest projected distance, at least; at most twice as much.
_HEADROOM = 4.0
# A sum of the points of all learners has no more bits.
_SUM_BITS = 30
# Scales from 2^-100 to 2^100 and their inverses are normal numbers.
_MOST_EXPONENT = 100


class _Lattice(NamedTuple):
    """The lattice of b blocks, on which all learners have agreed.

    Attributes:
        number: number of learners that speak.
        bits: bits of a weight in a word.
        exponents: binary exponents of the scales, int32 [b, 1].
        usable: whether the weights of a block are within range, boolean [b, 1].
    """

    number: int
    bits: int
    exponents: Tensor
    usable: Tensor

    def points(self, chunk: Tensor) -> Tensor:
        """The points ``round(w / s)``, int32 [b, block]; zeros in unusable blocks."""
        inverse = _power_of_two(-self.exponents) * self.usable
        return (_in_blocks(chunk) * inverse).round_().int()

    def words(self, chunk: Tensor) -> Tensor:
        """Several points in each word, int32 [b, block bits / 32], by wrapping sums."""
        words, *others = self.points(chunk).chunk(32 // self.bits, 1)
        words = words.clone()
        for place, digits in enumerate(others, 1):
            words.add_(digits, alpha=1 << (self.bits * place))
        return words

    def sums(self, chunk: Tensor, lacking: Tensor) -> Tensor:
        """The sums of points over all learners, int32 [b, block].

        Args:
            lacking: sums of words over all learners, less those of `number` learners
                with this one's weights; int32, as `words`.
        """
        sums, words = self.points(chunk).mul_(self.number), lacking.clone()
        above = 32 - self.bits
        for points in sums.chunk(32 // self.bits, 1):
            digits = words.bitwise_left_shift(above).bitwise_right_shift_(above)
            points.add_(digits)
            words.sub_(digits).bitwise_right_shift_(self.bits)
        return sums

    def checks(self, sums: Tensor) -> Tensor:
        """A checksum of each block's sums, int32 [b]."""
        # Wrong sums differ from right ones in multiples of 2^bits.
        words = words_for_places(_BLOCK, sums.device)
        return (sums >> self.bits).mul_(words).sum(1, dtype=torch.int32)

    def mean(self, sums: Tensor) -> Tensor:
        """The mean from the sums of points, float32 [b, block]."""
        scale = _power_of_two(self.exponents)
        return sums.float().mul_(scale).div_(self.number)


def lattice_means(
    chunks: Sequence[Tensor], number: int, speaks: bool, group: dist.ProcessGroup | None
) -> Iterator[Tensor]:
    """The means of chunks, one by one: float32, the same bits in all learners.

    Their error is at most half the scale, or one of float32. If learners differ like
    noise of a standard deviation, it is about a tenth of that with four learners, and
    grows with the root of their number. With nine, from where on a weight takes two
    bytes, it is a thousandth. Weights that are equal in all may change by as much as
    others of their chunk.

    Args:
        chunks: finite weights of this learner, [n] each, one or more; each may change
            once its mean is known. None shares a scale with another.
        number: number of learners that speak.
        speaks: whether this learner does; otherwise its weights are near theirs.
        group: process group of all; None: that of all learners of the job.
    """
    lengths = [-(-len(chunk) // _BLOCK) for chunk in chunks]
    whole = _agree_on_lattice(chunks, number, group)
    parts = whole.exponents.split(lengths), whole.usable.split(lengths)
    lattices = [_Lattice(number, whole.bits, *p) for p in zip(*parts, strict=True)]
    pairs = list(zip(lattices, chunks, strict=True))
    lacking = _lacking(pairs, speaks, group)
    each = [(*pair, words) for pair, words in zip(pairs, lacking, strict=True)]
    checks = torch.cat([lattice.checks(lattice.sums(*rest)) for lattice, *rest in each])
    refused = (~_are_equal(checks, group) | ~whole.usable[:, 0]).split(lengths)
    blocks = (_in_blocks(c)[r] for c, r in zip(chunks, refused, strict=True))
    exact = exact_means(blocks, number, speaks, group)
    for (lattice, *rest), places, means in zip(each, refused, exact, strict=True):
        mean = lattice.mean(lattice.sums(*rest))
        mean[places] = means
        yield mean.flatten()[: len(rest[0])]


def _in_blocks(chunk: Tensor) -> Tensor:
    """A chunk in float32, [b, block]; zeros follow its last weight."""
    missing = -len(chunk) % _BLOCK
    return torch.nn.functional.pad(chunk.float(), (0, missing)).view(-1, _BLOCK)


def _agree_on_lattice(
    chunks: Sequence[Tensor], number: int, group: dist.ProcessGroup | None
) -> _Lattice:
    extremes = torch.cat([_extremes(_in_blocks(chunk)) for chunk in chunks])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    most, minus_least, largest = extremes.split_with_sizes(
        [_PROJECTIONS, _PROJECTIONS, 1], 1
    )
    bits = _FEW_BITS if number <= _FEW_LEARNERS else _MANY_BITS
    # Of one weight that is as far away as any, on average.
    distance = (most + minus_least).amax(1, True) / _PROJECTED**0.5
    span = number * _HEADROOM * distance / 2 ** (bits - 1)
    finest = exponent_of(largest) - (_SUM_BITS - number.bit_length())
    exponents = torch.maximum(exponent_of(span), finest)
    exponents.clamp_(-_MOST_EXPONENT, _MOST_EXPONENT)
    usable = torch.maximum(span, largest) < 2.0**_MOST_EXPONENT
    return _Lattice(number, bits, exponents, usable)


def _extremes(blocks: Tensor) -> Tensor:
    """Each block's projections, their negatives, and its largest absolute value."""
    signs = words_for_places(_BLOCK, blocks.device).sign()
    projected = (blocks * signs).unflatten(1, (-1, _PROJECTED)).sum(2)
    largest = torch.maximum(blocks.amax(1, True), -blocks.amin(1, True))
    return torch.cat([projected, -projected, largest], 1)


def exponent_of(values: Tensor) -> Tensor:
    """The smallest e with ``value < 2^e``, int32, for values that are not negative.

    For infinity and NaN, it is larger than for any other value.
    """
    # A float32 holds it in bits 23 to 30, with an offset.
    return ((values.float().view(torch.int32) >> 23) & 255) - 126


def _power_of_two(exponents: Tensor) -> Tensor:
    """``2^e`` without rounding, which `torch.exp2` may do: float32."""
    return (exponents + 127).bitwise_left_shift_(23).view(torch.float32)


@cache
def words_for_places(number: int, device: torch.device) -> Tensor:
    """Fixed pseudo-random words, equal in all learners, int32 [number]."""
    words = (
        xxhash.xxh32_intdigest(struct.pack("<q", n)) - 2**31 for n in range(number)
    )
    return torch.tensor(list(words), dtype=torch.int32, device=device)


def _lacking(
    pairs: Sequence[tuple[_Lattice, Tensor]],
    speaks: bool,
    group: dist.ProcessGroup | None,
) -> Sequence[Tensor]:
    """What this learner lacks of the sums of words, by chunk (`_Lattice.sums`)."""
    lengths = [len(lattice.exponents) for lattice, _ in pairs]
    (first, chunk), *_ = pairs
    num_words = _BLOCK * first.bits // 32
    # Written chunk by chunk, because there is no memory for all of them twice.
    total = chunk.new_zeros(sum(lengths), num_words, dtype=torch.int32)
    sums = total.split(lengths)
    for (lattice, chunk), into in zip(pairs, sums, strict=True):
        if speaks:
            into.copy_(lattice.words(chunk))
    dist.all_reduce(total, group=group)
    for (lattice, chunk), of_all in zip(pairs, sums, strict=True):
        of_all.sub_(lattice.words(chunk), alpha=lattice.number)
    return sums


def _are_equal(checks: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Whether all learners have the same checksum, boolean [b]."""
    both = torch.stack([checks, ~checks])  # ~ turns the order around
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return both[0] == ~both[1]
