"""Weights as rows, and a module that holds any of them."""

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_adpsgd.virtual.rows import Rows


class Mixed(nn.Module):
    """Two dtypes, tied weights, a complex one, buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False)
        self.tied = nn.Linear(3, 2, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(2)
        self.wide = nn.Parameter(torch.arange(4.0, dtype=torch.float64).view(2, 2).T)
        self.waves = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("table", torch.ones(2), persistent=False)


def test_all_rows_begin_as_the_module_is_and_tied_weights_take_one_place() -> None:
    module = Mixed()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    rows = Rows(module, 3)
    lengths = {matrix.dtype: matrix.shape for matrix in rows.matrices}
    # Complex numbers are a vector of their own, of real ones.
    assert sorted(tuple(m.shape) for m in rows.matrices) == [(3, 4), (3, 4), (3, 14)]
    assert lengths[torch.float64] == (3, 4)
    for row in range(3):
        rows.hold(row)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, before[name])
        assert module.tied.weight is module.first.weight


def test_what_changes_a_held_module_changes_its_row_alone() -> None:
    module = Mixed()
    rows = Rows(module, 3)
    others = [matrix[[0, 2]].clone() for matrix in rows.matrices]
    rows.hold(1)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)
    for matrix, before in zip(rows.matrices, others, strict=True):
        assert torch.equal(matrix[[0, 2]], before)
        # The imaginary numbers have nothing added.
        assert (matrix[1] == before[0] + 1).sum() in (2, 4, 14)


def test_buffers_that_are_not_averaged_are_kept_for_each_row() -> None:
    module = Mixed()
    rows = Rows(module, 2)
    counter = module.norm.num_batches_tracked
    assert counter is not None
    rows.hold(1)
    module.norm(torch.randn(4, 2))
    assert counter.item() == 1
    rows.hold(0)
    assert counter.item() == 0
    rows.copy_beside(1, 0)
    assert counter.item() == 1


class Assigns(nn.Module):
    """Its forward assigns buffers where others change theirs in place."""

    def __init__(self, assigned: str) -> None:
        super().__init__()
        self.weight, self.assigned = nn.Parameter(torch.ones(2)), assigned
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(2))

    @override
    def forward(self) -> Tensor:
        old = getattr(self, self.assigned)
        grows = self.assigned == "cache"
        setattr(self, self.assigned, torch.cat([old, old + 1]) if grows else old + 1)
        return self.weight.sum()


@pytest.mark.parametrize("name", ["count", "cache"])
def test_assigned_buffers_that_are_not_averaged_are_of_the_row_that_was_held(
    name: str,
) -> None:
    module = Assigns(name)
    rows = Rows(module, 3)
    buffer = getattr(module, name)
    for row, num in enumerate((2, 1)):
        rows.hold(row)
        for _ in range(num):
            module()
    found = []
    for row in range(3):
        rows.hold(row)
        assert getattr(module, name) is buffer
        found.append(buffer.max().item())
    assert found == [2, 1, 0]
    rows.copy_beside(0, 2)
    assert buffer.max().item() == 2


def test_averaged_buffers_that_are_assigned_are_taken_into_their_row() -> None:
    module = Assigns("mean")
    rows = Rows(module, 2)
    module()
    rows.hold(1)
    assert module.mean.tolist() == [0.0, 0.0]
    assert rows.vectors(0)[0].tolist() == [1.0] * 4
    assert rows.vectors(1)[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    module.mean = torch.zeros(3)
    with pytest.raises(RuntimeError, match="was given"):
        rows.take_assigned()


def test_weights_that_are_given_other_memory_are_taken_into_their_row() -> None:
    """As by an optimizer that assigns ``p.data = p.data - lr * p.grad``."""
    module = Mixed()
    module._ddp_params_and_buffers_to_ignore = ["wide"]  # pyright: ignore
    rows = Rows(module, 2)
    for parameter in module.parameters():
        parameter.data = parameter.data + 1
    after = {n: p.detach().clone() for n, p in module.named_parameters()}
    rows.hold(1)
    assert all((p != after[n]).all() for n, p in module.named_parameters())
    rows.hold(0)
    assert all(torch.equal(p, after[n]) for n, p in module.named_parameters())
    module.first.weight.data = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"`first\.weight` .* was given"):
        rows.take_assigned()


def test_released_weights_stay_tied_and_a_row_can_be_held_again() -> None:
    first = nn.Parameter(torch.randn(3, 3))
    second = nn.Parameter(first.detach().t())
    rows = Rows(nn.ParameterList([first, second]), 4)
    rows.release()
    with torch.no_grad():
        first.fill_(0.0)
        first[0, 2] = 5.0
    assert second[2, 0] == 5.0
    assert first.untyped_storage().nbytes() == first.nbytes
    rows.hold(0)
    assert torch.equal(second, first.t())
    assert torch.equal(first.flatten(), rows.matrices[0][3])


def test_a_change_of_a_released_module_changes_no_row() -> None:
    module = Mixed()
    rows = Rows(module, 2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    rows.release()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)
    rows.hold(0)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert module.get_buffer("table").tolist() == [1.0, 1.0]


def test_rows_are_padded_for_shards() -> None:
    rows = Rows(nn.Linear(3, 1), 2, shards=3)
    assert rows.matrices[0].shape == (2, 6)
    assert rows.matrices[0][:, 4:].tolist() == [[0.0, 0.0]] * 2


def test_gradients_belong_to_the_row_that_was_held() -> None:
    module = nn.Linear(2, 1, bias=False)
    rows = Rows(module, 2)
    rows.matrices[0][1] *= 3
    gradients = []
    for row in range(2):
        rows.hold(row)
        module.zero_grad()
        module(torch.ones(1, 2)).square().sum().backward()
        assert module.weight.grad is not None
        gradients.append(module.weight.grad)
    torch.testing.assert_close(gradients[1], 3 * gradients[0])


def test_a_sparse_buffer_that_ddp_is_to_ignore_is_kept_for_each_row() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("edges", torch.eye(2).to_sparse())
    module._ddp_params_and_buffers_to_ignore = ["edges"]  # pyright: ignore
    rows = Rows(module, 2)
    rows.hold(1)
    edges = module.edges
    assert isinstance(edges, Tensor)
    edges._values().mul_(3)
    assert torch.equal(edges.to_dense(), 3 * torch.eye(2))
    rows.hold(0)
    assert torch.equal(edges.to_dense(), torch.eye(2))
    rows.copy_beside(1, 0)
    assert torch.equal(edges.to_dense(), 3 * torch.eye(2))
    rows.release()
    assert edges.is_sparse
