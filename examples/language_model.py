"""A small GPT that learns the help texts which ship with Python, byte by byte.

    python examples/language_model.py --batch-size 16 --steps 300 --width 128

Its two ends share one weight. AdamW warms up over 50 steps of each learner.
"""

import argparse
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd.callbacks import summary

LENGTH, NUM_HEADS = 64, 4


class GPT(pl.LightningModule):
    """A causal transformer over bytes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        shape = (width, NUM_HEADS, 4 * width, 0.0, "gelu", 1e-5, True, True)
        blocks = (nn.TransformerEncoderLayer(*shape) for _ in range(depth))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        nn.init.normal_(self.bytes.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, self.device)
        states = self.bytes(batch[0][:, :-1]) + self.places.weight
        for block in self.blocks:
            states = block(states, mask, is_causal=True)
        scores = self.head(self.norm(states)).mT  # (batch, byte, place)
        return nn.functional.cross_entropy(scores, batch[0][:, 1:])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.parameters(), 3e-3)
        rate = torch.optim.lr_scheduler.LinearLR(adam, 0.02, total_iters=50)
        return [adam], [{"scheduler": rate, "interval": "step"}]


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, and returns the held-out loss of the consensus model in nats a byte."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="adpsgd", help="or ddp, sdpsgd, ...")
    sizes = {"devices": 2, "batch-size": 16, "steps": 300, "width": 64, "depth": 2}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default {size}")
    chosen = parser.parse_args(arguments)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=chosen.devices,
        strategy=chosen.strategy,
        max_steps=chosen.steps,
        logger=False,
        enable_checkpointing=False,
    )
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    rows = text.unfold(0, LENGTH + 1, LENGTH)
    training, held_out = TensorDataset(rows[:-256]), TensorDataset(rows[-256:])
    model = GPT(chosen.width, chosen.depth)
    trainer.fit(model, DataLoader(training, chosen.batch_size, shuffle=True))
    [found] = trainer.validate(model, DataLoader(held_out, 64), verbose=False)
    trainer.print(f"{found['loss']:.3f} nats a byte; {summary(trainer)}")
    return found["loss"]


if __name__ == "__main__":
    main()
