"""Fine-tuning in the manner of LoRA: the weights stay, thin matrices beside them learn.

    python examples/fine_tuning.py --batch-size 32 --steps 200 --rank 4 --width 256

`exchange_frozen=False`: frozen weights are equal everywhere, and do not travel.
"""

import argparse
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.callbacks import summary


class LowRank(nn.Module):
    """A linear layer that stays as it is, and the product of two thin matrices."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(inputs, rank) / 10)
        self.up = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features) + features @ self.down @ self.up


class FineTuned(pl.LightningModule):
    """A network that is frozen but for its head and for what is thin."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        one, two = LowRank(16, width, rank), LowRank(width, width, rank)
        self.network = nn.Sequential(one, nn.ELU(), two, nn.ELU(), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        thin = (weight for weight in self.parameters() if weight.requires_grad)
        return torch.optim.AdamW(thin, 1e-2)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, and returns the loss of the consensus model on other vectors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="lean", help="or adpsgd, ddp, ...")
    sizes = {"devices": 2, "batch-size": 32, "steps": 200, "width": 256, "rank": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args(arguments)
    lean = HADPSGDStrategy("ring", "async", 1, exchange_frozen=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=chosen.devices,
        strategy=lean if chosen.strategy == "lean" else chosen.strategy,
        max_steps=chosen.steps,
        logger=False,
        enable_checkpointing=False,
    )
    features = torch.randn(4608, 16, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(features, features.sum(1, keepdim=True).abs())
    held_out = DataLoader(Subset(rows, range(4096, 4608)), 256)
    training = DataLoader(Subset(rows, range(4096)), chosen.batch_size, shuffle=True)
    trainer.fit(model := FineTuned(chosen.width, chosen.rank), training)
    [found] = trainer.validate(model, held_out, verbose=False)
    trainer.print(f"loss {found['loss']:.3f}; {summary(trainer)}")
    return found["loss"]


if __name__ == "__main__":
    main()
