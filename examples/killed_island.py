"""Three islands on this machine, one of which is killed: the others continue.

    python examples/killed_island.py --batch-size 8 --steps 600

They share an epoch of so many batches. Across machines: docs/islands.md.
"""

import argparse
import socket
import time
from collections.abc import Sequence
from multiprocessing import get_context
from threading import Event

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.callbacks import summary
from lightning_adpsgd.islands.rendezvous import serve


class Mean(pl.LightningModule):
    """Learns the mean of the rows, and counts how often it has seen each."""

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self.mean, self.seen = nn.Parameter(torch.zeros(())), seen

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.02)  # in place of the work of a larger model
        self.seen[batch[0]] += 1
        return (batch[0] / len(self.seen) - self.mean).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def island(index: int, url: str, seen: Tensor, batch_size: int) -> None:
    """Trains on batches from the pool of all islands."""
    strategy = HADPSGDStrategy(islands=url, work_sharing=True)
    trainer = pl.Trainer(strategy=strategy, devices=1, max_epochs=1, barebones=True)
    rows = TensorDataset(torch.arange(seen.shape[1]))
    trainer.fit(Mean(seen[index]), DataLoader(rows, batch_size, shuffle=True))
    print(f"island {index} has ended: {summary(trainer)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> Tensor:
    """Returns how often each island has trained on each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=600, help="steps of all islands")
    chosen = parser.parse_args(arguments)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
    serving = host, port, Event()
    get_context("fork").Process(target=serve, args=serving, daemon=True).start()
    seen = torch.zeros(3, chosen.steps * chosen.batch_size, dtype=torch.int64)
    work = f"tcp://{host}:{port}", seen.share_memory_(), chosen.batch_size
    islands: list = start_processes(island, work, 3, False, True, "fork").processes  # pyright: ignore
    deadline = time.monotonic() + 120
    while seen.sum(1).min() < 5 * chosen.batch_size:  # each has made five steps
        if time.monotonic() > deadline:
            raise TimeoutError("an island has not begun within 120 s; see above")
        time.sleep(0.01)
    islands[2].kill()
    before = seen.sum(1).tolist()
    for one in islands:
        one.join(120)
    print(f"rows of each island at the kill {before}, then {seen.sum(1).tolist()}")
    never, twice = (seen.sum(0) == 0).sum(), (seen.sum(0) > 1).sum()
    print(f"of {seen.shape[1]} rows {never} were left out and {twice} seen twice")
    return seen


if __name__ == "__main__":
    main()
