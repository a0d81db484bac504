"""Super-learners whose learners share each layer, in real processes.

One launch of four learners makes all trainings; the tests look at what came of them.
Learners 0 and 1 share layers, and so do 2 and 3: each pair reads what one learner of
two would read.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.dials import ModelParallel
from lightning_adpsgd.strategy.checkpoints.sharded import (
    export,
    has_optimizer,
    read_rest,
)
from lightning_adpsgd.weights.shards import local_part
from tests.helpers import PATIENCE, PROGRAM_S
from tests.learners import Trajectory, learners, trainer_of, values
from tests.sharded import (
    LR,
    Run,
    Transformer,
    as_vector,
    needs_fsdp2_on_cpus,
    sequences,
)

pytestmark = needs_fsdp2_on_cpus

NUM_SEQUENCES = 8
# Learners to a layer before a resume and after it, and to a super-learner after it.
RESUMED = [(2, 1, 2), (2, 2, 4), (1, 2, 4), ("ddp", 2, 4)]
# What the plans below cut; each of two learners has the rest.
CUT = ("network.0.weight", "network.0.bias", "network.2.weight")
CUT += ("up.weight", "up.bias", "down.weight")


def strategy(
    communication: Any, size: int = 2, shared_by: int = 2, **dials: Any
) -> HADPSGDStrategy:
    inside = ModelParallel(shared_by)
    return HADPSGDStrategy(
        "complete", communication, size, inside=inside, timeout=PATIENCE, **dials
    )


def whole(communication: Any, **dials: Any) -> HADPSGDStrategy:
    """The same with whole learners: both of a super-learner read the same."""
    return HADPSGDStrategy("complete", communication, 2, timeout=PATIENCE, **dials)


def replicated(module: Any) -> Tensor:
    """What this learner has of the weights that both learners have."""
    every = module.named_parameters()
    kept = (local_part(w) for name, w in every if not name.endswith(CUT))
    return torch.cat([w.detach().flatten() for w in kept])


def fit(
    rank: int,
    strategy: Any,
    module: Any = None,
    resume: Path | None = None,
    save: Path | None = None,
    validates: bool = False,
    **arguments: Any,
) -> Run:
    module, seen = module or Transformer(depth=1), Trajectory(replicated)
    trainer = trainer_of(strategy, 4, callbacks=[seen], **arguments)
    training, validation = (sequences(n, rank // 2, 2) for n in (NUM_SEQUENCES, 4))
    validation = validation if validates else None
    trainer.fit(module, training, validation, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return Run.of(trainer, torch.stack(seen.weights), as_vector(module))


def checkpoints(rank: int, folder: Path) -> dict[Any, Any]:
    """Second epochs of what was saved with other numbers of learners to a layer.

    They begin with other weights than those of the checkpoint.
    """
    saved = {name: folder / f"{name}.ckpt" for name in (1, 2, "ddp")}
    runs: dict[Any, Any] = {
        "two epochs": fit(rank, "ddp", max_epochs=2),
        "ddp": fit(rank, "ddp", save=saved["ddp"]),
        "one": fit(rank, strategy("sync", 4), save=saved[2]),
    }
    fit(rank, strategy("sync", 4, shared_by=1), save=saved[1])
    if rank == 0:
        for shared_by in (1, 2):
            export(saved[shared_by], folder / f"whole{shared_by}.ckpt")
    for before, shared_by, size in RESUMED:
        others, module = strategy("sync", size, shared_by), Transformer(depth=1, seed=7)
        path = saved[before]
        runs[before, shared_by] = fit(rank, others, module, path, max_epochs=2)
    return runs


class Language(nn.Module):
    """An embedding, a two-layer network around a shortcut, and the embedding again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Eleven rows: one of two learners has fewer.
        self.begin, self.norm = nn.Embedding(11, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.begin.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.begin(tokens)
        return self.head(x + self.down(self.up(self.norm(x)).relu()))


BY_SEQUENCE: dict[str, ParallelStyle] = {
    "begin": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


class BySequence(Transformer):
    """All weights are in the plan, and norms see a part of the sequence."""

    shards = True

    @override
    def configure_model(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.network: Any = Language(8).double()
        if (mesh := self.device_mesh) is not None:
            parallelize_module(self.network, mesh["tensor_parallel"], BY_SEQUENCE)
            self.network.tie()
            if self.shards:
                fully_shard(self.network, mesh=mesh["data_parallel"])

    @override
    def loss(self, batch: Tensor) -> Tensor:
        tokens = (2 * batch.sum(-1).abs()).long().clamp(max=10)
        scores = self.network(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(scores, (tokens + 1).flatten() % 11)


class Unsharded(BySequence):
    """What FSDP2 does elsewhere is left to torch's tensors: gradients are sums."""

    shards = False


class Fixed(Transformer):
    """Its gradients are a fixed sequence, whatever the weights."""

    @override
    def configure_model(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            layers = {name: nn.Linear(3, 4) for name in ("up", "rest")}
            layers["down"] = nn.Linear(4, 2)
            self.network: Any = nn.ModuleDict(layers).double()
        if (mesh := self.device_mesh) is not None:
            down = RowwiseParallel(input_layouts=Replicate())
            up = ColwiseParallel(output_layouts=Replicate())
            plan = {"up": up, "down": down}
            parallelize_module(self.network, mesh["tensor_parallel"], plan)

    @override
    def loss(self, batch: Tensor) -> Tensor:
        network = self.network
        both = network["up"](batch), network["rest"](batch)
        turned = network["down"](batch.transpose(1, 2))
        return torch.stack([one.mean() for one in (*both, turned)]).sum()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LR)


PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "half-sync": ("sync", {"mixing_gain": 0.5}),
    "delayed": ("delay_by_one", {"mixing_gain": 0.5}),
}
BY_NORM: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
BY_VALUE = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}


def program(folder: Path, rank: int) -> dict[Any, Any]:
    runs = checkpoints(rank, folder)
    for name, (communication, dials) in PAIRS.items():
        own, other = strategy(communication, **dials), whole(communication, **dials)
        runs[name, "shared"] = fit(rank, own, validates=True)
        runs[name, "whole"] = fit(rank, other, validates=True)
    runs["lightning"] = fit(rank, ModelParallelStrategy(2, 2))
    # Super-learners that begin apart take the weights of the first.
    apart = Transformer(depth=1, seed=rank // 2)
    runs["sync"] = fit(rank, strategy("sync"), apart)
    for name, how in (("norm", BY_NORM), ("value", BY_VALUE)):
        runs[name, "ddp"] = fit(rank, "ddp", **how)
        runs[name] = fit(rank, strategy("sync", 4), **how)
    runs["sequence"] = fit(rank, strategy("sync", 4), BySequence(), **BY_NORM)
    runs["sequence ddp"] = fit(rank, "ddp", BySequence(), **BY_NORM)
    path = folder / "unsharded.ckpt"
    runs["unsharded"] = fit(rank, strategy("sync"), Unsharded(), save=path, **BY_NORM)
    runs["unsharded", "whole"] = fit(rank, whole("sync"), Unsharded(), **BY_NORM)
    runs["fixed ddp"] = fit(rank, "ddp", Fixed(), max_epochs=3)
    without_waiting = strategy("async", cpu_share=1.0)
    runs["async"] = fit(rank, without_waiting, Fixed(seed=rank // 2), max_epochs=3)
    # The last one, since the pairs fail on their own and leave at different times.
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer_of(strategy("sync"), 4).fit(Transformer(depth=1), sequences(8, rank, 4))
    runs["refused"] = str(error.value)
    return runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[Any, Any]]:
    for left_by_a_first_attempt in folder.glob("whole*.ckpt"):
        left_by_a_first_attempt.unlink()
    return values(learners(4, partial(program, folder), PROGRAM_S))


def test_learners_that_share_layers_are_refused_different_batches(
    results: list[dict[Any, Any]],
) -> None:
    """A slower pair may find that the other one has left."""
    asked = "share layers, and so must train on the same batches"
    told = [asked in result["refused"] for result in results]
    assert all(told[:2]) or all(told[2:]), [result["refused"] for result in results]


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", PAIRS)
def test_learners_that_share_layers_do_what_whole_ones_do(
    results: Any, name: str
) -> None:
    for runs in results:
        expected, shared = runs[name, "whole"], runs[name, "shared"]
        assert_same(shared.end, expected.end)
        assert shared.metrics == pytest.approx(expected.metrics)
        assert shared.distance == pytest.approx(expected.distance)


def test_super_learners_have_moved_apart(results: Any) -> None:
    """Otherwise any mixing would pass."""
    one, other = (results[rank]["half-sync", "shared"] for rank in (0, 2))
    assert (one.steps - other.steps).abs().max() > 1e-3
    assert torch.equal(one.end, other.end)


SAME = [("sync", "ddp"), ("one", "ddp"), *((n, (n, "ddp")) for n in ("norm", "value"))]
SAME += [("sequence", "sequence ddp"), ("async", "fixed ddp")]
SAME += [("unsharded", ("unsharded", "whole"))]


@pytest.mark.parametrize(("name", "expected"), SAME)
def test_super_learners_in_step_do_what_ddp_does(
    results: Any, name: str, expected: Any
) -> None:
    """In norms of gradients weights that both learners have count once.

    Of "async" it is the mean that is the same: its gradients do not depend on weights.
    """
    for runs in results:
        assert_same(runs[name].end, runs[expected].end)


@pytest.mark.parametrize("name", ["norm", "value"])
def test_what_is_clipped_is_another_training(results: Any, name: str) -> None:
    assert (results[0][name].end - results[0]["ddp"].end).abs().max() > 1e-3


def test_one_super_learner_is_lightnings_own_strategy(results: Any) -> None:
    for runs in results:
        assert torch.equal(runs["one"].end, runs["lightning"].end)
        assert torch.equal(runs["one"].steps, runs["lightning"].steps)


def test_asynchronous_learners_exchange(results: Any) -> None:
    for runs in results:
        assert runs["async"].statistics.exchanges > 0
        assert runs["async"].statistics.refused == 0
    one, other = (results[rank]["async"].steps for rank in (0, 2))
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["async", ("half-sync", "shared"), "sync"])
def test_what_both_learners_have_is_equal_to_the_bit_after_every_step(
    results: Any, name: Any
) -> None:
    for first in (0, 2):
        one, other = (results[first + n][name].steps for n in (0, 1))
        assert torch.equal(one, other)


@pytest.mark.parametrize("how", [(old, new) for old, new, _ in RESUMED])
def test_a_resume_with_others_to_a_layer_goes_on_as_if_nothing_had_been(
    results: Any, how: Any
) -> None:
    """Weights and momentum, from folders and from one file."""
    for runs in results:
        assert_same(runs[how].end, runs["two epochs"].end)


def test_without_fsdp2_a_checkpoint_is_whole_too(results: Any, folder: Path) -> None:
    path = folder / "unsharded.ckpt"
    read_rest(path)
    export(path, whole := path.with_name("of_unsharded.ckpt"))
    found = Unsharded.load_from_checkpoint(whole).state_dict()
    assert all(value.isfinite().all() for value in found.values())
    assert has_optimizer(path, 0)


@pytest.mark.parametrize("shared_by", [1, 2])
def test_one_file_loads_without_learners(
    results: Any, folder: Path, shared_by: int
) -> None:
    path = folder / f"whole{shared_by}.ckpt"
    module = Transformer.load_from_checkpoint(path, depth=1)
    assert_same(as_vector(module), results[0]["ddp"].end)
