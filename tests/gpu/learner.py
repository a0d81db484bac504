"""One learner of a job for the tests of this folder, in a process of its own.

    python -m tests.gpu.learner '{"accelerator": "cuda", "strategy": {...}, ...}'

It prints what its training ended with, as JSON. A forked process could not use CUDA.
"""

import json
import sys
from typing import Any

import torch
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
        precision=told["precision"],
    )
    rows = loader(told["num_rows"], strategy.global_rank, told["num_learners"])
    module = Single().float()
    trainer.fit(module, rows)
    statistics = strategy.gossip_statistics()
    assert statistics is not None
    print(
        json.dumps(
            {
                "weight": module.weight.tolist(),
                "device": module.where,
                "exchanges": statistics.exchanges,
                "steps": trainer.global_step,
            }
        )
    )


if __name__ == "__main__":
    main()
