"""A transformer that no learner holds whole: two super-learners of two learners each.

    python examples/large_model.py            # four processes on this machine
    torchrun --nproc-per-node 4 examples/large_model.py

Within a super-learner FSDP2 shards the model; between them each learner averages its
shards with those of its counterpart, without waiting. docs/large-models.md explains it.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy


class Reverser(pl.LightningModule):
    """Learns to say a sequence of symbols backwards."""

    def __init__(self, num_symbols: int = 16, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network: nn.Sequential | None = None

    @override
    def configure_model(self) -> None:
        if self.network is not None:  # Lightning calls it for each fit and test
            return
        symbols, width, depth = self.hparams.values()
        torch.manual_seed(0)  # learners that cut one model must begin with the same
        layer = (width, 4, 4 * width, 0.0)
        blocks = [
            nn.TransformerEncoderLayer(*layer, batch_first=True) for _ in range(depth)
        ]
        self.network = nn.Sequential(
            nn.Embedding(symbols, width), *blocks, nn.Linear(width, symbols)
        )
        if self.device_mesh is None:  # a single process, which loads one file
            return
        mesh = self.device_mesh["data_parallel"]
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.network, mesh=mesh)

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Cross-entropy of the symbols, first to last."""
        assert self.network is not None
        scores = self.network(batch[0])
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, prog_bar=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def sequences(number: int, seed: int) -> DataLoader[Any]:
    """Random sequences, and the same backwards."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 16, (number, 8), generator=generator)
    return DataLoader(TensorDataset(rows, rows.flip(1)), batch_size=16)


def main(folder: Path, max_epochs: int = 3, devices: int = 4) -> float:
    """Trains, and returns the loss of the consensus."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=HADPSGDStrategy(
            "ring", "async", super_learner_size=2, inside="model_parallel"
        ),
        max_epochs=max_epochs,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Reverser(), sequences(2048, 1), sequences(256, 2), ckpt_path="last")
    return float(trainer.callback_metrics["val_loss"])


if __name__ == "__main__":
    print(f"validation loss {main(Path('large_model')):.3f}")
