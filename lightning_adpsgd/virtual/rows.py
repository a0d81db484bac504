"""The weights of many super-learners as rows of one matrix per dtype, and one module.

The module's parameters and buffers are pointed at the row of whoever is to compute, at
no more cost than a few addresses. Which of them are averaged, and so lie in a row, is
what `parameters` says; the others (integer buffers) are kept for each row beside it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_adpsgd.parameters import FlatParameters
from lightning_adpsgd.replica import as_real


class Place(NamedTuple):
    """Where a tensor of the module lies in each row.

    Attributes:
        name: Of the tensor in the module.
        matrix: Number of the matrix.
        offset: Of its first element in the row.
        shape: Of the tensor.
        stride: Of the tensor.
    """

    name: str
    matrix: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Rows:
    """One row of weights for each super-learner; all begin as the module is.

    Args:
        module: On its final device and in its final dtype; it holds row 0 afterwards.
        num_rows: How many.
        shards: Rows are padded to a multiple of this length.

    Attributes:
        matrices: [num_rows, P] for each dtype, [num_rows, 2 P] real numbers for a
            complex one.
        places: Of the parameters and buffers that lie in the rows.
    """

    def __init__(self, module: nn.Module, num_rows: int, shards: int = 1) -> None:
        vectors = FlatParameters(module, shards).vectors
        whole = [vector.repeat(num_rows, 1) for vector in vectors]
        addresses = [vector.untyped_storage().data_ptr() for vector in vectors]
        self._whole = whole
        self.matrices = [_as_real_rows(matrix) for matrix in whole]
        self.places: list[Place] = []
        self._tensors: list[tuple[Tensor, list[Tensor]]] = []
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            address = tensor.untyped_storage().data_ptr()
            if address in addresses:
                number = addresses.index(address)
                place = _place_of(name, tensor, number)
                self.places.append(place)
                self._tensors.append((tensor, _views(whole[number], place)))
            else:
                copies = [tensor.detach().clone() for _ in range(num_rows)]
                self._tensors.append((tensor, copies))
        self._held = -1
        self.hold(0)

    def hold(self, row: int) -> None:
        """Points the module at a row: what changes the one changes the other."""
        if row == self._held:
            return
        for tensor, views in self._tensors:
            tensor.data = views[row]
        self._held = row

    def release(self) -> None:
        """Gives the module memory of its own, with what it holds at present."""
        for tensor, _ in self._tensors:
            tensor.data = tensor.data.clone()
        self._held = -1

    def vectors(self, row: int) -> list[Tensor]:
        """The row in each matrix."""
        return [matrix[row] for matrix in self.matrices]

    def first(self, num_rows: int) -> list[Tensor]:
        """The first rows of each matrix; of a complex one as complex numbers."""
        return [matrix[:num_rows] for matrix in self._whole]

    def state(self) -> dict[str, Any]:
        """A copy of all weights, and of what is kept beside the rows."""
        return {
            "matrices": [matrix.clone() for matrix in self.matrices],
            "beside": [[copy.clone() for copy in copies] for copies in self._beside()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Brings back what `state` gave."""
        pairs = [*zip(self.matrices, state["matrices"], strict=True)]
        for copies, kept in zip(self._beside(), state["beside"], strict=True):
            pairs += zip(copies, kept, strict=True)
        for mine, kept in pairs:
            mine.copy_(kept)

    def copy_beside(self, source: int, target: int) -> None:
        """Copies what is kept beside the rows."""
        for copies in self._beside():
            copies[target].copy_(copies[source])

    def _beside(self) -> Iterator[list[Tensor]]:
        """The copies of each tensor that lies in no matrix, one for each row."""
        return (t for _, t in self._tensors if not _lies_in(t[0], self.matrices))


def stacked(place: Place, matrices: list[Tensor]) -> Tensor:
    """A tensor of the module in each of some rows, [row, ...], as a view.

    Args:
        place: Of the tensor.
        matrices: What `Rows.first` gives, or copies of rows of it.
    """
    matrix = matrices[place.matrix]
    strides = (matrix.stride(0), *place.stride)
    offset = matrix.storage_offset() + place.offset
    return matrix.as_strided((len(matrix), *place.shape), strides, offset)


def _place_of(name: str, tensor: Tensor, number: int) -> Place:
    offset, stride = tensor.storage_offset(), tensor.stride()
    return Place(name, number, int(offset), tensor.shape, stride)


def _views(matrix: Tensor, place: Place) -> list[Tensor]:
    length = matrix.shape[1]
    return [
        matrix.as_strided(place.shape, place.stride, row * length + place.offset)
        for row in range(len(matrix))
    ]


def _as_real_rows(matrix: Tensor) -> Tensor:
    return as_real(matrix).view(len(matrix), -1) if matrix.is_complex() else matrix


def _lies_in(tensor: Tensor, matrices: list[Tensor]) -> bool:
    address = tensor.untyped_storage().data_ptr()
    return any(m.untyped_storage().data_ptr() == address for m in matrices)
