"""The shards of a model in one learner, as `fully_shard` has placed them.

Each of the N learners of a super-learner holds 1/N of each weight. Counterparts in
other super-learners hold the same rows, so each averages its own shards with theirs,
and no learner needs other shards. FSDP2 keeps one tensor per weight and pads some of
them; the vectors here are views without the padding. Nothing here communicates.

With tensor parallelism, T learners share each layer. Each of them exchanges 1/T of the
weights that all T hold, and sends the result to the others (docs/large-models.md).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard
from typing_extensions import override

from lightning_adpsgd.weights.flat import (
    Weights,
    check_one_device,
    floating_tensors,
    layout_of,
)
from lightning_adpsgd.weights.sections import Range, Section, row_ranges

DATA_PARALLEL, TENSOR_PARALLEL = "data_parallel", "tensor_parallel"
"""The dimensions of the mesh over which a super-learner shards."""


class LocalShards(Weights):
    """One vector for each shard and each buffer of a learner.

    Args:
        module: module on its final device, which `check_sharding` accepts.
        shared_by: T, the number of learners that share each layer.

    Attributes:
        vectors: memory of the shards, those of one dtype together, then that of the
            floating-point buffers, of which each learner has whole ones.

    Raises:
        ValueError: A parameter is not materialised, or they are on several devices.
    """

    def __init__(self, module: nn.Module, shared_by: int = 1) -> None:
        super().__init__(module)
        self.shared_by = shared_by
        found = list(floating_tensors(module))
        weights = [(n, t) for n, t in found if isinstance(t, nn.Parameter)]
        buffers = [(n, t) for n, t in found if not isinstance(t, nn.Parameter)]
        self._tensors = tensors = [*_by_dtype(weights), *_by_dtype(buffers)]
        # With tensor parallelism, names include how a weight is cut.
        self._layout = layout_of((_with_cut(*pair), pair[1]) for pair in tensors)
        self._replicated = [shared_by > 1 and not _cut(t) for _, t in tensors]
        self.vectors = [_memory_of(*pair) for pair in tensors]
        self._num_buffers = len(buffers)
        check_one_device(self.vectors)

    @override
    def layout(self) -> str:
        return self._layout

    def exchanged(self, place: int) -> Section:
        """The parts of the vectors that the learner in this place of T exchanges."""
        return Section((), (*self._ranges(place),))

    def replicated(self, place: int) -> Section:
        """The part of replicated weights that the learner in this place exchanges."""
        own = self._ranges(place)
        return Section((), tuple(one for one in own if self._replicated[one.vector]))

    def _ranges(self, place: int) -> Iterator[Range]:
        for number, vector in enumerate(self.vectors):
            length = vector.numel() * (1 + vector.is_complex())
            parts, own = (self.shared_by, place) if self._replicated[number] else (1, 0)
            yield Range(number, length * own // parts, length * (own + 1) // parts)

    @override
    def owned(self, size: int) -> list[list[Range]]:
        """The rows of each weight that `fully_shard` gives to each of `size` learners.

        Raises:
            ValueError: There is a buffer, or a weight is cut by columns.
        """
        for name, tensor in self._tensors:
            _check_rows(name, tensor)
        shapes = [(*t.shape, 1 + t.is_complex()) for _, t in self._tensors]
        return row_ranges(shapes, size)

    @override
    def buffers_in(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return [*vectors[len(vectors) - self._num_buffers :]]

    @override
    def rebind(self) -> None:
        """Frees gathered weights, so that the next forward gathers them again.

        After a forward without a backward, FSDP2 keeps some of them and would not see
        changes in the shards.

        Raises:
            RuntimeError: A shard has moved to other memory since set-up.
        """
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for (name, tensor), vector in zip(self._tensors, self.vectors, strict=True):
            if local_part(tensor).data_ptr() != vector.data_ptr():
                raise RuntimeError(
                    f"`{name}` was given new storage after set-up, so averaging "
                    "would miss it; change weights in place, or before `trainer.fit` "
                    "or `fabric.setup`"
                )

    @override
    def release(self) -> None:
        """Does nothing: shards are where FSDP2 has put them."""

    @override
    def check_views(self) -> None:
        here = {id(tensor): name for name, tensor in floating_tensors(self.module)}
        then = {id(tensor): name for name, tensor in self._tensors}
        for number in here.keys() ^ then.keys():
            name = here.get(number) or then[number]
            raise RuntimeError(
                f"`{name}` was added, removed or replaced after set-up, so averaging "
                "would miss it; change the module before `trainer.fit` or "
                "`fabric.setup`"
            )


def is_sharded(module: nn.Module) -> bool:
    """Whether any weight of a module is a shard."""
    return any(isinstance(weight, DTensor) for weight in module.parameters())


def check_sharding(module: nn.Module, num_learners: int, shared_by: int) -> None:
    """Raises ValueError for a module of which a learner holds more than its shards.

    Args:
        num_learners: N, over which every parameter must be sharded.
        shared_by: T, the number of learners that share each layer; must divide N.
    """
    for name, weight in module.named_parameters():
        _check_sharding(name, weight, num_learners // shared_by)
    for name, buffer in module.named_buffers():
        if shared_by > 1 and _cut(buffer):
            raise ValueError(
                f"`{name}` must be a whole buffer, got {_cut(buffer)!r} over "
                f"{shared_by} learners: replicate it, or make it a parameter"
            )


def _check_sharding(name: str, weight: Tensor, num_rows: int) -> None:
    if not isinstance(weight, DTensor):
        if num_rows == 1:
            return
        raise ValueError(
            f"`{name}` must be sharded over the {num_rows} learners of its "
            "super-learner, got a whole tensor in each: apply `fully_shard` to the "
            "module that holds it, or to the root of all, in `configure_model`"
        )
    over = [one for one in _dimensions(weight) if one.name != TENSOR_PARALLEL]
    is_shard = all(_is_shard(one.placement) for one in over)
    if not is_shard or math.prod(one.size for one in over) != num_rows:
        raise ValueError(
            f"`{name}` must be sharded in one dimension over the {num_rows} learners "
            f"of its super-learner, got {weight.placements} over a mesh of "
            f"{tuple(weight.device_mesh.shape)}: give `fully_shard` "
            '`mesh=self.device_mesh["data_parallel"]`'
        )


class _Dimension(NamedTuple):
    """The placement of a weight in one dimension of its mesh."""

    name: str
    size: int
    placement: Placement


def _dimensions(tensor: Tensor) -> list[_Dimension]:
    """The mesh dimensions over which a tensor is spread, without those of size one."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    rows = zip(names, mesh.shape, tensor.placements, strict=True)
    return [_Dimension(*row) for row in rows if row[1] > 1]


def _is_shard(placement: Placement) -> bool:
    # A placement for both kinds of parallelism in one dimension is no `Shard` in torch.
    return not (placement.is_replicate() or placement.is_partial())


def _cut(tensor: Tensor) -> Placement | None:
    """How tensor parallelism cuts a tensor; None if all T learners have all of it."""
    over = (one for one in _dimensions(tensor) if one.name == TENSOR_PARALLEL)
    return next((one.placement for one in over if _is_shard(one.placement)), None)


def _with_cut(name: str, tensor: Tensor) -> str:
    cut = _cut(tensor)
    return name if cut is None else f"{name} by {cut!r}"


def _check_rows(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, nn.Parameter):
        raise ValueError(
            f"`{name}` must not be a floating-point buffer, with super-learners of "
            "different sizes: each learner has a whole one, and no counterpart; "
            "register it with `persistent=False`, or give all super-learners one size"
        )
    placements = tensor.placements if isinstance(tensor, DTensor) else (Shard(0),)
    if placements != (Shard(0),):
        raise ValueError(
            f"`{name}` must be sharded by rows, Shard(dim=0), with super-learners of "
            f"different sizes, got {placements}"
        )


def _by_dtype(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return sorted(tensors, key=lambda pair: str(pair[1].dtype))


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This learner's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data


def _memory_of(name: str, tensor: Tensor) -> Tensor:
    local = local_part(tensor)
    if not local.is_contiguous():
        raise ValueError(
            f"`{name}` must be contiguous, got strides {local.stride()} of a shard of "
            f"shape {tuple(local.shape)}"
        )
    return local.view(-1)
