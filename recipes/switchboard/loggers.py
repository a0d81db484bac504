"""Where the figures of a training run go: a CSV file always, Weights & Biases if there.

Weights & Biases runs offline unless the user is logged in; without the package, or
without a network, training goes on with the CSV file.
"""

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_adpsgd.callbacks.loggers import make_wandb_logger


def make_loggers(folder: Path, name: str) -> list[Logger]:
    """A CSV logger that writes `folder/metrics.csv`, and one for Weights & Biases.

    Args:
        folder: Made when the first figure is written; must not hold figures already,
            the CSV logger would delete them.
        name: Of the run.
    """
    csv_logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=20)
    wandb_logger = make_wandb_logger(folder, name)
    return [csv_logger] if wandb_logger is None else [csv_logger, wandb_logger]
