"""The weights of many super-learners as rows of one matrix per dtype, and one module.

The module's parameters and buffers point at the row of the super-learner that computes,
which costs no more than setting a few addresses. `FlatParameters` says which of them
are averaged and so lie in a row. The others (integer buffers) are kept separately for
each row.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_adpsgd.weights.flat import FlatParameters
from lightning_adpsgd.weights.replica import as_real


class TensorSlot(NamedTuple):
    """The place of a tensor of the module in each row of a matrix."""

    name: str
    matrix: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Rows:
    """One row of weights for each super-learner; all start as the module's weights.

    Args:
        module: module on its final device and in its final dtype; it points at row 0
            afterwards.
        shards: number of shards; rows are padded to a multiple of it.

    Attributes:
        matrices: [num_rows, P] for each dtype, [num_rows, 2 P] real numbers for a
            complex one.
        slots: slots of the parameters and buffers that lie in the rows.
    """

    def __init__(self, module: nn.Module, num_rows: int, shards: int = 1) -> None:
        vectors = FlatParameters(module, shards).vectors
        whole = [vector.repeat(num_rows, 1) for vector in vectors]
        addresses = [vector.untyped_storage().data_ptr() for vector in vectors]
        self._whole = whole
        self.matrices = [
            as_real(one).view(num_rows, -1) if one.is_complex() else one
            for one in whole
        ]
        self.slots: list[TensorSlot] = []
        # Each tensor of the module with what it is in each row.
        self._tensors: list[tuple[Tensor, list[Tensor]]] = []
        self._beside: list[list[Tensor]] = []
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            address = tensor.untyped_storage().data_ptr()
            if address in addresses:
                number = addresses.index(address)
                begin, stride = int(tensor.storage_offset()), tensor.stride()
                slot = TensorSlot(name, number, begin, tensor.shape, stride)
                self.slots.append(slot)
                self._tensors.append((tensor, _views(whole[number], slot)))
            else:
                copies = [tensor.detach().clone() for _ in range(num_rows)]
                self._tensors.append((tensor, copies))
                self._beside.append(copies)
        self._held = -1
        self.hold(0)

    def hold(self, row: int) -> None:
        """Points the module at a row; they then share memory."""
        if row == self._held:
            return
        for tensor, views in self._tensors:
            tensor.data = views[row]
        self._held = row

    def release(self) -> None:
        """Copies the module's current tensors into memory of its own."""
        for tensor, _ in self._tensors:
            tensor.data = tensor.data.clone()
        self._held = -1

    def vectors(self, row: int) -> list[Tensor]:
        """The vectors of a row, one in each matrix."""
        return [matrix[row] for matrix in self.matrices]

    def first(self, num_rows: int) -> list[Tensor]:
        """The first rows of each matrix, with complex weights as complex numbers."""
        return [matrix[:num_rows] for matrix in self._whole]

    def copy_beside(self, source: int, target: int) -> None:
        """Copies the tensors that are kept outside of the rows."""
        for copies in self._beside:
            copies[target].copy_(copies[source])


def stacked(slot: TensorSlot, matrices: list[Tensor]) -> Tensor:
    """A tensor in each row, [row, ...], as a view of what `Rows.first` gives."""
    matrix = matrices[slot.matrix]
    strides = (matrix.stride(0), *slot.stride)
    offset = matrix.storage_offset() + slot.offset
    return matrix.as_strided((len(matrix), *slot.shape), strides, offset)


def _views(matrix: Tensor, slot: TensorSlot) -> list[Tensor]:
    length = matrix.shape[1]
    return [
        matrix.as_strided(slot.shape, slot.stride, row * length + slot.offset)
        for row in range(len(matrix))
    ]
