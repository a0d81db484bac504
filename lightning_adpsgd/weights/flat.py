"""Flat vectors, one per dtype, that a module's weights are views of.

A snapshot of a model is then one copy and a merge one addition, however many layers it
has. Floating-point buffers (batch-norm statistics) are averaged with the parameters and
lie in the vector too. Integer buffers, buffers that no checkpoint holds, and what has
no mean (an attention mask of -inf) stay outside, as does what DDP is to ignore.
Nothing here communicates.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from typing_extensions import override

from lightning_adpsgd.weights.blocks import Block, by_memory, copy_once
from lightning_adpsgd.weights.sections import Range, even_ranges

# Sums over this number of learners must be finite.
_MOST_LEARNERS = 1 << 20


class Weights(ABC):
    """The weights of one learner, as vectors that exchanges read and change.

    Attributes:
        without_mean: names of buffers and frozen parameters that the vectors leave out,
            because their values have no mean.
    """

    vectors: list[Tensor]

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.without_mean: list[str] = []

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.vectors[0].device if self.vectors else torch.device("cpu")

    @abstractmethod
    def layout(self) -> str:
        """Names, shapes, orders and dtypes; equal in all learners of one job."""

    def own_tensors(self) -> dict[str, Tensor]:
        """Buffers that a checkpoint holds and no vector, and ignored weights, by name.

        Shards have none.
        """
        return {}

    @abstractmethod
    def owned(self, size: int) -> list[list[Range]]:
        """The ranges that each learner of a super-learner of `size` exchanges."""

    @abstractmethod
    def buffers_in(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Views of the buffers in vectors shaped like these."""

    @abstractmethod
    def rebind(self) -> None:
        """Makes the vectors and the module agree, whatever a program has done."""

    @abstractmethod
    def check_views(self) -> None:
        """Refuses a module whose weights have left the vectors.

        Raises:
            RuntimeError: One was added, removed or given other memory; names it.
        """

    @abstractmethod
    def release(self) -> None:
        """Gives all weights storage of their own; a flat one forgets the module."""


class _Slot(NamedTuple):
    name: str
    tensor: Tensor
    view: Tensor
    address: int
    vector: int
    block: Tensor


class Span(NamedTuple):
    """A weight's part of a vector, or that of weights which share memory."""

    length: int
    is_trained: bool


class BufferPlace(NamedTuple):
    """A buffer, and where a module has it.

    Attributes:
        name: full name, with those of the modules that it is in.
        owner: module that has the buffer itself, by the name `key`.
    """

    name: str
    tensor: Tensor
    owner: nn.Module
    key: str

    def take_assigned(self) -> Tensor | None:
        """The tensor that the program has assigned in its place; None if it has not.

        Puts the buffer, with its earlier values, back in its place.
        """
        buffers = self.owner._buffers  # that of a module of TorchScript has no `get`
        found = buffers[self.key] if self.key in buffers else None  # noqa: SIM401
        if found is None or found is self.tensor:
            return None
        self.owner._buffers[self.key] = self.tensor
        return found.detach()


class FlatParameters(Weights):
    """The flat vectors of a module and the views that tie the module to them.

    The module's parameters keep their identity; only their storage is replaced, here
    and by `rebind`. An optimizer may be made before or after.

    Args:
        module: module on its final device and in its final dtype.
        shards: number of shards; each vector is padded with zeros to a multiple of it.
        with_frozen: whether the vectors include frozen parameters; if not, these must
            stay frozen.
        kept_out: names that the vectors leave out, because their values had no mean
            when the training that is resumed began.

    Raises:
        ValueError: A parameter is not materialised yet or is on a different device than
            the rest, a tensor is sparse or of 8 bits, or nothing is to be averaged.
    """

    def __init__(
        self,
        module: nn.Module,
        shards: int = 1,
        with_frozen: bool = True,
        kept_out: Collection[str] = (),
    ) -> None:
        super().__init__(module)
        _check_sendable(module)
        self._slots: list[_Slot] = []
        self.vectors: list[Tensor] = []
        tensors = _recurrent_first(module, dict(_averaged_tensors(module)))
        check_one_device(tensors.values())
        untrained = _untrained(tensors)
        self.without_mean = [
            n for n, t in untrained.items() if n in kept_out or not _has_mean(t)
        ]
        self._left_out = {
            name: tensor
            for name, tensor in untrained.items()
            if name in self.without_mean
            or (isinstance(tensor, nn.Parameter) and not with_frozen)
        }
        tensors = {n: t for n, t in tensors.items() if n not in self._left_out}
        if self._left_out and not tensors:
            raise ValueError("all weights are frozen, so there is nothing to average")
        for dtype in sorted({t.dtype for t in tensors.values()}, key=str):
            group = {n: t for n, t in tensors.items() if t.dtype == dtype}
            self._flatten(group, shards)
        inside = {id(slot.tensor) for slot in self._slots}
        self._buffers = [b for b in buffer_places(module) if id(b.tensor) in inside]

    @override
    def check_views(self) -> None:
        self._check_frozen()
        # By memory and not by name: pruning gives a weight another name.
        views = {slot.view.data_ptr(): slot.name for slot in self._slots}
        masks = {name for name, _ in pruning_masks(self.module)}
        known = {slot.name for slot in self._slots}
        in_use = set[int]()
        for name, tensor in _averaged_tensors(self.module):
            in_use.add(tensor.data_ptr())
            if name in self._left_out and not tensor.requires_grad:
                continue
            if tensor.data_ptr() not in views and name not in masks:
                raise RuntimeError(_not_in_vector(name, tensor, name in known))
        for address, name in views.items():
            if address not in in_use:
                raise RuntimeError(
                    f"`{name}` was removed from the module after set-up, while other "
                    "learners may still average it; remove it before `trainer.fit` or "
                    "`fabric.setup`"
                )

    @override
    def layout(self) -> str:
        return layout_of((slot.name, slot.view) for slot in self._slots)

    @override
    def own_tensors(self) -> dict[str, Tensor]:
        others = {slot.name for slot in self._slots}
        others.update(_transient_buffers(self.module))
        own = dict(self.module.named_buffers())
        # Frozen weights that are left out are equal in all learners.
        for name in ignored_by_ddp(self.module):
            with suppress(AttributeError):  # a buffer, or the name of nothing
                own[name] = self.module.get_parameter(name).detach()
        return {name: tensor for name, tensor in own.items() if name not in others}

    @override
    def owned(self, size: int) -> list[list[Range]]:
        """Equal parts of the vectors, as real numbers; `size` divides `shards`."""
        lengths = [v.numel() * (1 + v.is_complex()) for v in self.vectors]
        return even_ranges(lengths, size)

    @override
    def buffers_in(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Views of the buffers that share no memory with a parameter."""
        weights = {
            id(s.block) for s in self._slots if isinstance(s.tensor, nn.Parameter)
        }
        return [
            vectors[vector].as_strided(v.shape, v.stride(), v.storage_offset())
            for _, _, v, _, vector, block in self._slots
            if id(block) not in weights
        ]

    def spans(self) -> list[list[Span]]:
        """The spans of each vector, in order; the last one is its padding."""
        trained = {id(s.block) for s in self._slots if s.tensor.requires_grad}
        found = list[list[Span]]()
        for number, vector in enumerate(self.vectors):
            blocks = {id(s.block): s.block for s in self._slots if s.vector == number}
            mine = [Span(len(block), key in trained) for key, block in blocks.items()]
            padding = len(vector) - sum(span.length for span in mine)
            found.append([*mine, Span(padding, False)])
        return found

    @override
    def rebind(self) -> None:
        """Copies weights that have moved to other memory back into the vectors.

        ``p.data = values`` moves a weight out of its vector, and ``self.mean = values``
        puts another tensor in a buffer's place. It costs little if nothing has moved.

        Raises:
            RuntimeError: A weight has another shape, dtype or device, or is unfrozen.
        """
        self._check_frozen()
        for buffer in self._buffers:
            if (assigned := buffer.take_assigned()) is not None:
                put_back(buffer.name, assigned, buffer.tensor)
        for slot in self._slots:
            if slot.tensor.data_ptr() != slot.address:
                put_back(slot.name, slot.tensor, slot.view)

    @override
    def release(self) -> None:
        """Gives each weight storage of its own; tied ones share theirs as before.

        `torch.save` and `pickle` write the whole storage of a tensor. Weights that have
        left the vectors stay where they are.
        """
        own: dict[int, Tensor] = {}
        for _, tensor, view, address, _, block in self._slots:
            if tensor.data_ptr() == address:
                if (values := own.get(block.data_ptr())) is None:
                    values = own[block.data_ptr()] = block.clone()
                begin = view.storage_offset() - block.storage_offset()
                tensor.data = values.as_strided(view.shape, view.stride(), begin)
        for module in self.module.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # as torch does after moves, for cuDNN
        self._slots, self.vectors, self._buffers = [], [], []
        self._left_out, self.module = {}, nn.Module()

    def _check_frozen(self) -> None:
        for name, weight in self._left_out.items():
            if weight.requires_grad:
                reason = "`exchange_frozen=False` does not average it; leave that out"
                if name in self.without_mean:
                    reason = "its values have no mean; make them finite"
                raise RuntimeError(
                    f"`{name}` was frozen at set-up and is now trained, but {reason}, "
                    "or keep the weight frozen"
                )

    @torch.no_grad()
    def _flatten(self, tensors: dict[str, Tensor], shards: int) -> None:
        first = next(iter(tensors.values()))
        blocks = [Block(together) for together in by_memory(tensors)]
        lengths = [block.length for block in blocks]
        padded = -(-sum(lengths) // shards) * shards
        vector = torch.zeros(padded, dtype=first.dtype, device=first.device)
        places = dict[str, tuple[Tensor, Tensor]]()
        memories = vector[: sum(lengths)].split(lengths)
        for block, memory in zip(blocks, memories, strict=True):
            places |= {name: (view, memory) for name, view in block.views(memory)}
        # All are copied before the first is moved, because tied weights share memory.
        for name, tensor in tensors.items():
            copy_once(tensor, places[name][0])
        for name, tensor in tensors.items():
            view, memory = places[name]
            tensor.data = view
            place = view.data_ptr(), len(self.vectors), memory
            self._slots.append(_Slot(name, tensor, view, *place))
        self.vectors.append(vector)


def _not_in_vector(name: str, tensor: Tensor, is_known: bool) -> str:
    if not isinstance(tensor, nn.Parameter) and not is_known:
        return (
            f"the buffer `{name}` was added after set-up, or was None or empty then, "
            f"and has the shape {tuple(tensor.shape)} now; register it with its final "
            "shape, or leave it out of averages by `persistent=False`, or by its name "
            "in the module's `_ddp_params_and_buffers_to_ignore`"
        )
    added = "was added to the module after set-up"
    moved = "was given new storage after set-up"
    return (
        f"`{name}` {moved if is_known else added}; change weights in place "
        "(`p.data.copy_(...)`), or before `trainer.fit` or `fabric.setup`"
    )


def _check_sendable(module: nn.Module) -> None:
    ignored, averaged = ignored_by_ddp(module), dict(floating_tensors(module))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        why, kind = "", tensor.dtype
        if (form := tensor.layout) != torch.strided:
            why = f"`{name}` must be dense to be sent to other learners, got {form}"
        elif name in averaged and kind.itemsize < 2:
            why = f"`{name}` must have 16 bits or more to be averaged, got {kind}"
        if why and name not in ignored:
            raise ValueError(
                f"{why}: add its name to the module's "
                "`_ddp_params_and_buffers_to_ignore`, so that each learner keeps its "
                "own, or convert it (`.to_dense()`, `.bfloat16()`)"
            )


def _untrained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are not trained and share no memory with a trained parameter."""
    trained = set[str]()
    for together in by_memory(tensors):
        if any(tensor.requires_grad for tensor in together.values()):
            trained |= together.keys()
    return {n: t for n, t in tensors.items() if n not in trained}


def _has_mean(tensor: Tensor) -> bool:
    """Whether sums of these values over all learners are finite."""
    # Half precision is averaged in float32.
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return bool(tensor.abs().amax() <= torch.finfo(dtype).max / _MOST_LEARNERS)


def buffer_places(module: nn.Module) -> Iterator[BufferPlace]:
    """All buffers of a module, in their places."""
    for prefix, owner in module.named_modules():
        for key, tensor in owner._buffers.items():
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                yield BufferPlace(name, tensor, owner, key)


@torch.no_grad()
def put_back(name: str, tensor: Tensor, view: Tensor) -> None:
    """Copies values into a view of the vector, and makes their tensor that view.

    Raises:
        RuntimeError: The two differ in shape, dtype or device.
    """
    mine, other = _kind(view), _kind(tensor)
    if mine != other:
        raise RuntimeError(
            f"`{name}` of shape, dtype and device {mine} was given {other} after "
            "set-up, while other learners may still average it; replace it before "
            "`trainer.fit`, and register a buffer with its final shape"
        )
    view.copy_(tensor)
    tensor.data = view


def _kind(tensor: Tensor) -> tuple[list[int], str, str]:
    return list(tensor.shape), str(tensor.dtype), str(tensor.device)


def averaged_buffers(module: nn.Module) -> Iterator[str]:
    """Names of the float buffers that are averaged, but for those of batch-norm."""
    norms = [layer for layer in module.modules() if isinstance(layer, _NormBase)]
    known = {id(buffer) for layer in norms for buffer in layer.buffers()}
    known |= {id(mask) for _, mask in pruning_masks(module)}
    for name, tensor in _averaged_tensors(module):
        if not isinstance(tensor, nn.Parameter) and id(tensor) not in known:
            yield name


def pruning_masks(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The masks of `torch.nn.utils.prune`, which are buffers.

    All learners prune in the same way, so there is nothing to average.
    """
    weights = {name for name, _ in module.named_parameters()}
    for name, buffer in module.named_buffers():
        if f"{name.removesuffix('_mask')}_orig" in weights and name.endswith("_mask"):
            yield name, buffer


def _recurrent_first(
    module: nn.Module, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The same tensors with the largest recurrent module first, in cuDNN's order.

    cuDNN reads weights in place if all matrices, layer by layer and direction by
    direction, and then all biases lie at the start of their storage. torch copies any
    others into this order at every forward.
    """
    # With projections, the order differs.
    modules = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    several = [
        [w for ws in m.all_weights for w in ws] for m in modules if not m.proj_size
    ]
    weights = max(several, key=lambda one: sum(w.numel() for w in one), default=[])
    in_order = sorted(weights, key=lambda weight: -weight.ndim)  # keeps equal ones
    ranks = {id(weight): rank for rank, weight in enumerate(in_order)}
    rest = len(ranks)
    names = sorted(tensors, key=lambda name: ranks.get(id(tensors[name]), rest))
    return {name: tensors[name] for name in names}


def _averaged_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    ignored = ignored_by_ddp(module)
    return (pair for pair in floating_tensors(module) if pair[0] not in ignored)


def ignored_by_ddp(module: nn.Module) -> set[str]:
    """Names of weights and buffers that a program has told DDP to ignore."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def floating_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters, and the floating-point buffers that a checkpoint holds.

    Raises:
        ValueError: A tensor has no shape yet.
    """
    transient = set(_transient_buffers(module))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in transient:
            continue
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"`{name}` has no shape yet; run one batch through the module before "
                "`trainer.fit` or `fabric.setup`, so that its lazy layers are "
                "materialised"
            )
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            yield name, tensor


def _transient_buffers(module: nn.Module) -> Iterator[str]:
    """The buffers that no checkpoint holds: caches and tables, which come and go."""
    for prefix, child in module.named_modules():
        for name in child._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name


def check_one_device(tensors: Iterable[Tensor]) -> None:
    """Raises ValueError for weights on several devices."""
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(
            f"all weights of a learner must be on one device, got {sorted(devices)}"
        )


def layout_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The names, shapes and dtypes in order, as `first_difference` reads them."""
    return ";".join(f"{n}:{_shape_of(t)}:{t.dtype}" for n, t in tensors)


def _shape_of(tensor: Tensor) -> str:
    # The values of a vector have another order where a view keeps other strides.
    order = "" if tensor.is_contiguous() else " with channels last"
    return f"{tuple(tensor.shape)}{order}"


def same_order(theirs: str, ours: str) -> bool:
    """Whether two layouts have the same names and shapes; their dtypes may differ."""
    kept = [
        [entry.rpartition(":")[0] for entry in layout.split(";")]
        for layout in (theirs, ours)
    ]
    return kept[0] == kept[1]


def first_difference(theirs: str, ours: str) -> str:
    """The first weight in which two results of `FlatParameters.layout()` differ."""
    pairs = zip_longest(ours.split(";"), theirs.split(";"), fillvalue="")
    mine, first = next((mine, first) for mine, first in pairs if mine != first)
    return f"the first weight to differ is {_weight(mine)}, and there {_weight(first)}"


def _weight(entry: str) -> str:
    # As `layout_of` writes it: "layer.weight:(3, 4):torch.float32".
    if not entry:
        return "none"
    name, shape, dtype = entry.rsplit(":", 2)
    return f"`{name}` of shape {shape} in {dtype}"
