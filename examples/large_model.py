"""A transformer that no learner holds whole: two super-learners of two learners each.

    python examples/large_model.py --batch-size 16 --epochs 3 --width 64 --depth 2
    torchrun --nproc-per-node 4 examples/large_model.py
FSDP2 shards the model; learners average their shards (docs/large-models.md).
"""

import argparse
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.callbacks import summary


class Reverser(pl.LightningModule):
    """Learns to say a sequence of 16 symbols backwards."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width, self.depth, self.network = width, depth, nn.Sequential()

    def configure_model(self) -> None:
        if len(self.network):  # Lightning calls it for each fit and test
            return
        torch.manual_seed(0)  # learners that cut one model must begin with the same
        shape = (self.width, 4, 4 * self.width, 0.0, "relu", 1e-5, True)
        blocks = [nn.TransformerEncoderLayer(*shape) for _ in range(self.depth)]
        ends = nn.Embedding(16, self.width), nn.Linear(self.width, 16)
        self.network = nn.Sequential(ends[0], *blocks, ends[1])
        if self.device_mesh is not None:  # None: a single process, which loads a file
            for part in (*blocks, self.network):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]).mT, batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)


def sequences(number: int, seed: int, batch_size: int = 64) -> DataLoader:
    """Random sequences, and the same backwards."""
    rows = torch.randint(16, (number, 8), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(rows, rows.flip(1)), batch_size)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, continues where it was interrupted, and returns the consensus' loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="large_model", help="folder of checkpoints")
    sizes = {"devices": 4, "batch-size": 16, "epochs": 3, "width": 64, "depth": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args(arguments)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=chosen.devices,
        strategy=HADPSGDStrategy(super_learner_size=2, inside="model_parallel"),
        max_epochs=chosen.epochs,
        callbacks=[ModelCheckpoint(chosen.out, save_last=True)],
        logger=False,
    )
    model, training = Reverser(chosen.width, chosen.depth), (2048, 1, chosen.batch_size)
    trainer.fit(model, sequences(*training), sequences(256, 2), ckpt_path="last")
    trainer.print(f"loss {trainer.callback_metrics['loss']:.3f}; {summary(trainer)}")
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    main()
