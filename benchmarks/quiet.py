"""Lightning without what a measurement must not contain: logs, checkpoints, bars."""

import logging
from typing import Any

import lightning as L


def quieten() -> None:
    """Leaves only errors of Lightning's messages."""
    for package in ("lightning.pytorch", "lightning.fabric", "torch", "torchft"):
        logging.getLogger(package).setLevel(logging.ERROR)


def quiet_trainer(strategy: Any, **options: Any) -> L.Trainer:
    """A Trainer of one epoch on the CPU, with none of Lightning's extras.

    Args:
        strategy: Of the Trainer.
        options: Of the Trainer too; they come before those that are set here.
    """
    quiet = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        # Programs deal their batches themselves.
        "use_distributed_sampler": False,
    }
    return L.Trainer(strategy=strategy, **{**quiet, **options})
