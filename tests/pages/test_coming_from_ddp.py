"""What docs/coming-from-ddp.md shows and promises."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_adpsgd import HADPSGDStrategy
from tests import warm
from tests.helpers import PROGRAM_S, free_port
from tests.pages.blocks import programs

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-ddp.md"


@pytest.mark.slow
def test_the_program_gossips_and_says_so(tmp_path: Path) -> None:
    (program,) = programs(PAGE)
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run(
        [warm.python(), "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stderr
    counts = re.findall(r"learner ([01]): (\d+) exchanges", done.stdout)
    assert sorted(learner for learner, _ in counts) == ["0", "1"]
    assert all(int(count) > 0 for _, count in counts)


class Steps(BoringModel):
    """With momentum, which a checkpoint holds."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("first", "second"), [("ddp", "ours"), ("ours", "ddp")])
def test_a_checkpoint_goes_on_under_the_other_strategy(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    path = tmp_path / "first.ckpt"
    trained = fit(first, Steps(), tmp_path, epochs=1)
    trained.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]["layer.weight"]
    torch.distributed.destroy_process_group()
    begun: list[torch.Tensor] = []

    class Begins(Steps):
        def on_train_start(self) -> None:
            begun.append(self.layer.weight.detach().clone())

    resumed = fit(second, Begins(), tmp_path, epochs=2, ckpt_path=str(path))
    assert resumed.global_step == 2 * trained.global_step
    torch.testing.assert_close(begun[0], saved)


def fit(
    which: str,
    model: BoringModel,
    folder: Path,
    epochs: int,
    ckpt_path: str | None = None,
) -> L.Trainer:
    strategy = HADPSGDStrategy(super_learner_size=1) if which == "ours" else "ddp"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=epochs,
        limit_train_batches=4,
        limit_val_batches=0,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer
