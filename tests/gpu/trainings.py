"""Learners whose trainings use more of Lightning, for `test_trainings_integration`.

    python -m tests.gpu.trainings '{"accelerator": "cuda", "program": "resumed", ...}'

Each program prints what its learner found, as JSON.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_adpsgd import HADPSGDFabricStrategy, HADPSGDStrategy
from tests.helpers import PATIENCE, free_port
from tests.learners import trainer_of
from tests.sharded import Transformer, sequences

NUM_BATCHES, SAVE_AT = 12, 5


class Recurrent(pl.LightningModule):
    """cuDNN's weights, dropout, momentum and batch statistics.

    Dropout is a layer of its own: that within cuDNN's LSTM has a state which torch does
    not give away, so that no resume draws what the whole run would.
    """

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 8, 2, bidirectional=True, batch_first=True)
        layers = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        self.head = nn.Sequential(*layers)
        self.net = torch.compile(self.head) if compiled else self.head
        self.trajectory: dict[int, list[float]] = {}
        self.validated: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        (rows,) = batch
        return (self.net(self.lstm(rows)[0].mean(1)) - rows.sum((1, 2))).square().mean()

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        flat = nn.utils.parameters_to_vector(self.parameters())
        self.trajectory[self.trainer.global_step] = flat.tolist()

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    @override
    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.callback_metrics["val_loss"].item())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class SaveAt(pl.Callback):
    """Saves once, after `SAVE_AT` steps."""

    def __init__(self, path: str) -> None:
        self._path = path

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == SAVE_AT:
            trainer.save_checkpoint(self._path)


def rows(seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(NUM_BATCHES * 4, 5, 4, generator=generator)
    return DataLoader(TensorDataset(data), 4, pin_memory=True)


def own_rank() -> int:
    return int(os.environ["RANK"])


def strategy_of(told: dict[str, Any]) -> HADPSGDStrategy:
    options = {"super_learner_size": 1, "process_group_backend": "gloo"}
    return HADPSGDStrategy(timeout=PATIENCE, **{**options, **told["strategy"]})


def trainer(told: dict[str, Any], strategy: Any, **options: Any) -> pl.Trainer:
    return trainer_of(
        strategy,
        1,
        num_nodes=told["num_learners"],
        accelerator=told["accelerator"],
        **options,
    )


def resumed(told: dict[str, Any]) -> dict[str, Any]:
    """The weights after each step, of the whole run or of what follows a checkpoint."""
    pl.seed_everything(own_rank(), verbose=False)
    module = Recurrent()
    goes_on = told["goes_on"]
    fitted = trainer(
        told, strategy_of(told), callbacks=[] if goes_on else [SaveAt(told["path"])]
    )
    fitted.fit(module, rows(own_rank()), ckpt_path=told["path"] if goes_on else None)
    return {"trajectory": module.trajectory}


def validated(told: dict[str, Any]) -> dict[str, Any]:
    """Losses of the consensus model, and of each learner's own weights at the end."""
    module = Recurrent(told.get("compiled", False))
    fitted = trainer(
        told,
        strategy_of(told),
        val_check_interval=4,
        gradient_clip_val=told.get("clip"),
        precision=told.get("precision", "32-true"),
    )
    fitted.fit(module, rows(own_rank()), rows(99))
    last = module.trajectory[fitted.global_step]
    return {"losses": module.validated, "steps": fitted.global_step, "last": last}


def by_fabric(told: dict[str, Any]) -> dict[str, Any]:
    """The weights at the end of Fabric's loop."""
    strategy = HADPSGDFabricStrategy(
        "complete",
        "sync",
        super_learner_size=1,
        timeout=PATIENCE,
        process_group_backend="gloo",
    )
    fabric = Fabric(
        accelerator=told["accelerator"],
        devices=1,
        num_nodes=told["num_learners"],
        strategy=strategy,
    )
    fabric.launch()
    torch.manual_seed(0)
    model, optimizer = fabric.setup(
        module := nn.Linear(3, 1), torch.optim.SGD(module.parameters(), 0.1)
    )
    generator = torch.Generator().manual_seed(own_rank())
    for _ in range(NUM_BATCHES):
        optimizer.zero_grad()
        batch = torch.randn(4, 3, generator=generator).to(fabric.device)
        fabric.backward(model(batch).square().mean())
        optimizer.step()
    weights = nn.utils.parameters_to_vector(module.parameters())
    return {"weights": weights.tolist(), "device": str(weights.device)}


def sharded(told: dict[str, Any]) -> dict[str, Any]:
    """The weights of a transformer whose super-learners shard it by FSDP2."""
    module = Transformer()
    options = {"inside": "model_parallel", "super_learner_size": 2}
    told["strategy"] = {**options, **told["strategy"]}
    fitted = trainer(told, strategy_of(told))
    rank, num = own_rank(), told["num_learners"]
    fitted.fit(module, sequences(32, rank, num))
    assert module.network is not None
    weights: list[Any] = [p.full_tensor() for p in module.network.parameters()]  # pyright: ignore
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    return {"weights": flat.tolist(), "steps": fitted.global_step}


class StopAfterAnExchange(pl.Callback):
    """Ends the training once another island has exchanged with this one."""

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = trainer.strategy.gossip_statistics().exchanges > 0


def island(told: dict[str, Any]) -> dict[str, Any]:
    """The exchanges of an island of one learner, a job of its own."""
    alone = {"RANK": 0, "WORLD_SIZE": 1, "GROUP_RANK": 0, "MASTER_PORT": free_port()}
    os.environ |= {name: str(value) for name, value in alone.items()}
    module, strategy = Recurrent(), strategy_of(told)
    fitted = trainer_of(
        strategy,
        1,
        accelerator=told["accelerator"],
        callbacks=[StopAfterAnExchange()],
        max_epochs=-1,
        max_steps=50_000,
    )
    fitted.fit(module, rows(0))
    found = strategy.gossip_statistics()
    assert found is not None
    last = module.trajectory[fitted.global_step]
    return {"exchanges": found.exchanges, "last": last}


PROGRAMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    program.__name__: program
    for program in (resumed, validated, by_fabric, sharded, island)
}


if __name__ == "__main__":
    told: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(PROGRAMS[told["program"]](told)))
