"""Two optimizers in manual optimization: a GAN that draws points on a circle.

    python examples/gan.py --batch-size 64 --steps 400 --width 64
With DDP it takes `--strategy ddp_find_unused_parameters_true`.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd.callbacks import summary


class GAN(pl.LightningModule):
    """A generator of points from noise, and a critic that tells them from real ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        relu = nn.ReLU()
        self.generator = nn.Sequential(nn.Linear(4, width), relu, nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(2, width), relu, nn.Linear(width, 1))

    def on_fit_start(self) -> None:
        torch.manual_seed(self.global_rank)  # noise of its own for each learner

    def made(self, number: int) -> Tensor:
        return self.generator(torch.randn(number, 4, device=self.device))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        [real], made = batch, self.made(len(batch[0]))
        of_generator, of_critic = self.optimizers()  # pyright: ignore
        mistakes = softplus(self.critic(made.detach())) + softplus(-self.critic(real))
        self.descend(of_critic, mistakes.mean())
        self.descend(of_generator, softplus(-self.critic(made)).mean())

    def descend(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        distances = (self.made(len(batch[0])).norm(dim=1) - 1).abs()
        self.log("distance", distances.mean(), sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(p.parameters(), 2e-3) for p in self.children()]


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, and returns the mean distance of drawn points from the circle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="adpsgd", help="or sdpsgd, ...")
    sizes = {"devices": 2, "batch-size": 64, "steps": 400, "width": 64}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args(arguments)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=chosen.devices,
        strategy=chosen.strategy,
        max_steps=2 * chosen.steps,  # of both optimizers
        logger=False,
        enable_checkpointing=False,
    )
    points = TensorDataset(nn.functional.normalize(torch.randn(4096, 2)))
    trainer.fit(model := GAN(chosen.width), DataLoader(points, chosen.batch_size, True))
    [found] = trainer.validate(model, DataLoader(points, 1024), verbose=False)
    trainer.print(f"{found['distance']:.3f} off the circle; {summary(trainer)}")
    return found["distance"]


if __name__ == "__main__":
    main()
