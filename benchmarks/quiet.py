"""Lightning without logs, checkpoints and bars, which would disturb a measurement."""

import logging
from typing import Any

import lightning as L


def quieten() -> None:
    """Suppresses Lightning's messages, except errors."""
    for package in ("lightning.pytorch", "lightning.fabric", "torch", "torchft"):
        logging.getLogger(package).setLevel(logging.ERROR)


def quiet_trainer(strategy: Any, **options: Any) -> L.Trainer:
    """A Trainer of one epoch on the CPU, with none of Lightning's extras.

    Args:
        strategy: Strategy of the Trainer.
        options: Further arguments of the Trainer, which precede those set here.
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
