from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_adpsgd.mixing.averages import squared_norm


class LargestNorm(TorchDispatchMode):
    """Notes the most elements of which a norm is taken, all of which torch converts."""

    num_elements = 0

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.linalg_vector_norm.default:
            self.num_elements = max(self.num_elements, args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_squared_norm_is_precise_without_a_copy_in_double_precision(
    dtype: torch.dtype,
) -> None:
    vector = torch.randn(300_000, dtype=dtype)
    with LargestNorm() as largest:
        found = squared_norm(vector)
    widest = torch.complex128 if dtype.is_complex else torch.float64
    assert found.item() == pytest.approx(vector.to(widest).abs().square().sum().item())
    assert 0 < largest.num_elements <= 1 << 16


def test_a_squared_norm_overflows_no_sooner_than_in_double_precision() -> None:
    assert squared_norm(torch.tensor([3e30, 4e30])).item() == pytest.approx(2.5e61)
    assert squared_norm(torch.tensor([])).item() == 0.0
