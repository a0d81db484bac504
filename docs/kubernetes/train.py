"""What the manifests run: a small model, from wherever the launcher has put it.

As an island where LIGHTNING_ADPSGD_ISLANDS is set, and as part of one job otherwise.
Checkpoints go to RUN_FOLDER, and the last good one is taken up again.
"""

import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy


class Sum(L.LightningModule):
    """Learns to add eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return mse_loss(self.layer(batch[0]), batch[1])

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.layer(batch[0]), batch[1]), sync_dist=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def rows(number: int) -> DataLoader[tuple[Tensor, ...]]:
    """Random numbers, and their sums."""
    features = torch.randn(number, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), 16)


def main() -> None:
    """Trains with the learners that torchrun has started."""
    folder = Path(os.environ.get("RUN_FOLDER", "runs/train"))
    is_island = "LIGHTNING_ADPSGD_ISLANDS" in os.environ
    if is_island:  # each keeps its own files
        folder /= os.environ.get("JOB_COMPLETION_INDEX", "0")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=1 if is_island else int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=HADPSGDStrategy(),
        max_epochs=int(os.environ.get("EPOCHS", "16")),
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        default_root_dir=folder,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Sum(), rows(2048), rows(256), ckpt_path="last")
    loss = float(trainer.callback_metrics["val_loss"])
    print(f"learner {trainer.global_rank}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
