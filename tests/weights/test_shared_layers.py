"""What FSDP2 and tensor parallelism have put into one of four learners, or of two."""

from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_adpsgd.weights.flat import FlatParameters
from lightning_adpsgd.weights.sections import Range
from lightning_adpsgd.weights.shards import LocalShards, check_sharding


def mesh_of(rows: int, columns: int) -> Generator[DeviceMesh, None, None]:
    dist.init_process_group(
        "fake", store=FakeStore(), rank=1, world_size=rows * columns
    )
    names = ("data_parallel", "tensor_parallel")
    yield init_device_mesh("cpu", (rows, columns), mesh_dim_names=names)
    dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The second of the first two of 2 x 2 learners."""
    yield from mesh_of(2, 2)


@pytest.fixture
def row() -> Iterator[DeviceMesh]:
    """The second of 1 x 2 learners."""
    yield from mesh_of(1, 2)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def cut(mesh: DeviceMesh) -> nn.Sequential:
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module := network(), mesh["tensor_parallel"], plan)
    return module


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    fully_shard(module := cut(mesh), mesh=mesh["data_parallel"])
    return module


def elements(shards: LocalShards, place: int) -> list[Range]:
    return [*shards.replicated(place).ranges]


def test_each_learner_exchanges_its_shards_and_a_part_of_what_is_replicated(
    mesh: DeviceMesh,
) -> None:
    shards = LocalShards(sharded(mesh), 2)
    # Layers that are cut in four, the norm and the last bias in two.
    assert [len(vector) for vector in shards.vectors] == [6, 2, 4, 4, 8, 2]
    whole = [(0, 0, 6), (1, 0, 2), (4, 0, 8)]
    first, second = ([(*one,) for one in shards.exchanged(n).ranges] for n in (0, 1))
    assert first == sorted([*whole, (2, 0, 2), (3, 0, 2), (5, 0, 1)])
    assert second == sorted([*whole, (2, 2, 4), (3, 2, 4), (5, 1, 2)])
    assert elements(shards, 1) == [(2, 2, 4), (3, 2, 4), (5, 1, 2)]


def test_a_learner_may_hold_whole_tensors_where_all_share_each_layer(
    row: DeviceMesh,
) -> None:
    check_sharding(module := cut(row), 2, 2)
    shards = LocalShards(module, 2)
    assert [len(vector) for vector in shards.vectors] == [12, 4, 8, 8, 16, 4]
    assert elements(shards, 0) == [(2, 0, 4), (3, 0, 4), (5, 0, 2)]


def test_buffers_are_replicated(row: DeviceMesh) -> None:
    module = nn.Sequential(*cut(row), nn.BatchNorm1d(3))
    shards = LocalShards(module, 2)
    assert len(shards.buffers_in(shards.vectors)) == 2
    assert elements(shards, 1)[-2:] == [(8, 1, 3), (9, 1, 3)]


def test_a_layout_says_what_is_cut_and_how(mesh: DeviceMesh) -> None:
    """So that learners with another plan are told from these."""
    layout = LocalShards(sharded(mesh), 2).layout()
    whole = FlatParameters(network()).layout()
    differing = [
        (ours, theirs)
        for ours, theirs in zip(layout.split(";"), whole.split(";"), strict=True)
        if ours != theirs
    ]
    assert [theirs.split(":")[0] for _, theirs in differing] == [
        "0.weight",
        "0.bias",
        "2.weight",
    ]
    assert differing[2][0].startswith("2.weight by Shard(dim=1):")


def test_a_plan_over_single_learners_changes_nothing() -> None:
    learners = mesh_of(2, 1)
    mesh = next(learners)
    shards = LocalShards(sharded(mesh))
    assert [len(vector) for vector in shards.vectors] == [12, 4, 4, 4, 16, 2]
    assert elements(shards, 0) == []
    assert shards.layout() == FlatParameters(network()).layout()
    assert [*learners] == []


def replicas(mesh: DeviceMesh) -> nn.Module:
    """HSDP: each of the first dimension has all."""
    fully_shard(module := network(), mesh=mesh)
    return module


def with_cut_buffer(mesh: DeviceMesh) -> nn.Module:
    module = sharded(mesh)
    norm = nn.BatchNorm1d(4, affine=False)
    mean = norm.running_mean
    assert mean is not None
    norm.running_mean = distribute_tensor(mean, mesh["tensor_parallel"], [Shard(0)])
    return nn.Sequential(*module, norm)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (cut, r"`0.weight` must be sharded in one .* over the 2 learners.*Shard"),
        (replicas, r"`0.weight` must be sharded in one .*Replicate.*\(2, 2\)"),
        (lambda mesh: network(), "`0.weight` must be .* over the 2 .* whole tensor"),
        (with_cut_buffer, r"`3.running_mean` must be a whole buffer"),
    ],
)
def test_what_is_not_sharded_over_the_rows_of_learners_is_refused(
    mesh: DeviceMesh, make: Callable[[DeviceMesh], nn.Module], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_sharding(make(mesh), 4, 2)
