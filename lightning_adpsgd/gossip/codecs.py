"""Codecs: how the weights of an exchange travel.

Two super-learners send each other a message about the same part of their weights. Each
computes the change ``theirs - mine`` only from the two messages, exactly as sent. So
the changes of the two ends are opposite to the last bit, however coarse the messages
are: a codec can slow down mixing, but cannot move the mean. The rounding error stays in
the weights that were rounded.

docs/concepts.md, "What travels", has the formats: `Cast` sends floating-point numbers,
`Lattice` 8 or 4 bits of a place on a lattice (Moniqua, arXiv 2002.11787; the lattice of
SwarmSGD, 1910.12308).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.mixing.lattice_mean import exponent_of, words_for_places
from lightning_adpsgd.weights.streams import wait_for_stream

INT4: torch.dtype = vars(torch)["int4"]
"""`torch.int4`; type checkers do not know it."""

# No scale is finer than this many bits below the largest weight: a float32 has no more.
_PRECISION_BITS = 22
# Two ends that have not exchanged for longer are no further apart.
_MOST_STEPS = 1 << 12
# At first, no span grows by more quarter octaves: its width is a guess by the weights.
_FIRST_GROWTH = 4
# The most quarter octaves by which a block's span widens at once.
_WIDEST = 12
# The exponent of a block that has no lattice points.
_OUT_OF_RANGE = torch.iinfo(torch.int16).min
# 2^(1/4), 2^(1/2) and 2^(3/4) to the last bit, whatever a system's `pow` says.
_QUARTER_OCTAVES = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)
# The largest exponent of a scale: beyond it, a float32 is 0 or infinite.
_MOST_QUARTERS = 1024


class Codec(ABC):
    """Encodes parts of a weight vector as messages, and compares two messages.

    Each end of a lane has a codec for each form and dtype. Its state depends only on
    the messages that crossed and the steps of `begin`, and so equals that of the other
    end.

    Attributes:
        dtype: dtype of the elements of a message.
        remembers: whether a message depends on earlier ones.
    """

    dtype: torch.dtype
    remembers = False

    def begin(self, steps: int) -> None:
        """Begins an exchange, this many optimizer steps after the last of the two ends.

        Both ends give the same number, which the asking end has counted. A codec that
        remembers nothing ignores it.
        """
        del steps

    @abstractmethod
    def length(self, num_elements: int) -> int:
        """The number of message elements for this many weights."""

    @abstractmethod
    def encode(self, weights: Tensor, message: Tensor, place: int) -> None:
        """Encodes weights, [n], into a message, [length(n)]; may overwrite the weights.

        `place` is the number of the part in the vector, the same at both ends.
        """

    @abstractmethod
    def change(self, mine: Tensor, theirs: Tensor, into: Tensor, place: int) -> float:
        """Computes the change ``theirs - mine``, [n]; may overwrite their message.

        Returns:
            The sum of its squares. It is infinite or NaN, and `into` is invalid, unless
            the weights at both ends were finite.
        """

    @abstractmethod
    def norm(self, message: Tensor) -> float:
        """The norm of the weights behind a message, or an upper bound of it.

        It is infinite or NaN exactly if the weights were; valid after `change`.
        """


class Cast(Codec):
    """Sends each number in a floating-point type; stateless.

    A finite number beyond the range of float16 travels as the largest one. Beyond that
    of bfloat16 or float32 it becomes infinite.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # Other dtypes have the range of float32, or are those of the weights.
        self._largest = torch.finfo(dtype).max if dtype == torch.float16 else math.inf

    @override
    def length(self, num_elements: int) -> int:
        return num_elements

    @override
    def encode(self, weights: Tensor, message: Tensor, place: int) -> None:
        message.copy_(weights if self._largest == math.inf else self._reached(weights))

    def _reached(self, weights: Tensor) -> Tensor:
        # A cast would make them infinite, and this end would be blamed for it.
        least, most = (value.item() for value in torch.aminmax(weights))
        if not max(-least, most) > self._largest:
            return weights
        cut = weights.clamp(-self._largest, self._largest)
        return torch.where(weights.isfinite(), cut, weights)

    @override
    def change(self, mine: Tensor, theirs: Tensor, into: Tensor, place: int) -> float:
        if theirs.dtype == into.dtype:
            torch.sub(theirs, mine, out=into)
        else:
            into.copy_(theirs).sub_(mine)
        return _number(torch.dot(into, into))

    @override
    def norm(self, message: Tensor) -> float:
        # In double precision: squares of the others overflow sooner than weights do.
        return torch.linalg.vector_norm(message, dtype=torch.float64).item()


class Lattice(Codec):
    """Sends 8 or 4 bits of a number: its lattice point ``round(w / s)`` modulo 2^bits.

    A message about n weights in b blocks has three parts, as bytes. First, b checksums
    of the lattice points (int32) reveal a disagreement beyond the span. Then come b
    exponents e of the scale ``s = 2^(e / 4)`` and b least exponents of powers of two
    (int16). The residues of b blocks are last. Both ends leave a block as it is if its
    disagreement is too large or its exponents differ. They also agree on a wider span
    for the next exchange, or on a narrower one where the block fits well.

    Two ends drift apart as a random walk does. So the scales of an exchange are those
    for an exchange in each step, times the root of the steps since the last one.
    """

    dtype = torch.uint8
    remembers = True

    def __init__(self, bits: int) -> None:
        self._form = _FORMS[bits]
        self._blocks: dict[int, _Blocks] = {}
        self._growth = 0

    @override
    def begin(self, steps: int) -> None:
        self._growth = round(2 * math.log2(1 + min(max(steps, 0), _MOST_STEPS)))

    @override
    def length(self, num_elements: int) -> int:
        return -(-num_elements // self._form.block) * self._form.block_bytes

    @override
    def encode(self, weights: Tensor, message: Tensor, place: int) -> None:
        blocks = self._form.in_blocks(weights)
        largest = torch.maximum(blocks.amax(1), -blocks.amin(1))
        checks, (exponents, least), residues = self._form.fields(message)
        if place not in self._blocks:
            wider = min(self._growth, _FIRST_GROWTH)
            first = self._form.first_exponents(largest) + wider - self._growth
            self._blocks[place] = _Blocks(first, torch.zeros_like(first))
        used = self._blocks[place].exponents + self._growth
        shrink = _scale(-used, blocks.dtype)
        blocks.mul_(shrink).round_()
        # A block beyond int32, or non-finite, has no points. Comparisons with NaN are
        # false.
        in_range = largest * shrink.squeeze(1) < 2.0**30
        exponents.copy_(used)
        if not _number(in_range.all()):
            blocks[~in_range] = 0.0
            exponents[~in_range] = _OUT_OF_RANGE
        least.copy_(exponent_of(largest) - _PRECISION_BITS)
        with _scratch(blocks.shape, blocks.device) as scratch:
            points = scratch.wide.copy_(blocks)
            self._form.pack(points, residues, scratch)
            checks.copy_(self._checks(points))

    @override
    def change(self, mine: Tensor, theirs: Tensor, into: Tensor, place: int) -> float:
        my_checks, my_scales, my_residues = self._form.fields(mine)
        checks, scales, residues = self._form.fields(theirs)
        exponents, least = torch.maximum(scales, my_scales).int()
        equal = scales[0] == my_scales[0]
        agreed = equal & (exponents != _OUT_OF_RANGE)
        blocks = self._form.in_blocks(into)
        with _scratch(blocks.shape, into.device) as scratch:
            points = self._form.differences(residues, my_residues, scratch)
            # The largest absolute value of each block, [b].
            reach = torch.maximum(points.amax(1).int(), -points.amin(1).int())
            fits = agreed & (reach <= self._form.span)
            fits &= self._checks(scratch.wide.copy_(points)) == checks - my_checks
            scale = _scale(exponents, into.dtype) * fits[:, None]
            blocks.copy_(points).mul_(scale)
        if blocks.numel() > len(into):
            into.copy_(blocks.flatten()[: len(into)])
        misses = self._blocks[place].misses
        next_exponents = self._form.next_exponents(
            exponents, least, reach, fits, self._form.widened(misses) * agreed
        )
        misses = torch.where(fits, 0, misses + agreed)
        self._blocks[place] = _Blocks(next_exponents - self._growth, misses)
        square = torch.dot(into, into)
        return math.inf if _is_lost(least) else _number(square)

    @override
    def norm(self, message: Tensor) -> float:
        _, (_, least), _ = self._form.fields(message)
        if _is_lost(least):
            return math.inf
        largest = torch.exp2(least.double() + _PRECISION_BITS)
        return math.sqrt(self._form.block) * torch.linalg.vector_norm(largest).item()

    def _checks(self, points: Tensor) -> Tensor:
        """Sums with a word for each place, [b]: two points that wrap do not cancel.

        It overwrites the points, int32 [b, block].
        """
        words = words_for_places(self._form.block, points.device)
        return points.mul_(words).sum(1, dtype=torch.int32)


class _Blocks(NamedTuple):
    """What is known of the blocks of a part, int32 [b] each.

    Attributes:
        exponents: exponents of their scales, for an exchange in each step.
        misses: numbers of exchanges in a row in which they did not fit.
    """

    exponents: Tensor
    misses: Tensor


class _Form(NamedTuple):
    """The layout of a lattice's messages, and the rules for its scales.

    Attributes:
        block: number of elements that share a scale.
        headroom: span of the next exchange, over the largest disagreement in this one.
        wider: quarter octaves by which a block that did not fit widens its span, and by
            which that grows with each further exchange in which it does not.
    """

    bits: int
    block: int
    headroom: float
    wider: int

    @property
    def span(self) -> int:
        """The largest disagreement that the bits distinguish, in lattice points."""
        return (1 << (self.bits - 1)) - 1

    @property
    def block_bytes(self) -> int:
        return self.block * self.bits // 8 + 8

    def in_blocks(self, weights: Tensor) -> Tensor:
        missing = -len(weights) % self.block
        if missing:
            weights = torch.nn.functional.pad(weights, (0, missing))
        return weights.view(-1, self.block)

    def fields(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Checks, [b]; exponents and least ones, [2, b]; and residues, [b, bytes]."""
        b = len(message) // self.block_bytes
        checks, scales, residues = torch.split_with_sizes(
            message, [4 * b, 4 * b, (self.block_bytes - 8) * b]
        )
        both = scales.view(torch.int16).view(2, b)
        return checks.view(torch.int32), both, residues.view(b, -1)

    def pack(self, points: Tensor, residues: Tensor, scratch: "_Scratch") -> None:
        """Writes points, int32 [b, block], modulo 2^bits, by arithmetic that wraps."""
        if self.bits == 8:
            residues.copy_(points)
            return
        low, high = scratch.narrow.copy_(points).chunk(2, 1)
        torch.add(low.bitwise_and_(15), high, alpha=16, out=residues)

    def differences(
        self, residues: Tensor, mine: Tensor, scratch: "_Scratch"
    ) -> Tensor:
        """The differences nearest to zero with these residues, int8 [b, block]."""
        found = scratch.narrow
        if self.bits == 8:
            return torch.sub(residues, mine, out=found).view(torch.int8)
        low, high = found.chunk(2, 1)
        torch.sub(residues, mine, out=low).bitwise_left_shift_(4)
        torch.sub(residues, torch.bitwise_and(mine, 240, out=high), out=high)
        # As signed bytes: the shift drops their low halves, whatever those hold.
        return found.view(torch.int8).bitwise_right_shift_(4)

    def first_exponents(self, largest: Tensor) -> Tensor:
        # A block of zeros, such as new biases, uses the largest weight of the part.
        largest = torch.nan_to_num(largest, 0.0, 0.0)
        of_weight = exponent_of(largest.clamp(min=float(largest.max()) / 64))
        # At first a block spans an eighth of its largest weight to either side.
        return 4 * (of_weight - 3 - (self.bits - 1))

    def next_exponents(
        self,
        exponents: Tensor,
        least: Tensor,
        reach: Tensor,
        fits: Tensor,
        wider: Tensor,
    ) -> Tensor:
        narrower = _narrower(self, reach.device).index_select(0, reach)
        # A least exponent of non-finite weights is no bound.
        is_bound = least < _NON_FINITE - _PRECISION_BITS
        bound = torch.where(is_bound, 4 * least, -_MOST_QUARTERS)
        return torch.maximum(exponents + torch.where(fits, narrower, wider), bound)

    def widened(self, misses: Tensor) -> Tensor:
        """Quarter octaves by which spans widen after this many misses in a row."""
        return (self.wider * (1 + misses)).clamp(max=_WIDEST)

    def narrower(self, reach: int) -> int:
        """Change of the span, in quarter octaves, after a largest change that fits."""
        occupied = max(reach, 0.5) * self.headroom / self.span
        # A span that is narrowed after an accidental agreement would fail in the next
        # exchange. Nor is little disagreement a reason to narrow it far: while the
        # learning rate warms up, it soon grows.
        most = -4 if 4 * reach < self.span else -1
        return max(math.ceil(4 * math.log2(occupied)), most)


_FORMS = {8: _Form(8, 1024, 3.0, 12), 4: _Form(4, 256, 1.5, 4)}
LONGEST_BLOCK = max(form.block for form in _FORMS.values())
"""Parts of a multiple of this length have no incomplete blocks."""


class _Scratch(NamedTuple):
    """Memory for intermediate results, [b, block] each."""

    wide: Tensor  # int32
    narrow: Tensor  # uint8


# Memory that is lent to one thread at a time: the system provides new memory of this
# size page by page, which takes longer than all arithmetic on it.
_kept: list[Tensor] = []


@contextmanager
def _scratch(shape: torch.Size, device: torch.device) -> Iterator[_Scratch]:
    # A GPU's memory is cached by stream, and must not change hands between them.
    keeps, number, memory = device.type == "cpu", shape.numel(), None
    if keeps:
        with suppress(IndexError):  # another thread may have taken the last
            memory = _kept.pop()
    if memory is None or len(memory) < 5 * number:
        with torch.inference_mode(False):
            memory = torch.empty(5 * number, dtype=torch.uint8, device=device)
    wide, narrow = memory[: 5 * number].split_with_sizes([4 * number, number])
    yield _Scratch(wide.view(torch.int32).view(shape), narrow.view(shape))
    if keeps:
        _kept.append(memory)


WireChoice = torch.dtype | Literal["auto"] | None
"""The option `wire_dtype`; None: the dtype of the weights."""


def wire_dtypes(choice: WireChoice) -> tuple[torch.dtype | None, ...]:
    """The wire dtypes that exchanges may use, the widest first."""
    return (None, torch.int8, INT4) if choice == "auto" else (choice,)


def make_codec(wire_dtype: torch.dtype | None, dtype: torch.dtype) -> Codec:
    """The codec for weights of a dtype; `wire_dtype` None: the dtype of the weights."""
    sent_as = wire_dtype or dtype
    bits = {torch.int8: 8, INT4: 4}.get(sent_as)
    return Lattice(bits) if bits else Cast(sent_as)


_NON_FINITE = 255 - 126
"""The result of `exponent_of` for infinity and NaN."""


def _is_lost(least: Tensor) -> bool:
    return bool(_number((least >= _NON_FINITE - _PRECISION_BITS).any()))


def _number(scalar: Tensor) -> float:
    """The value of a tensor of one element; the thread sleeps until it is computed."""
    wait_for_stream(scalar.device)
    return scalar.item()


def _scale(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """``2^(e / 4)``, [b, 1]: on every processor the same to the last bit."""
    places = exponents.clamp(-_MOST_QUARTERS, _MOST_QUARTERS) + _MOST_QUARTERS
    return _scales(dtype, exponents.device).index_select(0, places)[:, None]


@cache
def _scales(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All results of `_scale`, by place; from the host, so that any stream has it."""
    octaves = (divmod(e, 4) for e in range(-_MOST_QUARTERS, _MOST_QUARTERS + 1))
    scales = [math.ldexp(_QUARTER_OCTAVES[rest], octave) for octave, rest in octaves]
    return torch.tensor(scales, dtype=dtype, device=device)


@cache
def _narrower(form: _Form, device: torch.device) -> Tensor:
    """`_Form.narrower` of each reach, int32."""
    deltas = [form.narrower(reach) for reach in range(129)]
    return torch.tensor(deltas, dtype=torch.int32, device=device)
