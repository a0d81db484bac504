"""A logger for Weights & Biases that never interrupts a training.

It runs offline unless the user is logged in, and never prompts. It needs neither the
package nor a network.
"""

import importlib.util
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from typing_extensions import override

PROJECT = "lightning-adpsgd"


def make_wandb_logger(
    folder: str | Path, name: str, project: str = PROJECT
) -> WandbLogger | None:
    """A logger, online if the user is logged in; None without the package.

    Args:
        folder: Folder for its files, which lie in `wandb/`; created if missing.
        name: Name of the run.
        project: Name of the run's project.
    """
    if importlib.util.find_spec("wandb") is None:
        rank_zero_info("Weights & Biases is not installed: no figures go there")
        return None
    import wandb

    Path(folder).mkdir(parents=True, exist_ok=True)
    offline = not _is_logged_in()
    logger = WandbLogger(
        name=name,
        project=project,
        save_dir=folder,
        offline=offline,
        settings=wandb.Settings(
            # Lightning sets it in the environment, which wandb has already read to tell
            # whether the user is logged in.
            mode="offline" if offline else "online",
            silent=True,
            console="off",
            init_timeout=20,
        ),
    )
    # Lightning always passes it; recent versions warn that it has no effect.
    getattr(logger, "_wandb_init", {}).pop("anonymous", None)
    return logger


def _is_logged_in() -> bool:
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except Exception:  # old versions have no such argument, a broken key raises
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
