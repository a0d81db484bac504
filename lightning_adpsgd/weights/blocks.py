"""Blocks: weights that share memory, in one vector with others.

They stay tied there: a weight that two layers use, a weight and its transpose, or a
weight and its rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


class Block:
    """Tensors over the same memory, such as tied weights or a weight and its rows.

    Attributes:
        length: number of elements that they take in a vector.

    Raises:
        ValueError: Some are complex conjugates or negatives of the others, which torch
            computes from the same memory when they are read.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        if len({(one.is_conj(), one.is_neg()) for one in tensors.values()}) > 1:
            raise ValueError(
                f"{' and '.join(f'`{name}`' for name in tensors)} must not be complex "
                "conjugates or negatives over the same memory: give one of them memory "
                "of its own (`.resolve_conj().resolve_neg()`)"
            )
        self._tensors = tensors
        first, *others = tensors.values()
        self._begin = first.data_ptr()
        self._is_one = all(_memory_of(first) == _memory_of(one) for one in others)
        ends = [_end(tensor) for tensor in tensors.values()]
        reach = (max(ends) - self._begin) // first.element_size()
        self.length = first.numel() if self._is_one else reach

    def views(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The view of each tensor in the block's part of a vector."""
        for name, tensor in self._tensors.items():
            if self._is_one:
                yield name, _view_like(memory, tensor)
                continue
            offset = (tensor.data_ptr() - self._begin) // tensor.element_size()
            begin = memory.storage_offset() + offset
            yield name, memory.as_strided(tensor.shape, tensor.stride(), begin)


def by_memory(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Groups tensors that share memory, in the order of the first of each."""
    found, end = list[dict[str, Tensor]](), 0
    for name in sorted(tensors, key=lambda name: tensors[name].data_ptr()):
        tensor = tensors[name]
        if tensor.data_ptr() >= end:
            found.append({})
        found[-1][name] = tensor
        end = max(end, _end(tensor))
    order = {name: number for number, name in enumerate(tensors)}
    return sorted(found, key=lambda group: min(order[name] for name in group))


def _memory_of(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _end(tensor: Tensor) -> int:
    """The first address after a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * step for length, step in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def copy_once(tensor: Tensor, view: Tensor) -> None:
    """Copies values; writes the one element of an expanded dimension once."""
    once = tuple(slice(None if step else 1) for step in view.stride())
    view[once].copy_(tensor[once])


def _view_like(memory: Tensor, tensor: Tensor) -> Tensor:
    """A view of memory of its length that keeps the strides of a dense tensor."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(tensor.ndim, torch.contiguous_format)
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=layout):
        return memory.as_strided(tensor.shape, tensor.stride())
    return memory.view(tensor.shape)
