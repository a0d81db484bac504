"""Trainings that begin from checkpoints in shards, with other numbers of learners."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.strategy.checkpoints.format import DamagedCheckpoint
from lightning_adpsgd.strategy.checkpoints.sharded import export
from tests.helpers import PATIENCE, PROGRAM_S
from tests.learners import learners, trainer_of, values
from tests.sharded import (
    Network,
    Transformer,
    as_vector,
    held,
    joined,
    needs_fsdp2_on_cpus,
    sequences,
)

pytestmark = needs_fsdp2_on_cpus


def strategy(size: int) -> HADPSGDStrategy:
    return HADPSGDStrategy(
        "complete", "sync", size, inside="model_parallel", timeout=PATIENCE
    )


class Begin(pl.Callback):
    """Where a training begins."""

    step = -1

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = trainer.global_step


def tie(network: Network) -> None:
    """Leaves the two norms of each of two blocks one weight."""
    for block in network.blocks:
        norms = block.get_submodule("norms")
        first, second = norms.children()
        second.weight = first.weight


class Run(NamedTuple):
    first_step: int
    end: Tensor


def fit(
    rank: int,
    strategy: Any,
    folder: Path | None,
    max_epochs: int,
    ckpt_path: Any = None,
) -> Run:
    """Without a folder it leaves no checkpoint."""
    seed = 0 if ckpt_path is None else 7  # not the weights of the checkpoint
    module, begin = Transformer(seed=seed, prepare=tie), Begin()
    if strategy != "ddp":  # a file of which would be refused
        module.lr = np.float64(module.lr)
    options: Any = {"save_last": True, "save_top_k": -1}
    savers = [ModelCheckpoint(folder, "{epoch}", **options)] if folder else []
    trainer = trainer_of(
        strategy,
        4,
        callbacks=[begin, *savers],
        max_epochs=max_epochs,
        enable_checkpointing=bool(savers),
        default_root_dir=folder,
    )
    trainer.fit(module, sequences(16, rank, 4), ckpt_path=ckpt_path)
    every = [*module.named_parameters(remove_duplicate=False)]
    assert len(every) - len([*module.parameters()]) == 2, "weights were untied"
    return Run(begin.step, joined(module, [held(module)])[0])


def validated(rank: int, ckpt_path: Path) -> float:
    trainer = trainer_of(strategy(2), 4)
    found = trainer.validate(
        Transformer(seed=9, prepare=tie),
        sequences(8, rank, 4),
        str(ckpt_path),
        verbose=False,
    )
    return found[0]["val_loss"]


def program_in(folder: Path) -> Any:
    def program(rank: int) -> dict[Any, Any]:
        one = fit(rank, strategy(4), None, 2)
        half, last = folder / "half", folder / "half" / "last.ckpt"
        first = fit(rank, strategy(4), half, 1)
        loss = validated(rank, last)
        if rank == 0:
            export(last, folder / "whole.ckpt")
        on_one = fit(rank, strategy(1), folder / "on1", 2, last)
        on_four = fit(rank, strategy(4), None, 2, last)
        whole = folder / "whole.ckpt"
        from_file = validated(rank, whole)
        # Super-learners of 2 find the checkpoint themselves, and go on in its folder.
        found = fit(rank, strategy(2), half, 2, "last")
        from_ddp = fit(rank, "ddp", folder / "ddp", 1)
        file = folder / "ddp" / "last.ckpt"
        to_shards = fit(rank, strategy(2), None, 2, file)
        return {
            ("resumed", 1): on_one,
            ("resumed", 4): on_four,
            "one": one,
            "first": first,
            "found": found,
            "from ddp": (from_ddp, to_shards),
            "losses": (loss, from_file),
        }

    return program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[Any, Any]]:
    return values(learners(4, program_in(folder), PROGRAM_S))


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize("how", [("resumed", 1), ("resumed", 4), "found"])
def test_a_resume_with_any_sizes_goes_on_as_if_nothing_had_been(
    results: Any, how: Any
) -> None:
    """Weights and momentum, written by one super-learner of four."""
    for runs in results:
        assert runs[how].first_step == 2
        assert_same(runs[how].end, runs["one"].end)
        assert (runs["first"].end - runs["one"].end).abs().max() > 1e-3


def test_a_checkpoint_of_ddp_goes_on_in_shards(results: Any) -> None:
    for runs in results:
        from_ddp, to_shards = runs["from ddp"]
        assert to_shards.first_step == 2
        assert_same(from_ddp.end, runs["first"].end)
        assert_same(to_shards.end, runs["one"].end)


def test_evaluations_take_a_folder_or_one_file(results: Any) -> None:
    for runs in results:
        from_folder, from_file = runs["losses"]
        assert from_folder == pytest.approx(from_file)


def test_a_shard_that_one_learner_finds_damaged_ends_all_by_name(
    folder: Path, results: Any, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.ckpt"
    shutil.copytree(folder / "half" / "last.ckpt", path)
    shard = path / "__0_0.distcp"  # the second of five files: of two learners, 1 has it
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    def program(rank: int) -> str:
        trainer = trainer_of(strategy(2), 2)
        with pytest.raises((DamagedCheckpoint, OSError)) as error:
            trainer.fit(Transformer(), sequences(8, rank, 2), ckpt_path=path)
        return str(error.value)

    told, found = values(learners(2, program))
    assert f"SHA-256 of {shard.name}" in found
    assert f"{path} was not read: learner 1 raised DamagedCheckpoint: " in told


def test_one_file_loads_without_learners(folder: Path, results: Any) -> None:
    module = Transformer.load_from_checkpoint(folder / "whole.ckpt")
    assert_same(as_vector(module), results[0]["first"].end)
