"""LightningCLI: the strategy and its options from YAML and from the command line.

    pip install "jsonargparse[signatures]"
    python examples/cli.py fit --config examples/cli.yaml
    python examples/cli.py fit --config examples/cli.yaml --trainer.max_steps 500 \
        --data.batch_size 10 --trainer.strategy.init_args.gossip_every 4
    python examples/cli.py fit --config examples/cli.yaml --trainer.strategy ddp
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import ArgsType, LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd.callbacks import summary


class Regression(pl.LightningModule):
    """Learns the product of the first two features of eight."""

    def __init__(self, width: int = 64, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        hidden = nn.Linear(8, width), nn.Tanh()
        self.network = nn.Sequential(*hidden, nn.Linear(width, 1), nn.Flatten(0))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


class Products(pl.LightningDataModule):
    """Random vectors and what is to be found of them."""

    def __init__(self, batch_size: int = 32, num_rows: int = 4096) -> None:
        super().__init__()
        self.batch_size, self.num_rows = batch_size, num_rows

    def _rows(self, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(self.num_rows, 8, generator=generator)
        return TensorDataset(features, features[:, 0] * features[:, 1])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self._rows(1), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self._rows(2), 256)


def main(arguments: ArgsType = None) -> float:
    """Does what the command line says, and returns the loss of the consensus model."""
    cli = LightningCLI(Regression, Products, args=arguments, save_config_callback=None)
    trainer = cli.trainer
    [found] = trainer.validate(cli.model, cli.datamodule, verbose=False)
    trainer.print(f"loss {found['loss']:.3f}; {summary(trainer)}")
    return found["loss"]


if __name__ == "__main__":
    main()
