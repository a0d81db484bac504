"""The shards of a model that lie in one learner, where `fully_shard` has put them.

The N learners of a super-learner hold 1/N of each weight. Counterparts in other
super-learners hold the same rows, so that each averages its own shards with theirs and
no learner ever needs the others'. FSDP2 keeps one tensor per weight, and pads some of
them; the vectors here are views of what is not padding. Nothing here communicates.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from lightning_adpsgd.weights.flat import floating_tensors, layout_of
from lightning_adpsgd.weights.sections import Range, row_ranges


class _Slot(NamedTuple):
    name: str
    tensor: Tensor
    address: int


class LocalShards:
    """One vector for each shard and each buffer of a learner.

    Args:
        module: module on its final device, sharded over the learners.
        num_learners: N, over which every parameter must be sharded.

    Attributes:
        vectors: memory of the shards, those of one dtype together, then that of the
            floating-point buffers, of which each learner has whole ones.
        num_buffers: how many of the vectors are buffers.

    Raises:
        ValueError: A parameter is not materialised, or not sharded over the learners,
            or the weights lie on several devices.
    """

    def __init__(self, module: nn.Module, num_learners: int) -> None:
        self._module = module
        found = list(floating_tensors(module))
        weights = [(n, t) for n, t in found if isinstance(t, nn.Parameter)]
        buffers = [(n, t) for n, t in found if not isinstance(t, nn.Parameter)]
        check_sharding(module, num_learners)
        in_order = [*_by_dtype(weights), *_by_dtype(buffers)]
        self._layout = layout_of(in_order)
        self._slots = [_Slot(*pair, _local(pair[1]).data_ptr()) for pair in in_order]
        self.vectors = [_memory_of(slot.name, slot.tensor) for slot in self._slots]
        self.num_buffers = len(buffers)
        _check_devices(self.vectors)

    @property
    def device(self) -> torch.device:
        """The device of the shards."""
        return self.vectors[0].device if self.vectors else torch.device("cpu")

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the module."""
        return self._module.parameters()

    def layout(self) -> str:
        """Names, shapes of the whole weights and dtypes; equal in all learners."""
        return self._layout

    def owned(self, size: int) -> list[list[Range]]:
        """The rows of each weight that `fully_shard` gives to each of so many learners.

        Raises:
            ValueError: There is a buffer, or a weight that is cut by columns.
        """
        for slot in self._slots:
            _check_rows(slot.name, slot.tensor)
        shapes = [
            (*slot.tensor.shape, 1 + slot.tensor.is_complex()) for slot in self._slots
        ]
        return row_ranges(shapes, size)

    def rebind(self) -> None:
        """Frees gathered weights, so that the next forward gathers them anew.

        After a forward without a backward FSDP2 keeps some of them, and would not see
        what was changed in the shards.

        Raises:
            RuntimeError: A shard was given other memory than at set-up.
        """
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for slot in self._slots:
            if _local(slot.tensor).data_ptr() != slot.address:
                raise RuntimeError(
                    f"`{slot.name}` was given new storage after set-up, so averaging "
                    "would miss it; change weights in place, or before `trainer.fit`"
                )

    def check_views(self) -> None:
        """Refuses a module whose weights are others than at set-up.

        Raises:
            RuntimeError: A weight was added, removed or replaced; names the first one.
        """
        here = {id(tensor): name for name, tensor in floating_tensors(self._module)}
        then = {id(slot.tensor): slot.name for slot in self._slots}
        for number in here.keys() ^ then.keys():
            name = here.get(number) or then[number]
            raise RuntimeError(
                f"`{name}` was added, removed or replaced after set-up, so averaging "
                "would miss it; change the module before `trainer.fit`"
            )


def is_sharded(module: nn.Module) -> bool:
    """Whether any weight of a module is a shard."""
    return any(isinstance(weight, DTensor) for weight in module.parameters())


def check_sharding(module: nn.Module, num_learners: int) -> None:
    """Refuses a module of which a learner holds more than its shards.

    Raises:
        ValueError: Names the parameter and what to do.
    """
    for name, weight in module.named_parameters():
        _check_sharding(name, weight, num_learners)


def _check_sharding(name: str, weight: Tensor, num_learners: int) -> None:
    if not isinstance(weight, DTensor):
        if num_learners == 1:
            return
        raise ValueError(
            f"`{name}` must be sharded over the {num_learners} learners of its "
            "super-learner, got a whole tensor in each: apply `fully_shard` to the "
            "module that holds it, or to the root of all, in `configure_model`"
        )
    mesh, placements = weight.device_mesh, weight.placements
    is_shard = len(placements) == 1 and isinstance(placements[0], Shard)
    if not is_shard or mesh.size() != num_learners:
        raise ValueError(
            f"`{name}` must be sharded in one dimension over the {num_learners} "
            f"learners of its super-learner, got {placements} over a mesh of "
            f"{tuple(mesh.shape)}: give `fully_shard` "
            '`mesh=self.device_mesh["data_parallel"]`'
        )


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


def _check_devices(vectors: list[Tensor]) -> None:
    devices = {str(vector.device) for vector in vectors}
    if len(devices) > 1:
        raise ValueError(
            f"all shards of a learner must be on one device, got {sorted(devices)}"
        )


def _by_dtype(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return sorted(tensors, key=lambda pair: str(pair[1].dtype))


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data


def _memory_of(name: str, tensor: Tensor) -> Tensor:
    local = _local(tensor)
    if not local.is_contiguous():
        raise ValueError(
            f"`{name}` must be contiguous, got strides {local.stride()} of a shard of "
            f"shape {tuple(local.shape)}"
        )
    return local.view(-1)
