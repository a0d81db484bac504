"""The weights of many super-learners as rows of one matrix per dtype, and one module.

The module's parameters and buffers point at the row of the super-learner that computes,
which costs no more than setting a few addresses. `FlatParameters` says which of them
are averaged and so lie in a row. The others (integer buffers) are kept separately for
each row.
"""

from torch import Tensor, nn

from lightning_adpsgd.weights.flat import FlatParameters
from lightning_adpsgd.weights.replica import as_real


class Rows:
    """One row of weights for each super-learner; all start as the module's weights.

    Args:
        module: module on its final device and in its final dtype; it points at row 0
            afterwards.
        shards: number of shards; rows are padded to a multiple of it.

    Attributes:
        matrices: [num_rows, P] for each dtype, [num_rows, 2 P] real numbers for a
            complex one.
    """

    def __init__(self, module: nn.Module, num_rows: int, shards: int = 1) -> None:
        vectors = FlatParameters(module, shards).vectors
        whole = [vector.repeat(num_rows, 1) for vector in vectors]
        addresses = [vector.untyped_storage().data_ptr() for vector in vectors]
        self.matrices = [
            as_real(one).view(num_rows, -1) if one.is_complex() else one
            for one in whole
        ]
        # Each tensor of the module, with its view in each row.
        self._tensors: list[tuple[Tensor, list[Tensor]]] = []
        self._beside: list[list[Tensor]] = []
        for tensor in (*module.parameters(), *module.buffers()):
            address = tensor.untyped_storage().data_ptr()
            if address in addresses:
                matrix = whole[addresses.index(address)]
                self._tensors.append((tensor, _views(matrix, tensor)))
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

    def copy_beside(self, source: int, target: int) -> None:
        """Copies the tensors that are kept outside of the rows."""
        for copies in self._beside:
            copies[target].copy_(copies[source])


def _views(matrix: Tensor, tensor: Tensor) -> list[Tensor]:
    """The views of a tensor of the module, which lies in such a row, in all rows."""
    length, begin = matrix.shape[1], int(tensor.storage_offset())
    return [
        matrix.as_strided(tensor.shape, tensor.stride(), row * length + begin)
        for row in range(len(matrix))
    ]
