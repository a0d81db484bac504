"""An image classifier with batch-norm and AdamW.

    python examples/image_classifier.py --batch-size 64 --steps 200 --width 32

The images are made here: ten patterns, each shifted at random and under noise.
"""

import argparse
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd.callbacks import summary


class Classifier(pl.LightningModule):
    """Two convolutions, each with batch-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(64 * width, 10)),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        right = self.network(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)


def images(number: int, seed: int) -> TensorDataset:
    """Images of 3 x 16 x 16 and their classes."""
    patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(patterns, 16, mode="bilinear")
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(10, (number,), generator=generator)
    shifts = torch.randint(16, (number, 2), generator=generator).tolist()
    drawn = zip(classes.tolist(), shifts, strict=True)
    shifted = torch.stack([patterns[c].roll(shift, (1, 2)) for c, shift in drawn])
    noise = 0.5 * torch.randn(shifted.shape, generator=generator)
    return TensorDataset(shifted + noise, classes)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, and returns the accuracy of the consensus model on other images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="adpsgd", help="or ddp, sdpsgd, ...")
    parser.add_argument("--devices", type=int, default=2, help="learners")
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a batch")
    parser.add_argument("--steps", type=int, default=200, help="steps of a learner")
    parser.add_argument("--width", type=int, default=32, help="channels")
    chosen = parser.parse_args(arguments)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=chosen.devices,
        strategy=chosen.strategy,
        max_steps=chosen.steps,
        logger=False,
        enable_checkpointing=False,
    )
    model = Classifier(chosen.width)
    trainer.fit(model, DataLoader(images(4096, 1), chosen.batch_size, shuffle=True))
    [found] = trainer.validate(model, DataLoader(images(512, 2), 256), verbose=False)
    trainer.print(f"accuracy {found['accuracy']:.3f}; {summary(trainer)}")
    return found["accuracy"]


if __name__ == "__main__":
    main()
