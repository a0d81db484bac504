"""What FSDP2 has put into one learner, over a process group that sends nothing."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_adpsgd.weights.flat import FlatParameters
from lightning_adpsgd.weights.shards import LocalShards, check_sharding, is_sharded
from tests.sharded import needs_fsdp2_on_cpus


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The second of two learners."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def network() -> nn.Sequential:
    """Five rows and two: the first do not divide by two."""
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    fully_shard(module := network(), mesh=mesh)
    return module


def test_vectors_are_the_shards_without_padding_and_then_the_buffers(
    mesh: DeviceMesh,
) -> None:
    shards = LocalShards(sharded(mesh))
    # Of five rows the second learner has two, and FSDP2 has room for three.
    assert [len(vector) for vector in shards.vectors] == [6, 2, 2, 2, 5, 1, 5, 5]
    assert len(shards.buffers_in(shards.vectors)) == 2


def test_what_is_written_into_a_vector_is_in_the_module(mesh: DeviceMesh) -> None:
    module = sharded(mesh)
    shards = LocalShards(module)
    for vector in shards.vectors:
        vector.fill_(7.0)
    state = module.state_dict()
    assert (state["0.weight"].to_local() == 7.0).all()
    assert (state["2.bias"].to_local() == 7.0).all()
    assert (state["1.running_var"] == 7.0).all()


def test_what_a_learner_owns_is_what_fsdp2_gives_to_it(mesh: DeviceMesh) -> None:
    """The second of two has two rows of five, and one of two."""
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fully_shard(module, mesh=mesh)
    shards = LocalShards(module)
    owned = shards.owned(2)[1]
    assert owned == [(0, 9, 15), (1, 3, 5), (2, 5, 10), (3, 1, 2)]
    lengths = [len(vector) for vector in shards.vectors]
    assert lengths == [end - begin for _, begin, end in owned]


def test_unequal_super_learners_have_no_counterpart_for_a_buffer(
    mesh: DeviceMesh,
) -> None:
    shards = LocalShards(sharded(mesh))
    with pytest.raises(ValueError, match=r"`1.running_mean` must not be .* buffer"):
        shards.owned(4)


def test_unequal_super_learners_are_matched_by_rows(mesh: DeviceMesh) -> None:
    module = nn.Linear(4, 4, bias=False)
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda weight: Shard(1))
    with pytest.raises(ValueError, match=r"`weight` must be sharded by rows"):
        LocalShards(module).owned(4)


def test_a_sharded_model_and_a_whole_one_have_the_same_layout(mesh: DeviceMesh) -> None:
    """So that learners of another size are told from another model."""
    layout = LocalShards(sharded(mesh)).layout()
    assert layout == FlatParameters(network()).layout()


def whole(mesh: DeviceMesh) -> nn.Module:
    return network()


def partly(mesh: DeviceMesh) -> nn.Module:
    module = network()
    fully_shard(module[0], mesh=mesh)
    return module


def replicated(mesh: DeviceMesh) -> nn.Module:
    names = ("replicate", "shard")
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
    fully_shard(module := network(), mesh=both)
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (whole, "`0.weight` must be sharded over the 2 .*, got a whole tensor"),
        (partly, "`1.weight` must be sharded over the 2 .*, got a whole tensor"),
        (replicated, r"`0.weight` must be sharded in one .*Replicate.*\(2, 1\)"),
    ],
)
def test_what_is_not_sharded_over_the_learners_is_refused(
    mesh: DeviceMesh, make: Callable[[DeviceMesh], nn.Module], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_sharding(make(mesh), 2, 1)


def test_a_learner_alone_may_hold_whole_tensors_beside_shards() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        module = network()
        assert not is_sharded(module)
        fully_shard(module[0], mesh=init_device_mesh("cpu", (1,)))
        assert is_sharded(module)
        check_sharding(module, 1, 1)
        lengths = [len(vector) for vector in LocalShards(module).vectors]
        assert lengths == [15, 5, 5, 5, 10, 2, 5, 5]
    finally:
        dist.destroy_process_group()


@needs_fsdp2_on_cpus
def test_weights_that_a_forward_has_gathered_are_let_go(mesh: DeviceMesh) -> None:
    """Otherwise the next forward would not see what is changed in the shards."""
    module = sharded(mesh)
    shards = LocalShards(module)
    module.eval()
    with torch.no_grad():
        module(torch.ones(1, 3))
    assert not is_sharded(module)
    shards.rebind()
    shards.check_views()
    assert is_sharded(module)


def test_a_weight_that_is_replaced_is_an_error_that_names_it(mesh: DeviceMesh) -> None:
    module = sharded(mesh)
    shards = LocalShards(module)
    module[2].extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"`2.extra` was added"):
        shards.check_views()
    buffer = module[1].running_mean
    assert isinstance(buffer, torch.Tensor)
    buffer.data = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"`1.running_mean` was given new storage"):
        shards.rebind()
