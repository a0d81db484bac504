"""Keeps the weights of a module in the vectors of which they are views.

``p.data = values`` gives a weight other memory than that which is averaged. The values
are then copied into the view, and the weight is made a view again, before anything is
averaged.
"""

import torch
from torch import Tensor, nn

from lightning_adpsgd.weights.flat import FlatParameters


class Ties:
    """The weights of a module that lie in its flat vectors; of the training thread.

    Args:
        module: Whose weights are views of the vectors.
        flat: The vectors.
    """

    def __init__(self, module: nn.Module, flat: FlatParameters) -> None:
        vectors = {vector.untyped_storage().data_ptr() for vector in flat.vectors}
        self._tied = [
            (tensor, tensor.detach(), tensor.data_ptr())
            for tensor in (*module.parameters(), *module.buffers())
            if tensor.untyped_storage().data_ptr() in vectors
        ]

    def renew(self) -> None:
        """Ties the weights that have got other memory; cheap if none has.

        Raises:
            RuntimeError: A weight has got another shape, dtype or device.
        """
        for tensor, view, address in self._tied:
            if tensor.data_ptr() != address:
                _put_back(tensor, view)


@torch.no_grad()
def _put_back(tensor: Tensor, view: Tensor) -> None:
    mine, other = _kind(view), _kind(tensor)
    if mine != other:
        raise RuntimeError(
            f"a weight of shape, dtype and device {mine} was given {other} after "
            "set-up, while other learners may still average it; replace it before "
            "`trainer.fit`"
        )
    view.copy_(tensor)
    tensor.data = view


def _kind(tensor: Tensor) -> tuple[list[int], str, str]:
    return list(tensor.shape), str(tensor.dtype), str(tensor.device)
