"""Where the figures of a training run go: a CSV file always, Weights & Biases if there.

Weights & Biases runs offline unless the user is logged in; without the package, or
without a network, training goes on with the CSV file.
"""

import importlib.util
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from typing_extensions import override

PROJECT = "lightning-adpsgd"


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


def make_wandb_logger(folder: Path, name: str) -> WandbLogger | None:
    """Online when the user is logged in, else offline; None without the package."""
    if importlib.util.find_spec("wandb") is None:
        rank_zero_info("Weights & Biases is not installed: figures go to CSV only")
        return None
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    logger = WandbLogger(
        name=name,
        project=PROJECT,
        save_dir=folder,
        offline=not _is_logged_in(),
        settings=wandb.Settings(silent=True, console="off", init_timeout=20),
    )
    # Lightning always passes it on; recent versions warn that it has no effect.
    getattr(logger, "_wandb_init", {}).pop("anonymous", None)
    return logger


def _is_logged_in() -> bool:
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except Exception:  # an old version asks in another way, a broken key raises
        return False


class FinishWandb(Callback):
    """Closes the run of Weights & Biases, which a forked learner would leave open."""

    @override
    @rank_zero_only
    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                _finish(logger)


def _finish(logger: Any) -> None:
    run = getattr(logger, "_experiment", None)
    if run is not None:
        run.finish()
