"""One learner of a job for the tests of this folder, in a process of its own.

    python -m tests.gpu.learner '{"accelerator": "cuda", "strategy": {...}, ...}'

It prints what its training ended with, as JSON. A forked process could not use CUDA.
"""

import json
import sys
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.amp.grad_scaler import GradScaler
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy
from tests.helpers import PATIENCE
from tests.learners import Linear, loader, trainer_of


class Single(Linear):
    """In single precision; notes where it trained."""

    where = ""

    @override
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        self.where = str(self.weight.device)
        return super().loss(batch.float())


def precision_of(told: dict[str, Any]) -> dict[str, Any]:
    """The Trainer's arguments for a precision, with the scale that a gradient gets."""
    scale, precision = told["scale"], told["precision"]
    if scale is None:
        return {"precision": precision}
    scaler = GradScaler(told["accelerator"], init_scale=scale)
    return {"plugins": MixedPrecision(precision, told["accelerator"], scaler)}


def main() -> None:
    """Trains as the environment says and prints the final weights."""
    told: dict[str, Any] = json.loads(sys.argv[1])
    dials = told["strategy"]
    if wire := dials.pop("wire_dtype", None):
        dials["wire_dtype"] = getattr(torch, wire)
    strategy = HADPSGDStrategy(timeout=PATIENCE, **dials)
    trainer = trainer_of(
        strategy,
        told["devices"],
        num_nodes=told["num_nodes"],
        accelerator=told["accelerator"],
        **precision_of(told),
    )
    rows = loader(told["num_rows"], strategy.global_rank, told["num_learners"])
    module = Single().float()
    trainer.fit(module, rows)
    statistics = strategy.gossip_statistics()  # of a learner alone there are none
    print(
        json.dumps(
            {
                "weight": module.weight.tolist(),
                "device": module.where,
                "exchanges": statistics.exchanges if statistics else 0,
                "steps": trainer.global_step,
            }
        )
    )


if __name__ == "__main__":
    main()
