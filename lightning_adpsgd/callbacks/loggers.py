"""A logger for Weights & Biases that never stands in a training's way.

It runs offline unless the user is logged in, asks nothing, and is left out where the
package is not installed; nothing here needs a network.
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
    """Online when the user is logged in, else offline; None without the package.

    Args:
        folder: Where it keeps its files, in `wandb/`; is made.
        name: Of the run.
        project: Of the runs that belong together.
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
            # Lightning says so in the environment, which the question whether the user
            # is logged in has already made wandb read.
            mode="offline" if offline else "online",
            silent=True,
            console="off",
            init_timeout=20,
        ),
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
