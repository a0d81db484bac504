"""Sharded super-learners in real processes, beside whole ones and plain FSDP2 and DDP.

One launch of four learners makes all trainings; the tests look at what came of them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy
from tests.examples.programs import program_of
from tests.helpers import PATIENCE, PROGRAM_S
from tests.learners import Trajectory, learners, trainer_of, values
from tests.sharded import (
    LR,
    Block,
    FromMeta,
    Network,
    Run,
    Transformer,
    held,
    needs_fsdp2_on_cpus,
    sequences,
)

pytestmark = needs_fsdp2_on_cpus

NUM_SEQUENCES = 16


def strategy(
    inside: Any, topology: Any, communication: Any, size: int = 2, **dials: Any
) -> HADPSGDStrategy:
    return HADPSGDStrategy(
        topology, communication, size, inside=inside, timeout=PATIENCE, **dials
    )


def fit(
    rank: int, strategy: Any, module: Transformer | None = None, **arguments: Any
) -> Run:
    module, trajectory = module or Transformer(depth=1), Trajectory(held)
    callbacks = [trajectory, *arguments.pop("callbacks", ())]
    trainer = trainer_of(strategy, 4, callbacks=callbacks, **arguments)
    training, validation = (sequences(n, rank, 4) for n in (NUM_SEQUENCES, 8))
    trainer.fit(module, training, validation)
    return Run.of_shards(trainer, module, trajectory)


class Counted(Transformer):
    num_samples = 0

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_samples += len(batch)
        return super().training_step(batch, batch_idx)


class Unfreeze(pl.Callback):
    """Trains the first layer and block from the second epoch on."""

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        network = pl_module.network
        for layer in (network.begin, network.blocks[0]):
            layer.requires_grad_(trainer.current_epoch > 0)


class FrozenAtFirst(Transformer):
    @override
    def configure_model(self) -> None:
        super().configure_model()
        assert self.network is not None
        self.network.begin.requires_grad_(False)
        self.network.blocks[0].requires_grad_(False)


def num_shared(rank: int) -> int:
    """The samples of this learner out of an epoch that all share."""
    shards = strategy("model_parallel", "complete", "async", work_sharing=True)
    trainer = trainer_of(shards, 4, use_distributed_sampler=True)
    trainer.fit(module := Counted(depth=1), sequences(NUM_SEQUENCES, 0, 1))
    return module.num_samples


def example(folder: Path) -> float:
    """The loss of the program in examples/."""
    return program_of("large_model")(["--out", str(folder), "--epochs", "1"])


def both(*dials: Any, **options: Any) -> dict[str, Callable[[], Any]]:
    """The same strategy with whole learners and with shards."""
    kinds = ("ddp", "model_parallel")
    return {kind: partial(strategy, kind, *dials, **options) for kind in kinds}


PAIRS = {
    "half-sync": both("complete", "sync", mixing_gain=0.5),
    "ring of learners": both("ring", "sync", 1),
    "delayed": both("complete", "delay_by_one", mixing_gain=0.5),
    "adopting": both("complete", "sync", gossip_every=3, after_evaluation="adopt"),
}
FINDING = both("complete", "sync", mixing_gain=0.5, find_unused_parameters=True)
UNFREEZING = {**PAIRS["half-sync"], "ddp": FINDING["ddp"]}


def recompute(network: Network) -> None:
    """Activations of blocks are computed anew in the backward."""
    apply_activation_checkpointing(
        network, check_fn=lambda module: isinstance(module, Block)
    )


def compiled(network: Network) -> None:
    """The first block, without a code generator, which takes longer than the tests."""
    network.blocks[0].compile(backend="aot_eager")


FEATURES: dict[str, dict[str, Any]] = {
    "recomputed": {"prepare": recompute},
    "compiled": {"prepare": compiled},
    "kept gathered": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
FEATURES["mixed precision"] = {"mp_policy": MIXED}


def going_back(folder: Path) -> dict[str, Any]:
    """A callback that trains three steps with other rates, and loads what it saved."""
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    return {"callbacks": [finder], "default_root_dir": folder}


# What two of them are trained with besides, which must not change anything either.
BESIDE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "recomputed": lambda folder: {"val_check_interval": 1},
    "kept gathered": going_back,
}
CLIPPED = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "max_epochs": 2}


def program(folder: Path, rank: int) -> dict[Any, Any]:
    runs: dict[Any, Any] = {}
    for name, kinds in PAIRS.items():
        # Those that others are compared with have two blocks: FSDP2 orders blocks.
        depth = 2 if name == "half-sync" else 1
        for kind, make in kinds.items():
            runs[name, kind] = fit(rank, make(), Transformer(depth=depth))
    for kind, make in UNFREEZING.items():
        arguments = {"max_epochs": 2, "callbacks": [Unfreeze()]}
        runs["unfrozen", kind] = fit(rank, make(), FrozenAtFirst(), **arguments)
    runs["ddp"] = fit(rank, "ddp")
    for size in (2, 4):
        shards = strategy("model_parallel", "complete", "sync", size)
        # Super-learners that begin apart take the weights of the first.
        apart = Transformer(depth=1, seed=rank // size)
        runs["sync", size] = fit(rank, shards, apart)
    half = PAIRS["half-sync"]["model_parallel"]
    runs["clipped ddp"] = fit(rank, "ddp", **CLIPPED)
    shards = strategy("model_parallel", "complete", "sync", 4)
    runs["clipped"] = fit(rank, shards, **CLIPPED)
    for name, options in FEATURES.items():
        # To compile takes seconds: one learner does, the others go beside it.
        plain = name == "compiled" and rank > 0
        module = Transformer() if plain else Transformer(**options)
        beside = BESIDE[name](folder) if name in BESIDE else {}
        runs[name] = fit(rank, half(), module, **beside)
    complete = strategy("model_parallel", "complete", "sync")
    runs["meta"] = fit(rank, complete, FromMeta())
    runs["shared"] = num_shared(rank)
    runs["example"] = example(folder)
    for wire_dtype in (None, torch.int8):
        asynchronous = strategy(
            "model_parallel", "complete", "async", wire_dtype=wire_dtype, cpu_share=1.0
        )
        module = Transformer(depth=1)
        # Stale averages allow half the rate of the others, or less on a busy machine.
        module.lr = LR / 5
        runs["async", wire_dtype] = fit(rank, asynchronous, module, max_epochs=2)
    return runs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("example")
    return values(learners(4, partial(program, folder), PROGRAM_S))


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", [*PAIRS, "unfrozen"])
def test_sharded_learners_do_what_whole_ones_do(results: Any, name: str) -> None:
    for runs in results:
        whole, shards = runs[name, "ddp"], runs[name, "model_parallel"]
        assert_same(shards.steps, whole.steps)
        assert_same(shards.end, whole.end)
        assert shards.metrics == pytest.approx(whole.metrics)
        assert shards.distance == pytest.approx(whole.distance)


def test_the_runs_above_have_moved_apart(results: Any) -> None:
    """Otherwise any mixing would pass."""
    one, other = (results[rank]["half-sync", "model_parallel"] for rank in (0, 2))
    assert (one.steps - other.steps).abs().max() > 1e-3
    assert torch.equal(one.end, other.end)


@pytest.mark.parametrize("size", [2, 4])
def test_a_complete_average_after_each_step_is_ddp(results: Any, size: int) -> None:
    """With four learners it is one super-learner, and plain FSDP2."""
    for runs in results:
        assert_same(runs["sync", size].steps, runs["ddp"].steps)
        assert (runs["sync", size].statistics is None) == (size == 4)


def test_each_learner_sends_its_own_shards_alone(results: Any) -> None:
    for runs in results:
        whole = runs["half-sync", "ddp"].statistics
        shards = runs["half-sync", "model_parallel"].statistics
        assert shards.bytes_sent == pytest.approx(whole.bytes_sent, rel=0.1)


def test_an_evaluation_leaves_no_gathered_weights_behind(results: Any) -> None:
    """One run has an evaluation after each step, the other after its last alone."""
    for runs in results:
        steps = runs["half-sync", "model_parallel"].steps
        assert_same(runs["recomputed"].steps, steps)


def test_clipping_and_accumulation_are_those_of_the_whole_gradient(
    results: Any,
) -> None:
    for runs in results:
        assert_same(runs["clipped"].end, runs["clipped ddp"].end)


@pytest.mark.parametrize("wire_dtype", [None, torch.int8])
def test_asynchronous_learners_exchange_and_end_in_one_mean(
    results: Any, wire_dtype: Any
) -> None:
    first = results[0]["async", wire_dtype]
    for runs in results:
        assert torch.equal(runs["async", wire_dtype].end, first.end)
        assert runs["async", wire_dtype].statistics.exchanges > 0
        assert runs["async", wire_dtype].statistics.refused == 0
    assert first.end.isfinite().all()


@pytest.mark.parametrize("name", FEATURES)
def test_what_fsdp2_can_do_changes_nothing_else(results: Any, name: str) -> None:
    # bfloat16 keeps 8 bits.
    tolerance = 0.05 if name == "mixed precision" else 1e-12
    for runs in results:
        expected = runs["half-sync", "model_parallel"]
        for one, other in zip(runs[name][:2], expected[:2], strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=0)
            assert one.dtype == torch.float64


def test_compute_in_half_precision_leaves_whole_shards(results: Any) -> None:
    for runs in results:
        expected = runs["half-sync", "model_parallel"].end
        error = (runs["mixed precision"].end - expected).abs().max()
        assert 1e-6 < error < 0.05


def test_shards_that_begin_without_memory_are_those_of_the_first(results: Any) -> None:
    first = results[0]["meta"].steps
    assert first.isfinite().all()
    assert first.abs().max() > 0.1
    for runs in results:
        assert_same(runs["meta"].steps, first)


def test_a_callback_can_go_back_to_what_it_has_saved(results: Any) -> None:
    """It has trained three steps with other rates."""
    for runs in results:
        steps = runs["half-sync", "model_parallel"].steps
        assert_same(runs["kept gathered"].steps, steps)


def test_an_epoch_that_is_shared_has_each_sample_once(results: Any) -> None:
    assert sum(runs["shared"] for runs in results) == NUM_SEQUENCES


def test_the_example_learns(results: Any) -> None:
    """A guess has log(16)."""
    for runs in results:
        assert runs["example"] == results[0]["example"] < 2.5
