"""Islands that share the batches of each epoch, as processes that keep a diary.

Each writes a line for every batch that it has trained on: the epoch, and the numbers of
its rows.
"""

import functools
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.epochs.pool import IslandPool, PoolTimeouts
from lightning_adpsgd.islands import island as islands
from lightning_adpsgd.islands.member_list import Heartbeat
from lightning_adpsgd.strategy import work_sharing
from tests.faults.world import World, of_torchrun
from tests.learners import Rows

PATIENT = PoolTimeouts(answer_s=60.0, end_s=60.0, start_s=60.0)
"""For tests that count: a machine that stalls is no rendezvous that is away."""


class Numbered(Rows):
    """Rows that begin with their own number."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rows[:, 0] = torch.arange(length)


class Slow(pl.LightningModule):
    """Pulls its weights to the mean of the rows; each step takes a while."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self._step_s = step_s

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self._step_s)
        return (batch - self.weight).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-6)


class Diary(pl.Callback):
    """Writes each batch down."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        rows = ",".join(str(row) for row in batch[:, 0].int().tolist())
        with self._path.open("a") as file:
            print(trainer.current_epoch, rows, file=file)


def share(
    url: str, folder: str, name: str, settings: dict[str, Any], times: PoolTimeouts
) -> None:
    """Trains; `settings` are those of `SharingWorld.share`."""
    place, options = Path(folder), dict(settings)
    torch.set_num_threads(1)
    # Nobody waits for the list of members that live where none do.
    object.__setattr__(islands._TIMEOUTS, "heartbeat", Heartbeat(empty_s=1.0))
    work_sharing.IslandPool = functools.partial(  # pyright: ignore
        IslandPool, times=times
    )
    rows, step_s = options.pop("rows"), options.pop("step_s", 0.02)
    loader = DataLoader(
        Numbered(rows), batch_size=2, shuffle=True, num_workers=options.pop("read", 0)
    )
    num_learners, path = options.pop("learners", 1), options.pop("ckpt_path", None)
    callbacks = options.pop("callbacks", [])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=num_learners,
        strategy=HADPSGDStrategy(islands=url, work_sharing=True),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
        callbacks=[Diary(place / f"{name}.rows"), *callbacks],
        **options,
    )
    trainer.fit(Slow(step_s), loader, ckpt_path=path)
    print("has ended in epoch", trainer.current_epoch)


class SharingWorld(World):
    """Islands that share one pool."""

    def share(self, name: str, times: PoolTimeouts = PATIENT, **settings: Any) -> None:
        """Starts an island.

        Args:
            name: name of its diary.
            times: durations of waiting of its pool.
            settings: `rows` of the data set, seconds of a step `step_s`, `learners`,
                workers that `read`; the rest goes to the Trainer.
        """
        self._processes[name] = []
        variables = of_torchrun(settings.get("learners", 1))
        trains = share, self.url, str(self._folder), name, settings, times
        for rank in range(settings.get("learners", 1)):
            own = f"{name}-{rank}" if rank else name
            self._start(name, own, "", variables(rank), *trains)

    def rows(self, name: str, epoch: int = 0) -> list[list[int]]:
        """The batches on which an island has trained in an epoch."""
        path = self._folder / f"{name}.rows"
        lines = path.read_text().splitlines() if path.exists() else []
        words = (line.split() for line in lines)
        return [[int(r) for r in w[1].split(",")] for w in words if int(w[0]) == epoch]
