"""A training loop of one's own, with Fabric.

    python examples/fabric_loop.py --batch-size 32 --steps 200 --width 64
    python examples/fabric_loop.py --strategy ddp

`strategy.consensus()` holds the mean of all learners; the end of the function given to
`launch` is the end of training.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def rows(number: int, seed: int) -> TensorDataset:
    """Vectors, and the product of the first two elements of each."""
    features = torch.randn(number, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(features, features[:, 0] * features[:, 1])


def batches(loader: Iterable[list[Tensor]], steps: int) -> Iterator[list[Tensor]]:
    """So many batches, of as many epochs as they take."""
    while steps > 0:
        for batch, _ in zip(loader, range(steps), strict=False):
            yield batch
            steps -= 1


def train(fabric: Fabric, batch_size: int, steps: int, width: int) -> float:
    """Trains, and returns the loss of the consensus model on other vectors."""
    fabric.seed_everything(1, verbose=False)
    hidden = nn.Linear(8, width), nn.Tanh()
    network = nn.Sequential(*hidden, nn.Linear(width, 1), nn.Flatten(0))
    adam = torch.optim.AdamW(network.parameters(), 1e-2)
    model, optimizer = fabric.setup(network, adam)
    training, held_out = fabric.setup_dataloaders(
        DataLoader(rows(4096, 1), batch_size, shuffle=True),
        DataLoader(rows(512, 2), 256),
    )
    for features, target in batches(training, steps):
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(features), target))
        optimizer.step()
    mean = getattr(fabric.strategy, "consensus", nullcontext)
    with mean() as distances, torch.no_grad():
        losses = [nn.functional.mse_loss(model(x), y) for x, y in held_out]
        loss = float(fabric.all_reduce(torch.stack(losses).mean()))  # pyright: ignore
    fabric.print(f"loss {loss:.3f} after {steps} steps")
    if distances:  # under ddp there are none
        [done] = fabric.strategy.gossip_statistics()  # pyright: ignore
        fabric.print(
            f"{done.exchanges / steps:.2f} exchanges per step, relative consensus "
            f"distance {distances[0].relative_distance:.2g}"
        )
    return loss


def main(arguments: Sequence[str] | None = None) -> float:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="adpsgd", help="or ddp, sdpsgd, ...")
    for name, default in {"devices": 2, "batch-size": 32, "steps": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--width", type=int, default=64)
    chosen = parser.parse_args(arguments)
    place = {"accelerator": "cpu", "devices": chosen.devices}
    fabric = Fabric(strategy=chosen.strategy, **place)
    return fabric.launch(train, chosen.batch_size, chosen.steps, chosen.width)  # pyright: ignore


if __name__ == "__main__":
    main()
