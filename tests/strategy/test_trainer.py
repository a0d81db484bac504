"""What the strategy takes and refuses, without a process of its own."""

import inspect
import logging
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import LayerSync, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core import rank_zero
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor
from typing_extensions import override

from lightning_adpsgd import HADPSGDFabricStrategy, HADPSGDStrategy
from lightning_adpsgd.dials import Async, Dials, ModelParallel, ReadyPairs
from lightning_adpsgd.registration import NAMES
from lightning_adpsgd.strategy import model_parallel
from lightning_adpsgd.strategy.compatibility import one_gpu_per_learner
from lightning_adpsgd.strategy.model_parallel import ModelParallelInside, check_torch
from lightning_adpsgd.strategy.optimizer_reset import InitialState
from lightning_adpsgd.strategy.options import has_peers
from lightning_adpsgd.topology.partition import Partition
from lightning_adpsgd.virtual.strategy import VirtualHADPSGDStrategy
from tests.learners import (
    Linear,
    consensus_after,
    gossip,
    learners,
    loader,
    trainer_of,
    values,
)
from tests.sharded import needs_fsdp2_on_cpus


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"topology": "star"}, r"`topology` must be one of 'ring'.*got 'star'"),
        ({"topology": [[(0, 1), (0, 2)]]}, "super-learner 0 is in two pairs"),
        ({"communication": "later"}, r"`communication`.*'sync'.*got 'later'"),
        ({"super_learner_size": 0}, r"`super_learner_size`.*at least 1, got 0"),
        (
            {"super_learner_size": "2"},
            r"`super_learner_size` must be a whole number, \"node\" or a sequence of "
            "sizes, got '2' of type str; for example `super_learner_size=2`",
        ),
        ({"super_learner_size": (2, 0)}, r"whole number of at least 1 .*\(2, 0\)"),
        ({"super_learner_size": ()}, r"`super_learner_size` must hold .*got \(\)"),
        (
            {"super_learner_size": (2, 4), "work_sharing": True},
            r"`work_sharing` must not be True .* different sizes, got .*\(2, 4\)",
        ),
        ({"order": "both"}, r"`order` must be one of.*got 'both'"),
        ({"mixing_gain": 0.0}, r"`mixing_gain` must be in \(0, 1\], got 0"),
        ({"mixing_gain": 1.5}, r"`mixing_gain` must be in \(0, 1\], got 1.5"),
        ({"gossip_every": 0}, r"`gossip_every` must be at least 1, got 0"),
        ({"max_staleness": 0}, r"`max_staleness` must be at least 1, got 0"),
        ({"wire_dtype": torch.int16}, r"`wire_dtype` must be one of.*int16"),
        (
            {"wire_dtype": "int16"},
            r"`wire_dtype` must be one of \(None, 'auto', 'float32', .*got 'int16'",
        ),
        ({"cpu_share": 1.5}, r"`cpu_share` must be in \(0, 1\], got 1.5"),
        ({"after_evaluation": "keep"}, r"`after_evaluation`.*'adopt'.*got 'keep'"),
        ({"timeout": timedelta(0)}, r"`timeout` must be positive"),
        (
            {"communication": "sync", "wire_dtype": torch.bfloat16},
            r"`wire_dtype` applies to.*async.*'sync'",
        ),
        (
            {"communication": "delay_by_one", "max_staleness": 3},
            r"`max_staleness` applies to.*async.*'delay_by_one'",
        ),
        ({"inside": "fsdp"}, r"`inside` must be one of.*'model_parallel'.*got 'fsdp'"),
        (
            {"inside": "model_parallel", "save_learners": True},
            r"`save_learners` must be False with `inside=\"model_parallel\"`, got True",
        ),
        (
            {"islands": "tcp://10.0.0.1:29400", "exchange_frozen": False},
            r"`exchange_frozen` must be True with `islands`, got False",
        ),
        (
            {"inside": "model_parallel", "static_graph": True},
            r"`static_graph` must not be set with `inside=\"model_par.*, got True",
        ),
        (
            {"communication": "delay_by_one", "order": "step_then_average"},
            r"`order` must be \"average_then_step\"",
        ),
        (
            {"communication": "ready_pairs", "order": "average_then_step"},
            r"`order` must be \"step_then_average\".*got 'average_then_step'",
        ),
        (
            {"inside": ModelParallel(2), "super_learner_size": (2, 4)},
            r"`super_learner_size` must be one number with `tensor_p.*=2`, got \(2, 4",
        ),
        (
            {"inside": ModelParallel(2), "work_sharing": True},
            r"`work_sharing` must not be True with `tensor_parallel_size=2`",
        ),
        (
            {"inside": ModelParallel(0)},
            "`tensor_parallel_size` must be at least 1, got 0",
        ),
        (
            {"communication": ReadyPairs(max_wait=0.0)},
            r"`max_wait` must be positive and less than the `timeout`.*got 0.0",
        ),
        (
            {"communication": ReadyPairs(max_wait=20.0), "timeout": 10.0},
            r"`max_wait`.*less than the `timeout` of 10 seconds, got 20.0",
        ),
        (
            {"communication": "ready_pairs", "islands": "tcp://10.0.0.1:1"},
            r"`communication` must be 'async' with `islands`.*no island can wait",
        ),
    ],
)
def test_a_dial_out_of_its_bounds_is_refused_with_bound_and_value(
    dials: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        HADPSGDStrategy(**dials)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": 5}, "`topology` .* got .*5|not an option"),
        ({"communication": True}, "`communication` must be one of .* got True"),
        (
            {"super_learner_size": 1.0},
            r"`super_learner_size` must be a whole number, \"node\" or a sequence of "
            r"sizes, got 1\.0 of type float; for example `super_learner_size=2`",
        ),
        ({"super_learner_size": True}, "`super_learner_size` .* got True of type bool"),
        ({"super_learner_size": None}, "`super_learner_size` .* got None"),
        (
            {"super_learner_size": [2, 4.0]},
            r"whole number of at least 1 .*\(2, 4.0\); for example .*=\(2, 4\)",
        ),
        ({"order": 1}, "`order` must be one of .* got 1"),
        ({"mixing_gain": "1"}, "`mixing_gain` must be a number, got '1' of type str"),
        ({"mixing_gain": True}, "`mixing_gain` must be a number, got True"),
        (
            {"gossip_every": 1.5},
            r"`gossip_every` must be a whole number, got 1\.5 .*=1`",
        ),
        ({"gossip_every": None}, "`gossip_every` must be a whole number, got None"),
        (
            {"wire_dtype": "bf16"},
            r"`wire_dtype` must be one of .*'bfloat16'.* got 'bf16'",
        ),
        (
            {"exchange_frozen": 0},
            "`exchange_frozen` must be True or False, got 0 .*`exchange_frozen=True`",
        ),
        ({"cpu_share": "5 %"}, "`cpu_share` must be a number, got '5 %'"),
        ({"work_sharing": 1}, "`work_sharing` must be True, False or None, got 1"),
        ({"after_evaluation": None}, "`after_evaluation` must be one of .* got None"),
        ({"save_learners": "yes"}, "`save_learners` must be True or False, got 'yes'"),
        (
            {"islands": 5},
            "`islands` must be a string or None, got 5 .*`islands='tcp://",
        ),
        ({"seed": "x"}, "`seed` must be a whole number, got 'x' of type str"),
        ({"seed": 0.5}, r"`seed` must be a whole number, got 0\.5"),
        (
            {"timeout": "5 min"},
            "`timeout` must be a timedelta, a number of seconds or None, got '5 min'",
        ),
        ({"timeout": True}, "`timeout` must be .* got True of type bool"),
        ({"timeout": float("inf")}, r"`timeout` .* less than 8\.64e\+13 .*got inf"),
        ({"timeout": float("nan")}, "`timeout` must be positive and .*got nan"),
        ({"timeout": 1e18}, r"`timeout` .* less than 8\.64e\+13 seconds, got 1e\+18"),
        ({"timeout": -1e18}, r"`timeout` must be positive and .*got -1e\+18"),
        (
            {"max_staleness": 2.5},
            r"`max_staleness` must be a whole number or None.*2\.5",
        ),
        (
            {"communication": Async(1.0)},  # type: ignore
            r"`look_ahead` must be .*1\.0",
        ),
        (
            {"inside": ModelParallel(2.0)},  # type: ignore
            r"`tensor_parallel_size` must be a whole number, got 2\.0",
        ),
        (
            {"communication": ReadyPairs("1 s")},  # type: ignore
            "`max_wait` must be a number of seconds or None, got '1 s'",
        ),
    ],
    ids=str,
)
def test_a_wrong_type_is_refused_with_value_and_remedy(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        HADPSGDStrategy(**options)


def test_a_type_that_travels_may_be_given_by_its_name() -> None:
    """As in YAML, and on a command line."""
    for strategy in (HADPSGDStrategy, HADPSGDFabricStrategy, VirtualHADPSGDStrategy):
        by_name = strategy(wire_dtype="bfloat16").dials
        assert by_name == strategy(wire_dtype=torch.bfloat16).dials
        assert by_name.wire_dtype is torch.bfloat16


STRATEGIES = HADPSGDStrategy, HADPSGDFabricStrategy, VirtualHADPSGDStrategy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scalars_of_numpy_are_the_numbers_that_they_are(strategy: Any) -> None:
    numpy = pytest.importorskip("numpy")
    given = {
        "seed": numpy.int64(3),
        "gossip_every": numpy.int32(2),
        "super_learner_size": numpy.int64(2),
        "mixing_gain": numpy.float32(0.5),
        "communication": ReadyPairs(numpy.float32(0.25)),
    }
    plain = {"seed": 3, "gossip_every": 2, "super_learner_size": 2, "mixing_gain": 0.5}
    dials = strategy(**given).dials
    assert dials == strategy(**plain, communication=ReadyPairs(0.25)).dials
    assert all(type(getattr(dials, name)) in (int, float) for name in plain)
    with pytest.raises(TypeError, match="`seed` must be a whole number, got True"):
        strategy(seed=numpy.bool_(True))


def test_sizes_durations_and_truths_of_numpy_are_what_they_are() -> None:
    numpy = pytest.importorskip("numpy")
    sizes = [numpy.int64(2), numpy.int64(4)]
    dials = HADPSGDStrategy(
        super_learner_size=sizes,
        exchange_frozen=numpy.bool_(False),
        timeout=numpy.float32(30),
    ).dials
    assert dials.super_learner_size == (2, 4)
    assert dials.exchange_frozen is False
    assert dials.timeout == timedelta(seconds=30)


@pytest.mark.parametrize("timeout", [30, 30.0, timedelta(seconds=30)])
def test_a_timeout_is_a_duration_or_seconds(timeout: Any) -> None:
    strategy = HADPSGDStrategy(timeout=timeout)
    assert strategy.dials.timeout == strategy._timeout == timedelta(seconds=30)


def test_options_come_in_the_order_in_which_a_user_turns_them() -> None:
    documented = str(HADPSGDStrategy.__init__.__doc__)
    names = [
        name
        for name, parameter in inspect.signature(HADPSGDStrategy).parameters.items()
        if parameter.kind != parameter.VAR_KEYWORD
    ]
    places = [documented.index(f"{name}:") for name in names]
    assert places == sorted(places)
    told = " ".join(documented.split())
    ends = re.search(
        r"up to `(\w+)` are .* first\. .* tuning, and those from `(\w+)`", told
    )
    assert ends is not None
    assert names.index(ends[1]) < names.index("order") < names.index(ends[2])
    assert names[:3] == ["topology", "communication", "super_learner_size"]


def test_the_command_line_tells_each_option_with_its_description() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(HADPSGDStrategy, fail_untyped=False)
    told = " ".join(parser.format_help().replace("--", " --").split())
    for name in inspect.signature(HADPSGDStrategy).parameters.keys() - {"ddp"}:
        first = str(HADPSGDStrategy.__init__.__doc__).partition(f"    {name}: ")[2]
        assert " ".join(first.split()[:4]) in told, name
    assert "--start_method" in told
    assert "--find_unused_parameters" in told


def dials_of(*options: str) -> Dials:
    """What a command line makes of the strategy's options."""
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(HADPSGDStrategy, "strategy", fail_untyped=False)
    chosen = parser.parse_args([f"--strategy.{option}" for option in options])
    return parser.instantiate_classes(chosen).strategy.dials


@pytest.mark.filterwarnings("ignore:.*instantiate_classes")
def test_a_command_line_bounds_the_wait_for_a_partner() -> None:
    dials = dials_of("communication.max_wait=0.5", "topology=complete")
    assert (dials.communication, dials.max_wait) == ("ready_pairs", 0.5)
    dials = dials_of("communication=ready_pairs")
    assert (dials.communication, dials.max_wait) == ("ready_pairs", None)


@pytest.mark.filterwarnings("ignore:.*instantiate_classes")
def test_a_command_line_says_how_many_learners_share_a_layer() -> None:
    ways = ["inside.tensor_parallel_size=2", "inside=ddp"]
    for way, expected in zip(ways, [("model_parallel", 2), ("ddp", 1)], strict=True):
        dials = dials_of(way)
        assert (dials.inside, dials.tensor_parallel_size) == expected


@pytest.fixture
def fifth_of_twelve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the strategy of learner 5, for a size and what is inside."""
    monkeypatch.setattr(HADPSGDStrategy, "world_size", 12)
    monkeypatch.setattr(HADPSGDStrategy, "num_processes", 12)
    monkeypatch.setattr(HADPSGDStrategy, "global_rank", 5)
    return lambda size, inside: gossip(super_learner_size=size, inside=inside)


def test_learners_that_share_a_layer_are_of_one_super_learner(
    fifth_of_twelve: Any,
) -> None:
    with pytest.raises(ValueError, match=r"`tensor_par.*must divide .* 3, got 2"):
        _ = fifth_of_twelve(3, ModelParallel(2)).partition


def test_learners_that_share_a_layer_read_the_same_batches(
    fifth_of_twelve: Any,
) -> None:
    dealt = fifth_of_twelve(4, ModelParallel(2)).distributed_sampler_kwargs
    assert dealt == {"num_replicas": 6, "rank": 2}
    for inside in ("model_parallel", "ddp"):
        dealt = fifth_of_twelve(4, inside).distributed_sampler_kwargs
        assert dealt == {"num_replicas": 12, "rank": 5}


def test_the_order_depends_on_the_communication() -> None:
    orders = {
        communication: HADPSGDStrategy(
            communication=communication
        ).dials.effective_order
        for communication in ("sync", "delay_by_one", "async")
    }
    assert orders == {
        "sync": "step_then_average",
        "delay_by_one": "average_then_step",
        "async": "step_then_average",
    }


def test_a_strategy_travels_to_a_spawned_process() -> None:
    strategy = HADPSGDStrategy("random_ring", super_learner_size=2, mixing_gain=0.5)
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy.dials == strategy.dials


def test_nothing_communicates_before_training() -> None:
    strategy = HADPSGDStrategy()
    assert strategy.gossip_statistics() is None
    assert strategy.last_consensus is None


@pytest.mark.parametrize("name", NAMES)
def test_one_learner_alone_trains_as_plain_sgd(name: str) -> None:
    def program(rank: int) -> Any:
        module = Linear()
        trainer_of(name, 1).fit(module, loader(8))
        return module.weight.detach()

    (final,) = values(learners(1, program))
    torch.testing.assert_close(final, consensus_after(8, 1))


@needs_fsdp2_on_cpus
def test_a_torch_that_shards_on_gpus_alone_is_refused_on_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_torch(torch.device("cpu"))
    monkeypatch.delattr(torch.cpu.Stream, "record_event")
    check_torch(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="on CPUs needs a newer torch than"):
        check_torch(torch.device("cpu"))


def test_a_strategy_makes_the_mesh_of_its_shards_once(
    monkeypatch: pytest.MonkeyPatch, fifth_of_twelve: Any
) -> None:
    """Each mesh has groups, with threads, that `fit` and `validate` can share."""
    made = Mock()
    monkeypatch.setattr(model_parallel, "make_mesh", made)
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda self: None)
    strategy, module = fifth_of_twelve(4, "model_parallel"), Linear()
    strategy._lightning_module = module
    strategy.parallel_devices = [torch.device("cpu")] * 12
    for _ in range(2):
        ModelParallelInside.setup_environment(strategy)
        assert module.device_mesh is strategy.device_mesh
    made.assert_called_once()


def test_two_learners_of_one_gpu_are_told_what_to_do() -> None:
    told = (
        "Last error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
    )
    with (
        pytest.raises(RuntimeError, match='pass `process_group_backend="gloo"`'),
        one_gpu_per_learner(),
    ):
        raise dist.DistBackendError(told)
    with (
        pytest.raises(dist.DistBackendError, match="unhandled system error"),
        one_gpu_per_learner(),
    ):
        raise dist.DistBackendError("unhandled system error")


class OtherLayerSync(LayerSync):
    def apply(self, model: Any) -> Any:
        return model

    def revert(self, model: Any) -> Any:
        return model


class HandMade(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.SyncBatchNorm(3)


class InFsdp1(Linear):
    def __init__(self) -> None:
        super().__init__()
        # Its constructor needs a GPU.
        self.part = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
        torch.nn.Module.__init__(self.part)


class Sharded(Linear):
    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.zeros(4, dtype=torch.float64)
        self.shard = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))


class Unsharded(Linear):
    def configure_model(self) -> None:
        pass

    @override
    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise MemoryError("it does not fit into the memory of its device")


class Lazy(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = torch.nn.LazyLinear(3)


class Redundant(Linear):
    """Each learner steps a part of the weights, and takes the rest from others."""

    @override
    def configure_optimizers(self) -> Any:
        # Only here, because it compiles functions of torch's.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind = torch.optim.SGD
        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=kind, lr=0.1)


@pytest.mark.parametrize(
    ("dials", "arguments", "module", "message"),
    [
        (
            {"super_learner_size": 3},
            {},
            Linear,
            "`super_learner_size` must divide the number of learners 2, got 3",
        ),
        (
            {"super_learner_size": (1, 2)},
            {},
            Linear,
            "`super_learner_size` must be the number of learners 2, got (1, 2), which",
        ),
        ({"model_averaging_period": 2}, {}, Linear, "must not be set, got 2"),
        (
            {"ddp_comm_hook": allreduce_hook},
            {},
            Linear,
            "`ddp_comm_hook` must not be set with `super_learner_size=1`",
        ),
        ({}, {"plugins": [OtherLayerSync()]}, Linear, "got OtherLayerSync"),
        ({}, {}, HandMade, "`norm` must not be a SyncBatchNorm"),
        *(
            ({"inside": inside}, {}, InFsdp1, "`part` must not be a `FullySharded")
            for inside in ("ddp", "model_parallel")
        ),
        ({}, {}, Sharded, "`shard` must be a whole tensor in each learner"),
        ({}, {}, Lazy, "`lazy.weight` has no shape yet"),
        ({}, {}, Redundant, "weights alone, got a ZeroRedundancyOptimizer, which"),
        pytest.param(
            {"inside": "model_parallel", "super_learner_size": 2},
            {},
            Unsharded,
            "`weight` must be sharded over the 2 learners of its super-learner",
            marks=needs_fsdp2_on_cpus,
        ),
        (
            {"inside": "model_parallel", "super_learner_size": 3},
            {},
            Unsharded,
            "`super_learner_size` must divide the number of learners 2, got 3",
        ),
        (
            {"inside": "model_parallel"},
            {"callbacks": [StochasticWeightAveraging(0.1)]},
            Unsharded,
            "`StochasticWeightAveraging` cannot be used with `inside=",
        ),
        pytest.param(
            {"inside": "model_parallel"},
            {"plugins": [TorchCheckpointIO()]},
            Unsharded,
            "`plugins` must hold no CheckpointIO with `inside=",
            marks=needs_fsdp2_on_cpus,
        ),
        (
            {"inside": "model_parallel"},
            {"sync_batchnorm": True},
            Unsharded,
            "`sync_batchnorm` must be False with `inside=",
        ),
    ],
    ids=[
        *("size", "sizes", "period", "hook", "plugin", "norm", "fsdp1", "fsdp1_inside"),
        *("shard", "lazy", "optimizer"),
        *("unsharded", "shards", "average", "checkpoint_io", "sync_batchnorm"),
    ],
)
def test_what_cannot_work_is_refused_at_set_up(
    dials: dict[str, Any], arguments: dict[str, Any], module: Any, message: str
) -> None:
    def program(rank: int) -> None:
        trainer = trainer_of(gossip(**dials), 2, **arguments)
        trainer.fit(module(), loader(8), loader(2))

    for outcome in learners(2, program):
        assert message in outcome.error
        assert outcome.exit_code > 0


def test_batch_norm_is_not_synchronised_on_cpus_in_larger_super_learners() -> None:
    def program(rank: int) -> None:
        strategy = gossip(super_learner_size=2)
        trainer_of(strategy, 4, sync_batchnorm=True).fit(Linear(), loader(8))

    for outcome in learners(4, program):
        assert "`sync_batchnorm` must be False on CPUs" in outcome.error


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bucket_cap": 3}, TypeError, "unexpected keyword argument 'bucket_cap'"),
        ({"process_group": object()}, ValueError, "`process_group` must not be given"),
    ],
)
def test_what_ddp_would_not_take_is_not_taken(
    arguments: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        HADPSGDStrategy(**arguments)


def test_an_unknown_argument_is_that_of_the_class_that_was_called() -> None:
    for kind in (HADPSGDStrategy, HADPSGDFabricStrategy):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) got an unexpected"):
            kind(fooo=1)


def test_options_of_how_ddp_reduces_are_taken_by_learners_on_their_own() -> None:
    def program(rank: int) -> Any:
        module = Linear()
        strategy = gossip(
            find_unused_parameters=True, gradient_as_bucket_view=True, static_graph=True
        )
        trainer_of(strategy, 2).fit(module, loader(8, rank, 2))
        return module.weight.detach()

    for final in values(learners(2, program)):
        torch.testing.assert_close(final, consensus_after(8, 2))


@contextmanager
def told_by_rank_zero() -> Iterator[list[str]]:
    """What is logged once for all learners."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    rank_zero.log.addHandler(handler)
    try:
        yield told
    finally:
        rank_zero.log.removeHandler(handler)


def test_a_reset_leaves_out_no_optimizer() -> None:
    strategy, weights = HADPSGDStrategy(), [torch.nn.Parameter(torch.ones(1))]
    strategy.optimizers = [torch.optim.SGD(weights, 1.0) for _ in range(2)]
    strategy._initial_states = (InitialState(strategy.optimizers[0]),)
    with pytest.raises(ValueError, match="longer"):
        strategy._reset_optimizers()


def test_one_learner_is_told_that_nothing_gossips() -> None:
    """`devices` is 1 on CPUs unless it is given, and nothing else would say so."""
    with told_by_rank_zero() as told:
        assert not has_peers(Partition((1,)))
        assert has_peers(Partition((1, 1)))
    (message,) = told
    assert "`devices`" in message


def test_one_super_learner_alone_says_once_that_it_is_plain_allreduce() -> None:
    def program(rank: int) -> tuple[Any, list[str]]:
        with told_by_rank_zero() as told:
            trainer = trainer_of("hadpsgd", 2)
            trainer.fit(Linear(), loader(8, rank, 2))
        assert isinstance(trainer.strategy, HADPSGDStrategy)
        return trainer.strategy.gossip_statistics(), told

    results = values(learners(2, program))
    assert [statistics for statistics, _ in results] == [None, None]
    told = [message for _, messages in results for message in messages]
    (message,) = [m for m in told if "All 2 learners form one super-learner" in m]
    assert "`super_learner_size`" in message


@pytest.mark.parametrize("limits", [{"limit_train_batches": 0}, {"max_epochs": 0}])
def test_trainings_without_a_batch_leave_no_process_groups(
    limits: dict[str, int],
) -> None:
    """Each has threads and sockets, and a sweep may have a thousand of them."""

    def program(rank: int) -> list[int]:
        def num_groups() -> int:
            trainer = trainer_of(gossip("ring", "sync"), 2, **limits)
            trainer.fit(Linear(), loader(8, rank, 2))
            return len(dist.distributed_c10d._world.pg_map)

        return [num_groups() for _ in range(3)]

    assert values(learners(2, program)) == [[2, 2, 2]] * 2


def test_a_super_learner_of_one_beside_larger_ones_leaves_no_process_groups() -> None:
    """torch makes each group in all its learners, and it needs none of its own."""

    def program(rank: int) -> list[int]:
        def num_groups() -> int:
            trainer = trainer_of(gossip("ring", "sync", super_learner_size=(2, 1)), 3)
            trainer.fit(Linear(), loader(6, rank, 3))
            return len(dist.distributed_c10d._world.pg_map)

        return [num_groups() for _ in range(3)]

    assert all(len({*nums}) == 1 for nums in values(learners(3, program)))


def test_statistics_outlive_the_training() -> None:
    def program(rank: int) -> Any:
        strategy = gossip("complete", "sync")
        trainer_of(strategy, 2).fit(Linear(), loader(8, rank, 2))
        statistics, consensus = strategy.gossip_statistics(), strategy.last_consensus
        return statistics.exchanges, statistics.bytes_sent, consensus.distance

    # Four steps of three float64 weights; after a complete average all are equal.
    for exchanges, bytes_sent, distance in values(learners(2, program)):
        assert (exchanges, bytes_sent) == (4, 4 * 3 * 8)
        assert distance == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("precision", "topology", "communication"),
    [
        ("32-true", "ring", "async"),
        ("bf16-mixed", "ring", "async"),
        ("bf16-true", "ring", "async"),
        ("bf16-true", "ring", "sync"),
        ("bf16-true", "complete", "delay_by_one"),
    ],
)
def test_other_precisions_train(
    precision: Any, topology: str, communication: str
) -> None:
    class Single(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.weight.data = self.weight.data.float()

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return super().loss(batch.to(self.weight.dtype))

    def program(rank: int) -> Any:
        module = Single()
        strategy = gossip(topology, communication)
        trainer_of(strategy, 2, precision=precision).fit(module, loader(16, rank, 2))
        return module.weight.detach().double()

    finals = values(learners(2, program))
    assert torch.equal(finals[0], finals[1])
    torch.testing.assert_close(finals[0], consensus_after(16, 2), atol=0.01, rtol=0)


def test_the_strategy_is_one_of_lightnings_own_kind() -> None:
    """Which is what Lightning asks before it samples or reduces for many learners."""
    assert isinstance(HADPSGDStrategy(), DDPStrategy)
