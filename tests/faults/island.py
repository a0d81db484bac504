"""One island as a process: a small Trainer that writes down each step that it makes.

    python -m tests.faults.island URL FOLDER NAME [STEPS [LEARNERS [SILENCE [INSIDE]]]]

The folder gets `name.steps`, a line for each step: its time, the step and how many
members there are; learner 1 of an island of several writes `name-1.steps`. A
computation is a timed wait, so that it costs no core.
"""

import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.islands import island as islands
from lightning_adpsgd.islands.member_list import Heartbeat
from lightning_adpsgd.transport.links import transport
from tests.helpers import PATIENCE_S
from tests.learners import Rows

# Islands go on while a test waits: so long that their steps leave the cores to others.
STEP_S = 0.05
ROWS = 256


class Slow(pl.LightningModule):
    """Pulls its weights to the mean of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.float64))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(STEP_S)
        return (batch - self.weight).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]


class Sharded(pl.LightningModule):
    """A layer that the learners of an island hold together, and a buffer in each.

    Its rows do not divide by 2, so that FSDP2 pads them.
    """

    def __init__(self, has_buffer: bool) -> None:
        super().__init__()
        self.layer: nn.Linear | None = None
        self.seen: Tensor
        zeros = torch.zeros(2, dtype=torch.float64)
        self.register_buffer("seen", zeros, persistent=has_buffer)

    @override
    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = nn.Linear(3, 5, dtype=torch.float64)
            if self.device_mesh is not None:
                mesh = self.device_mesh["data_parallel"]
                fully_shard(self.layer, mesh=mesh)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(STEP_S)
        assert self.layer is not None
        self.seen.add_(batch.mean())
        return self.layer(batch).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.5)


class Diary(pl.Callback):
    """Writes each step down."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        statistics = trainer.strategy.gossip_statistics()  # pyright: ignore
        words = time.monotonic(), trainer.global_step, statistics.members
        print(*words, file=self._file, flush=True)


def wait_for_others(silence_s: float) -> None:
    """Nobody counts as dead that the machine lets stand still for less.

    A goodbye is heard and a connection made all the same: who would be lost by them on
    a machine that has other work to do would be told of as lost.
    """
    # Nobody waits for the list of members that live where none do.
    heartbeat = Heartbeat(silence_s=silence_s, empty_s=1.0)
    object.__setattr__(islands._TIMEOUTS, "heartbeat", heartbeat)
    islands._GOODBYE_S = islands._DRAIN_S = PATIENCE_S
    transport.HANDSHAKE_S = silence_s


def main(
    url: str,
    folder: str,
    name: str,
    steps: str = "-1",
    learners: str = "1",
    silence_s: str = "60",
    inside: Any = "ddp",
    resumed: str = "",
    sizes: str = "",
) -> None:
    place, max_steps = Path(folder), int(steps)
    torch.set_num_threads(1)
    wait_for_others(float(silence_s))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(learners),
        strategy=HADPSGDStrategy(
            super_learner_size=tuple(map(int, sizes.split(","))) if sizes else "node",
            islands=url,
            inside=inside,
        ),
        max_steps=max_steps,
        max_epochs=-1 if max_steps < 0 else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
    )
    own = f"{name}-{trainer.global_rank}" if trainer.global_rank else name
    trainer.callbacks.append(Diary(place / f"{own}.steps"))  # pyright: ignore
    module = Slow() if inside == "ddp" else Sharded(has_buffer=not sizes)
    rows = DataLoader(Rows(ROWS), batch_size=8, shuffle=True)
    trainer.fit(module, rows, ckpt_path=resumed or None)
    weights = _in_words(module)
    print(f"exchanges: {trainer.strategy.gossip_statistics().exchanges}")  # pyright: ignore
    consensus = trainer.strategy.last_consensus  # pyright: ignore
    print(f"ended at {trainer.global_step}: {weights} of {consensus.members}")


def _in_words(module: Slow | Sharded) -> str:
    """The weights, as far as one learner has them."""
    if isinstance(module, Slow):
        return ",".join(f"{value:.6f}" for value in module.weight.tolist())
    return " ".join(f"{value:.6f}" for value in module.seen.tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
