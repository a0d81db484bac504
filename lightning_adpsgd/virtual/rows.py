"""The weights of many super-learners as rows of one matrix per dtype, and one module.

The module's parameters and buffers point into the row of the super-learner whose turn
it is. To switch rows, only these pointers are set. `FlatParameters` says which
parameters and buffers are averaged and so lie in a row. The others (integer buffers)
are kept beside the rows, one copy for each.
"""

import torch
from torch import Tensor, nn

from lightning_adpsgd.weights.flat import FlatParameters, buffer_places, put_back
from lightning_adpsgd.weights.replica import as_real


class Rows:
    """One row of weights for each super-learner; all start as the module's weights.

    Args:
        module: on its final device and in its final dtype; it points at row 0 then.
        shards: number of shards; rows are padded to a multiple of it.

    Attributes:
        matrices: [num_rows, P] for each dtype; of a complex one [num_rows, 2 P], real.
        held: number of the row that the module points into; -1 for none.
    """

    def __init__(self, module: nn.Module, num_rows: int, shards: int = 1) -> None:
        vectors, self._module = FlatParameters(module, shards).vectors, module
        whole = [vector.repeat(num_rows, 1) for vector in vectors]
        addresses = [vector.untyped_storage().data_ptr() for vector in vectors]
        self.matrices = [
            as_real(one).view(num_rows, -1) if one.is_complex() else one
            for one in whole
        ]
        # Each tensor of the module, with its name and its view in each row.
        self._tensors: list[tuple[str, Tensor, list[Tensor]]] = []
        self._beside: dict[Tensor, list[Tensor]] = {}
        self._buffers = [*buffer_places(module)]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            # A sparse one, which has no storage, is in no vector.
            dense = tensor.layout == torch.strided
            address = tensor.untyped_storage().data_ptr() if dense else None
            if address in addresses:
                matrix = whole[addresses.index(address)]
                self._tensors.append((name, tensor, _views(matrix, tensor)))
            else:
                copies = [tensor.detach().clone() for _ in range(num_rows)]
                self._tensors.append((name, tensor, copies))
                self._beside[tensor] = copies
        self.held = -1
        self.hold(0)

    def hold(self, row: int) -> None:
        """Points the module into a row; they then share memory."""
        if row == self.held:
            return
        self.take_assigned()
        for _, tensor, views in self._tensors:
            tensor.data = views[row]
        self.held = row

    def take_assigned(self) -> None:
        """Moves what the program has assigned into the held row: buffers, and `.data`.

        Raises:
            RuntimeError: Averaged weights have another shape, dtype or device.
        """
        for buffer in self._buffers:
            if (assigned := buffer.take_assigned()) is None or self.held < 0:
                continue
            if buffer.tensor in self._beside:
                buffer.tensor.data = assigned.clone()
            else:
                put_back(buffer.name, assigned, buffer.tensor)
        for name, tensor, views in self._tensors if self.held >= 0 else ():
            if tensor in self._beside:
                views[self.held] = tensor.data
            elif tensor.data_ptr() != views[self.held].data_ptr():
                put_back(name, tensor, views[self.held])

    def buffers(self) -> list[Tensor]:
        """Copies of the module's buffers."""
        self.take_assigned()
        return [buffer.tensor.detach().clone() for buffer in self._buffers]

    def put_buffers(self, values: list[Tensor]) -> None:
        """Puts buffers as `buffers` returns them into the row that is held."""
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.owner._buffers[buffer.key] = value.clone()
        self.take_assigned()

    def release(self) -> None:
        """Gives the module's weights memory of their own, until the next `hold`.

        No row is held then, so a change of the module changes no row.
        """
        self.take_assigned()
        FlatParameters(self._module).release()
        for tensor in self._beside:
            tensor.data = tensor.data.clone()
        self.held = -1

    def vectors(self, row: int) -> list[Tensor]:
        """The vectors of a row, one in each matrix."""
        return [matrix[row] for matrix in self.matrices]

    def copy_beside(self, source: int, target: int) -> None:
        """Copies the tensors that are kept beside the rows from one row to another."""
        self.take_assigned()
        for tensor, copies in self._beside.items():
            copies[target] = copies[source].clone()  # its shape may have changed
            if target == self.held:
                tensor.data = copies[target]


def _views(matrix: Tensor, tensor: Tensor) -> list[Tensor]:
    """The views of all rows at the place that a tensor of the module has in its row."""
    length, begin = matrix.shape[1], int(tensor.storage_offset())
    return [
        matrix.as_strided(tensor.shape, tensor.stride(), row * length + begin)
        for row in range(len(matrix))
    ]
